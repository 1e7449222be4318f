"""Generation: continuing a text with a trained model."""
