"""Checks of quantized checkpoints from any producer, and differences between two of them."""
