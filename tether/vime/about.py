"""What Tether keeps in the framework's samples, besides their own fields. Imports nothing."""

ABOUT = "tether"
"""Key of a sample's metadata: its seed, weight version, why it ended, policy, and attempts so far."""
