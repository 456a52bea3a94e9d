"""The command line: one module per verb, whose body is parse, one flow call, render."""
