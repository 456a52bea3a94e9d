"""Real trained weights, from packages of the registry."""
