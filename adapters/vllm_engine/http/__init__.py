"""A vLLM server that somebody else started."""
