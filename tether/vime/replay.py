"""How a rollout's record of what each token ran reaches the model in the framework's micro-batches.

Loops travel as a side input of the forward pass: one value a token, sample behind sample. The framework concatenates
what each sample has, skips samples that have nothing, and pads tokens but not side inputs, so what arrives is compared
with the boundaries. Experts travel through the framework's own routing replay, one queue a layer.

Legend: T tokens of a packed micro-batch with its padding, S sequences, L layers, K experts of a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.vime import framework
from tether.vime.arguments import ModelFacts

DEPTHS, LENGTHS = "execution_depths", "execution_lengths"
"""Side inputs of a sample: its tokens' loops, and how many tokens it has (one value)."""


class Replay(Protocol):
    """What the model asks for its trace."""

    def arm(self, *, store_prefix: str | None) -> None:
        """From now on a pass without a record is an error, if this kind of pass (None: training) should have one."""
        ...

    def rows(
        self, side: Mapping[str, Tensor], *, tokens: Tensor, boundaries: Tensor, loss_mask: Tensor | None
    ) -> Tensor | None:
        """The trace of a micro-batch [T, ...]; None lets every token run as the model decides."""
        ...


def replay_of(args: Any, facts: ModelFacts) -> Replay:
    """The replay of a model's kind of trace."""
    if facts.trace.KIND == "loops":
        return DepthReplay(padding=int(facts.trace.last_row(facts.config)))
    if getattr(args, "use_rollout_routing_replay", False):
        return ExpertReplay(
            num_layers=facts.config.num_layers, parallel=bool(getattr(args, "sequence_parallel", False))
        )
    return NoReplay()


class NoReplay:
    """Every pass chooses for itself."""

    def arm(self, *, store_prefix: str | None) -> None: ...

    def rows(self, side: Mapping[str, Tensor], **_: Any) -> None:
        _only(side, ())


class DepthReplay:
    """Loops of each token, from the side inputs. `padding` is what the framework's padding runs."""

    def __init__(self, *, padding: int) -> None:
        self.padding, self.required = padding, False

    def arm(self, *, store_prefix: str | None) -> None:
        self.required = True

    def rows(
        self, side: Mapping[str, Tensor], *, tokens: Tensor, boundaries: Tensor, loss_mask: Tensor | None
    ) -> Tensor | None:
        """[T] int64 on the CPU.

        Raises:
            ValueError: no record where one is needed, or one that is not of exactly these sequences.
        """
        _only(side, (DEPTHS, LENGTHS))
        if DEPTHS not in side:
            if self.required or side:
                raise ValueError(
                    f"{DEPTHS}: missing in a micro-batch of {len(boundaries) - 1} sequences, expected the loops of "
                    "each token: samples must come from tether.vime.generate and go through tether.vime.convert_samples"
                )
            return None
        depths = side[DEPTHS].to("cpu", torch.int64)
        num_real = _real_sequences(depths, side.get(LENGTHS), boundaries)
        padding = len(tokens) - int(boundaries[num_real])
        if padding and (tokens[-padding:].any() or (loss_mask is not None and loss_mask[0, -padding:].any())):
            raise ValueError(
                f"{DEPTHS}: got {len(depths)} values for {len(tokens)} tokens, but the last {padding} are a sample and "
                "no padding: a sample came without its record"
            )
        return torch.cat([depths, torch.full((padding,), self.padding)])


def _real_sequences(depths: Tensor, lengths: Tensor | None, boundaries: Tensor) -> int:
    """How many of the sequences are samples: all of them, or all but the padding at the end."""
    count = len(boundaries) - 1
    if depths.dim() != 1:
        raise ValueError(f"{DEPTHS}: got shape {tuple(depths.shape)}, expected one value per token")
    for real in (count, count - 1):
        told = boundaries[: real + 1].diff() if lengths is None else lengths.to("cpu", torch.int64)
        if len(depths) == int(boundaries[real]) and torch.equal(told, boundaries[: real + 1].diff()):
            return real
    raise ValueError(
        f"{DEPTHS}: got {len(depths)} values of samples with "
        f"{'unknown' if lengths is None else lengths.tolist()[:10]} tokens, expected {int(boundaries[-2])} or "
        f"{int(boundaries[-1])} for sequences of {boundaries.diff().tolist()[:10]}: a sample came without its record, "
        "or with another's"
    )


class ExpertReplay:
    """Experts of each token and layer, from the framework's queues (its flag --use-rollout-routing-replay).

    A framework whose Megatron is patched makes a queue in every router, which then replays by itself; otherwise they
    are made and emptied here.
    """

    def __init__(self, *, num_layers: int, parallel: bool) -> None:
        module = framework.part("utils.routing_replay")
        self.queues, self.parallel, self.required = module.RoutingReplay.all_routing_replays, parallel, False
        framework.require(
            len(self.queues) in (0, num_layers),
            f"RoutingReplay: got {len(self.queues)} queues, expected 0 or {num_layers}",
        )
        self.by_routers = len(self.queues) > 0
        for _ in range(num_layers - len(self.queues)):
            module.RoutingReplay()

    def arm(self, *, store_prefix: str | None) -> None:
        self.required = not store_prefix  # a reference routes by its own weights

    def rows(
        self, side: Mapping[str, Tensor], *, tokens: Tensor, boundaries: Tensor, loss_mask: Tensor | None
    ) -> Tensor | None:
        """[T, L, K] int64; the framework has cut the rows over the tensor-parallel ranks under sequence parallelism."""
        _only(side, ())
        stage = os.environ.get("ROUTING_REPLAY_STAGE", "fallthrough")
        if stage == "fallthrough" and not self.required:
            return None
        if stage != "replay_forward":
            raise ValueError(f"ROUTING_REPLAY_STAGE: got {stage!r}, expected 'replay_forward' in a pass that replays")
        if self.by_routers:
            return None
        rows = torch.stack([queue.pop_forward() for queue in self.queues], 1).to(torch.int64)
        if self.parallel:
            rows = _gathered(rows)
        if len(rows) != len(tokens):
            raise ValueError(f"routing replay: got rows of {len(rows)} tokens, expected {len(tokens)}")
        return rows


def _gathered(rows: Tensor) -> Tensor:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(rows) for _ in range(group.size())]
    torch.distributed.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


def _only(side: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    if unknown := sorted(set(side) - set(names)):
        raise ValueError(
            f"forward: got side inputs {unknown}, expected {'none' if not names else 'only ' + ', '.join(names)}"
        )
