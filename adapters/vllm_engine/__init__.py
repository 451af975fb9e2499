"""vLLM behind the engine contract: a process of its own, traces, scores, seeds, and weights that change whole."""
