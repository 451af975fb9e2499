"""What an Ouro trace means: how many loops each token ran, and the rule that decides it. Shared by trainer and engine.

With T loops in all and P prompt tokens, row p of a trace is the number of loops of input token p: T for each prompt
token, and for generated token i (row P + i) the number it ran as an input when it produced token i + 1. The last
generated token never was an input and has no row. Hence `exit_depths[0] == T` and `exit_depths[i + 1]` is row P + i.

Exit rule, in fp32: chance_d = sigmoid(gate(h_d)); the chance to leave at loop d is chance_d * prod_{j<d}(1 - chance_j);
the rule fires at the first d where the sum of these reaches the threshold. A threshold >= 1 never fires, by
definition: in fp32 the sum can reach 1.0 although no exit is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.contract import Trace
from providers.ouro.config import OuroConfig
from providers.ouro.policy import DepthPolicy

KIND = "loops"


class DepthPlan:
    """Which tokens of one engine step run each loop: host-side bookkeeping over arrays, no loop over tokens.

    Tokens with a recorded depth follow it; the others follow their request's policy. The model asks before a loop who
    might leave after it (their keys and values must be kept) and tells after it for whom the rule has fired.
    """

    def __init__(self, *, recorded: np.ndarray, policies: np.ndarray, reach: np.ndarray) -> None:
        """
        Args:
            recorded: [n] integers, the depth a token must have, 0 where the policy decides.
            policies: [n, 4] floats, each token's `DepthPolicy.vector`.
            reach: [n] integers, the deepest loop in which a later token may read a token's keys and values.
        """
        self.low, self.high = policies[:, 0].astype(np.int64), policies[:, 1].astype(np.int64)
        self.threshold, self.delay = policies[:, 2].astype(np.float32), policies[:, 3].astype(np.int64)
        self.reach = reach
        gated = (self.low < self.high) & (self.threshold < 1)
        self.depth = np.where(recorded > 0, recorded, np.where(gated, 0, self.high))
        self.undecided = self.depth == 0
        self.active = np.arange(len(recorded))

    @property
    def needs_gate(self) -> bool:
        """True if an active token's depth still depends on the gate."""
        return bool(self.undecided[self.active].any())

    def may_leave(self, loop: int) -> np.ndarray:
        """Indices into the active tokens: those that may leave after this loop while deeper planes can be read."""
        rows = self.active
        leaving = np.where(self.undecided[rows], self.low[rows] <= loop, self.depth[rows] == loop)
        return np.flatnonzero(leaving & (self.reach[rows] > loop))

    def finish(self, loop: int, mass: np.ndarray | None) -> np.ndarray:
        """Ends a loop: [active] bool, who leaves now. `mass`: [active] fp32 exit mass so far, None without a gate.

        Updates `active` to those that stay.
        """
        rows = self.active
        if mass is not None:
            undecided = self.undecided[rows]
            fired = undecided & (mass >= self.threshold[rows])
            decided = np.minimum(np.maximum(loop, self.low[rows]) + self.delay[rows], self.high[rows])
            self.depth[rows] = np.where(fired, decided, self.depth[rows])
            exhausted = undecided & ~fired & (self.high[rows] <= loop)
            self.depth[rows] = np.where(exhausted, loop, self.depth[rows])
            self.undecided[rows] = undecided & ~fired & ~exhausted
        leaving = ~self.undecided[rows] & (self.depth[rows] <= loop)
        self.active = rows[~leaving]
        return leaving


def parse_policy(text: str, config: OuroConfig) -> DepthPolicy:
    """Raises ValueError for a text that is no policy of this model; see `DepthPolicy.parse`."""
    return DepthPolicy.parse(text, config.num_loops)


def depth_entries(text: str, config: OuroConfig) -> dict[str, str]:
    """What config.json must say, besides what it says already, for this policy to be the directory's own.

    Raises:
        ValueError: as `parse_policy` does.
    """
    wanted, now = parse_policy(text, config), parse_policy(config.default_depth, config)
    return {} if wanted == now else {"depth_policy": text}


def to_trace(loops: Sequence[int]) -> Trace:
    """A contract trace of the loops each input token ran."""
    return Trace(KIND, (len(loops),), bytes(loops))


def rows_of(
    trace: Trace | None, *, num_prompt_tokens: int, num_tokens: int, config: OuroConfig, where: str
) -> np.ndarray:
    """The loops [num_tokens - 1] uint8 of the input tokens, checked.

    Raises:
        ValueError: the trace is missing, of another kind or length, holds a value outside 1..num_loops, or a prompt
            token did not run all loops; names `where` (the sample) and the first bad position.
    """
    if trace is None or trace.kind != KIND:
        got = "no trace" if trace is None else f"a trace of {trace.kind!r}"
        raise ValueError(f"{where}: got {got}, expected one of {KIND!r}")
    if trace.shape != (num_tokens - 1,):
        raise ValueError(
            f"{where}: got a trace of shape {trace.shape!r}, expected ({num_tokens - 1},): one row per input token"
        )
    loops = np.frombuffer(trace.data, np.uint8)
    is_prompt = np.arange(len(loops)) < num_prompt_tokens
    low = np.where(is_prompt, config.num_loops, 1)
    if (wrong := np.flatnonzero((loops < low) | (loops > config.num_loops))).size:
        position = int(wrong[0])
        kind = "prompt" if is_prompt[position] else "generated"
        raise ValueError(
            f"{where}: {kind} token at position {position} ran {loops[position]} loops, expected "
            f"{low[position]}..{config.num_loops}"
        )
    return loops


def passes(rows: Any, config: OuroConfig) -> np.ndarray:
    """How often each input token ran every layer, [tokens], of a sample's rows."""
    return np.asarray(rows)


def exit_depths(loops: np.ndarray, num_prompt_tokens: int, config: OuroConfig) -> list[int]:
    """One depth per generated token: the first was sampled from a full-depth state."""
    return [config.num_loops, *loops[num_prompt_tokens:].tolist()]


def describe(loops: np.ndarray, num_prompt_tokens: int, config: OuroConfig) -> dict[str, Any]:
    """What a line of OUT/rollouts says of a sample's trace."""
    return {"exit_depths": exit_depths(loops, num_prompt_tokens, config)}


def metrics(samples: Sequence[tuple[np.ndarray, int]], config: OuroConfig) -> dict[str, Any]:
    """What an update reports of its samples' traces, each with its number of prompt tokens."""
    depths = np.concatenate([exit_depths(loops, num_prompt, config) for loops, num_prompt in samples])
    counts = np.bincount(depths, minlength=config.num_loops + 1)[1:]
    return {"depth_mean": float(depths.mean()), "depth_histogram": counts.tolist()}


def last_row(config: OuroConfig) -> int:
    """What a token ran that nothing reads, such as the last generated one where a framework makes it an input."""
    return 1
