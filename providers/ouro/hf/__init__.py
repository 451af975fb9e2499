"""Ouro for transformers: files that travel with an export and need nothing of this project."""
