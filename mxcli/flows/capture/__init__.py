"""Recordings of the inputs, gradients and weights of a model's linear layers."""
