"""The policy that a KL penalty holds on to: a frozen copy of the weights a run began with, kept on the host.

It is scored in the trainer's own model: the parameters are exchanged for the copy, and put back with the same bits.
That costs two copies between host and device, and no device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer


class ReferencePolicy:
    """This rank's part of a Hugging Face directory's weights, and what they say of samples.

    Args:
        trainer: in whose model the reference is scored.
        directory: whose weights; the same model as the trainer's.

    Raises:
        ValueError: what `Trainer.load_hf` raises.
    """

    def __init__(self, trainer: Trainer, directory: HFDirectory) -> None:
        self.trainer = trainer
        self._weights: dict[str, Tensor] = {}
        for name, own, stored in trainer.model.stored_parts(directory):
            self._weights[name] = _on_host(stored.to(own.dtype), own)

    def score(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """What `Trainer.score` returns, under the reference's weights. Collective. Raises what it does."""
        with self._in_place():
            return self.trainer.score(samples)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self.trainer.gather_parameters()
        kept: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, own in self.trainer.model.local_parts():
                kept[name] = _on_host(own, own)
                own.copy_(self._weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, own in self.trainer.model.local_parts():
                    own.copy_(kept[name])


def _on_host(values: Tensor, like: Tensor) -> Tensor:
    """A copy on the host, in pinned memory when the model is on a device."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=like.is_cuda).copy_(values)
