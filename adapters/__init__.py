"""Adapters between Megatron-Core, vLLM and Hugging Face directories. Nothing in here names a model."""
