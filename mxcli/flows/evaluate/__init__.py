"""The loss of a model under formats, recipes and quantized checkpoints."""
