"""What an OLMoE trace means: the experts each token used in each layer. Shared by trainer and engine.

A trace has a row of `num_layers * top_k` bytes for each input token: P + n - 1 rows, because the last generated token
never was an input. Within a layer the order of the experts carries no meaning. 255 would mean that no expert was
recorded; it is refused wherever a trace is read.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.contract import Trace
from providers.olmoe.config import OlmoeConfig

KIND = "experts"
UNKNOWN = 255
"""What a position holds whose experts nobody saw."""


def parse_policy(text: str, config: OlmoeConfig) -> str:
    """The only policy is "full": every token runs the whole model.

    Raises:
        ValueError: another text.
    """
    if text != "full":
        raise ValueError(f"execution: got {text!r}, expected full: every token of an OLMoE runs the whole model")
    return text


def depth_entries(text: str, config: OlmoeConfig) -> dict[str, str]:
    """What config.json must say for a policy; nothing, because there is only one. Raises what `parse_policy` does."""
    parse_policy(text, config)
    return {}


def row_shape(config: OlmoeConfig) -> tuple[int, ...]:
    """Shape of one token's row."""
    return config.num_layers, config.top_k


def to_trace(rows: np.ndarray) -> Trace:
    """A contract trace of the experts [tokens, layers, top_k] of each input token."""
    return Trace(KIND, tuple(rows.shape), np.ascontiguousarray(rows, np.uint8).tobytes())


def rows_of(
    trace: Trace | None, *, num_prompt_tokens: int, num_tokens: int, config: OlmoeConfig, where: str
) -> np.ndarray:
    """The experts [num_tokens - 1, layers, top_k] uint8 of the input tokens, checked.

    Raises:
        ValueError: the trace is missing, of another kind or shape, or `check` refuses it; names `where` (the sample).
    """
    if trace is None or trace.kind != KIND:
        got = "no trace" if trace is None else f"a trace of {trace.kind!r}"
        raise ValueError(f"{where}: got {got}, expected one of {KIND!r}")
    wanted = (num_tokens - 1, *row_shape(config))
    if trace.shape != wanted:
        raise ValueError(
            f"{where}: got a trace of shape {trace.shape!r}, expected {wanted}: one row of (layers, top_k) per input "
            "token"
        )
    rows = np.frombuffer(trace.data, np.uint8).reshape(wanted)
    if problem := problem_of(rows, config):
        raise ValueError(f"{where}: {problem}")
    return rows


def problem_of(rows: np.ndarray, config: OlmoeConfig) -> str | None:
    """What is wrong with experts [tokens, layers, top_k]: a number out of range, or one expert twice in a layer."""
    outside = np.argwhere((rows < 0) | (rows >= config.num_experts))
    if len(outside):
        position, layer, _ = outside[0].tolist()
        got = int(rows[tuple(outside[0])])
        what = "no experts were recorded" if got == UNKNOWN else f"got expert {got}"
        return f"position {position}, layer {layer}: {what}, expected numbers in 0 .. {config.num_experts - 1}"
    ordered = np.sort(rows, axis=-1)
    twice = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(-1))
    if len(twice):
        position, layer = twice[0].tolist()
        got = rows[position, layer].tolist()
        return f"position {position}, layer {layer}: got experts {got}, expected no one twice"
    return None


def passes(rows: Any, config: OlmoeConfig) -> np.ndarray:
    """How often each input token ran every layer, [tokens], of a sample's rows: once."""
    return np.ones(len(rows), np.int64)


def describe(rows: np.ndarray, num_prompt_tokens: int, config: OlmoeConfig) -> dict[str, Any]:
    """What a line of OUT/rollouts says of a sample's trace: all of it, because a replay needs all."""
    return {"experts": base64.b64encode(rows.tobytes()).decode(), "experts_shape": list(rows.shape)}


def metrics(samples: Sequence[tuple[np.ndarray, int]], config: OlmoeConfig) -> dict[str, Any]:
    """What an update reports of its samples' traces: how often each expert of each layer was used."""
    return {"expert_load": load_per_expert([rows for rows, _ in samples], config).tolist()}


def load_per_expert(traces: Sequence[np.ndarray], config: OlmoeConfig) -> np.ndarray:
    """[layers, experts] how many of the traces' rows used each expert."""
    counts = np.zeros((config.num_layers, config.num_experts), np.int64)
    for rows in traces:
        for layer in range(config.num_layers):
            counts[layer] += np.bincount(rows[:, layer].ravel(), minlength=config.num_experts)
    return counts


def last_row(config: OlmoeConfig) -> np.ndarray:
    """What a token ran that nothing reads, such as the last generated one where a framework makes it an input."""
    return np.tile(np.arange(config.top_k, dtype=np.uint8), (config.num_layers, 1))
