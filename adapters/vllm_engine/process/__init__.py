"""The engine process: vLLM, its loop, its part in a publication, and what it says to its client."""
