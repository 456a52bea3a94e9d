"""Runs the kernels on a device and says why it chose it."""
