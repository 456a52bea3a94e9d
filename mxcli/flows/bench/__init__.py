"""Benchmarks of this machine: quantization kernels and block-scaled matrix products."""
