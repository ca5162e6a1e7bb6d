"""Training: optimizers, the training step, the loop, and run folders."""
