"""What programs that train leave: the model among their state, the names of its wrappers, formats of several parts."""
