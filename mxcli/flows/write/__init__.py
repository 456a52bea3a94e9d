"""Checkpoints written and read back: arranged in files, quantized, dequantized, recorded."""
