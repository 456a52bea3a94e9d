"""Checks of quantized checkpoints, anyone's, and differences between two of them."""
