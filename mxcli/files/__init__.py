"""Reads and writes checkpoints; never rounds a value."""
