"""Recommendations: the best format for each layer under a target."""
