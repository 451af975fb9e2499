"""The constants of `digest`, whose docstring says what they are, for every loop that computes it."""

MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97)
PLACE, ODD, HIGH = 0xD1B54A33, 0xABC98389, 0x8CB92BA7
