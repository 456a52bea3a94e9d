"""Models of torch whose layers compute as a format, a recipe or a training recipe says."""
