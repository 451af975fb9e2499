"""What an out-of-tree model offers the worker, so that traces, policies and weights work without naming a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from adapters.hf_convert.blocks import Blocks

if TYPE_CHECKING:  # it needs vLLM, which a client of an engine does not
    from adapters.vllm_engine.worker.step import Step


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """This worker's part of one physical tensor, read back from the layout that is being served.

    `dim` None means the part is the whole tensor; otherwise it is the slice from `offset` on along `dim`.
    """

    name: str
    part: torch.Tensor | Blocks
    shape: tuple[int, ...]
    dim: int | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A parsed execution policy: its numbers for the step's tables, and the largest trace value it can reach."""

    vector: tuple[float, ...]
    reach: int


@dataclass(frozen=True, kw_only=True)
class TraceLayout:
    """What a trace of this model holds for each input token: unsigned bytes, one or an array of them."""

    kind: str
    """The contract's name for the trace."""
    least: int
    """Smallest value that a byte may have."""
    most: int
    """Largest value that a byte may have, at most 254."""
    row_shape: tuple[int, ...] = ()
    """Shape of one token's bytes."""
    prompt_value: int | None = None
    """What every prompt token runs; None when that is seen only by running it."""

    @property
    def unknown(self) -> int:
        """The byte of a token that nobody has seen run."""
        return 0 if self.least > 0 else 255

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape)


@runtime_checkable
class TracedModel(Protocol):
    """
    Attributes:
        trace_layout: what its trace holds.
        policy_width: length of `Policy.vector`.
        step: set before each forward; None in a dummy run. The model calls `step.finish` once.
        layer_calls, layer_tokens: how often a layer ran, and over how many tokens, since the start.
    """

    trace_layout: TraceLayout
    policy_width: int
    step: Step | None
    layer_calls: int
    layer_tokens: int

    def parse_policy(self, text: str | None) -> Policy:
        """Raises ValueError for a text that is no policy of this model; None takes the checkpoint's own."""
        ...

    def live_tensors(self) -> Iterator[LiveTensor]:
        """Every physical tensor, read through fused and packed layouts."""
        ...
