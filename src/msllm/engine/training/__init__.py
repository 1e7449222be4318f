"""Training: the loop, its state and checkpoints, metrics and where they go."""
