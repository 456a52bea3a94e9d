"""Facts about models, as the code that runs them states them: roles, fused sets, stacks, towers."""
