"""Which part of the model the generated tokens of each update run, as the text that goes to the engine with a request.

The texts mean what the provider's `trace.parse_policy` says; a model without loops has only "full". A schedule names
one text per update; it is part of the run contract, so a resumed run goes on in the middle of a cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FULL = "full"
POLICIES = (FULL, "fixed", "early", "delayed")
"""What a policy's text begins with."""


@dataclass(frozen=True)
class DepthSchedule:
    """The policies of a run, repeated for ever."""

    policies: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> DepthSchedule:
        """Reads the setting `depth`: one policy, or cycle:3,early:0.8:2:4 for fixed:3 and that one by turns.

        Raises:
            ValueError: the text is none of these. Whether a policy fits the model is for `check` to say.
        """
        kind, _, rest = text.partition(":")
        if kind == "cycle":
            parts = [f"fixed:{int(part)}" if part.isdecimal() else part for part in rest.split(",")]
            if all(part.partition(":")[0] in POLICIES and part != "fixed:0" for part in parts):
                return cls(tuple(parts))
        elif kind in POLICIES:
            return cls((text,))
        raise ValueError(
            f"depth: got {text!r}, expected full, fixed:K, early:THRESHOLD:MIN:MAX, delayed:THRESHOLD:MIN:MAX "
            "or cycle:A,B,... of these and of numbers of loops"
        )

    def plan(self, update: int) -> str:
        """The policy of an update; updates count from 1."""
        return self.policies[(update - 1) % len(self.policies)]

    def check(self, parse_policy: Callable[[str], object]) -> None:
        """Raises ValueError, all in one message, for policies that `parse_policy` refuses for this model."""
        problems = []
        for policy in dict.fromkeys(self.policies):
            try:
                parse_policy(policy)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
