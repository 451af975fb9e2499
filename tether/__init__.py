"""What people run: the GRPO driver, its settings, data, rewards and files."""
