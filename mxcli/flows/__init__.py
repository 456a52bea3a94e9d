"""The verbs' work, in wings: a module or package per thing that a user wants done."""
