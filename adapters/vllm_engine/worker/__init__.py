"""Inside a vLLM worker: the model's step, traces, scores, experts, and weights that change whole."""
