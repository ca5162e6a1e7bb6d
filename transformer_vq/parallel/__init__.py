"""Parallel training: the process mesh, and how each rank shares in a training step."""
