"""An engine of several processes, some for prompts and some for answers."""
