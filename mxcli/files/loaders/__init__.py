"""Programs that load quantized checkpoints, and what each of them does with every layout: one table of rules."""
