"""Hugging Face directories as streams of physical tensors: reading, checking, digests and export."""
