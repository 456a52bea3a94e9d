"""Recording what the linear layers of a model are handed, and what comes back to them, step by step."""
