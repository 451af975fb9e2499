"""OLMoE: a mixture-of-experts model, softmax routing without renormalisation, QK-norm over the full projection."""
