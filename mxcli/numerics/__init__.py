"""What a format, a rule, a count and a metric are: rows and frozen records. Standard library only."""
