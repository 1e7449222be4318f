"""Published weights: reading them, and putting them into a model."""
