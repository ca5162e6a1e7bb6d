"""Training: optimizers, updates, runs."""
