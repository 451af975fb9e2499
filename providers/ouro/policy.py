"""How many loops a token runs, as a text that settings, requests and config.json share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DepthPolicy:
    """Depth of a generated token: min(max(d, min_loops) + delay, max_loops), the rule having fired at loop d."""

    min_loops: int
    max_loops: int
    threshold: float = 1.0
    delay: int = 0

    @classmethod
    def parse(cls, text: str, num_loops: int) -> DepthPolicy:
        """Reads "full", "fixed:K", "early:THRESHOLD:MIN:MAX" or "delayed:THRESHOLD:MIN:MAX".

        Raises:
            ValueError: the text is none of these, or not 1 <= MIN <= MAX <= num_loops, or THRESHOLD is not > 0.
        """
        kind, *rest = text.split(":")
        try:
            if kind == "full" and not rest:
                policy = cls(min_loops=num_loops, max_loops=num_loops)
            elif kind == "fixed":
                (loops,) = map(int, rest)
                policy = cls(min_loops=loops, max_loops=loops)
            elif kind in ("early", "delayed"):
                threshold, low, high = rest
                policy = cls(
                    min_loops=int(low), max_loops=int(high), threshold=float(threshold), delay=int(kind == "delayed")
                )
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"depth: got {text!r}, expected full, fixed:K, early:THRESHOLD:MIN:MAX or delayed:THRESHOLD:MIN:MAX"
            ) from None
        if not 1 <= policy.min_loops <= policy.max_loops <= num_loops:
            raise ValueError(f"depth: got {text!r}, expected 1 <= MIN <= MAX <= {num_loops} loops")
        if not policy.threshold > 0:
            raise ValueError(f"depth: got {text!r}, expected a threshold > 0")
        return policy

    @property
    def vector(self) -> tuple[float, float, float, float]:
        """(min_loops, max_loops, threshold, delay), as `DepthPlan` takes them."""
        return float(self.min_loops), float(self.max_loops), self.threshold, float(self.delay)
