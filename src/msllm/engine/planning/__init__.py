"""Planning: what a run will need, known before it starts."""
