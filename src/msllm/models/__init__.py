"""FACTS about models: shapes, catalog, counts, weight names. Nothing here imports torch."""
