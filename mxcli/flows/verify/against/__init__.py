"""Checks of a quantized checkpoint with its source: originals, expected bytes, and the error of other ones."""
