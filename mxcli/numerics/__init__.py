"""Definitions of formats, rules, statistics and metrics: rows and frozen records. Standard library only."""
