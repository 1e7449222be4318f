"""Families of models against independent references: logits, losses, gradients, weights."""
