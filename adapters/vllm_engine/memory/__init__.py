"""Where weights wait and travel: memory that a trainer and the workers of an engine both map."""
