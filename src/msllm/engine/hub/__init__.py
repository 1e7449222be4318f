"""Published models: what their repositories hold, and fetching it."""
