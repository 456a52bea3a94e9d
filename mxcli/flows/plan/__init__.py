"""Decisions from headers alone: which tensors are quantized, in which scheme, and why."""
