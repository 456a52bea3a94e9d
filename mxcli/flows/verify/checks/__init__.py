"""Checks of a quantized checkpoint by itself: tables of rows, one module for each thing that is looked at."""
