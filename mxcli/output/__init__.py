"""Finished reports in; text, JSON and CSV out. Nothing here computes a result or prints."""
