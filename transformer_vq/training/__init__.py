"""Training: optimizers with the paper's semantics."""
