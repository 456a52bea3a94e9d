"""Checks of quantized checkpoints, as rows: of the files, of the configuration, of values, of sets, of the source."""
