"""One module per thing a user wants done; knows no terminal."""
