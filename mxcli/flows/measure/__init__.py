"""Measurements of tensors under one scheme or several: errors, scales, totals, limits."""
