"""Ouro, the looped language model: N physical layers that run `total_ut_steps` times over the same weights."""
