"""Errors of the products of captured layers: Y = X W^T, dX = dY W and dW = dY^T X."""
