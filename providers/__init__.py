"""One package per model family, each with the same file names; `registry` finds them by Hugging Face model type."""
