"""Data: reading text, tokenizing it into indexed files, and serving batches with exact state."""
