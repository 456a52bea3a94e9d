"""Files of programs that train: the model among their state, names of wrappers, formats of several parts."""
