"""How trainer processes divide the work, and what a model says to it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("data", "tensor", "sequence", "expert", "expert tensor", "pipeline", "context")
PIPELINE = (
    "the trainer's schedule has one stage; a looped model would send every loop through all of them, and a model whose "
    "layers fit one device gains nothing"
)
CONTEXT = (
    "attention sees whole packed sequences of a micro-batch; more tokens fit with recompute, tensor and sequence "
    "parallelism"
)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """What a run asks for."""

    devices: int = 1
    """Trainer processes."""
    tensor: int = 1
    """Processes that share one copy of the model, each with a slice of every projection."""
    expert: int = 1
    """Processes that divide the experts of a layer among them."""
    expert_tensor: int = 1
    """Processes that share each of those experts, every one with a slice of its width."""
    pipeline: int = 1
    """Stages of layers."""
    context: int = 1
    """Processes that share a sequence."""
    sequence: bool = False
    """Activations between projections are cut over the tensor-parallel processes too."""

    def asked(self) -> dict[str, bool]:
        """Which kinds of parallelism are asked for."""
        return {
            "data": self.devices > self.tensor * self.pipeline * self.context,
            "tensor": self.tensor > 1,
            "sequence": self.sequence,
            "expert": self.expert > 1,
            "expert tensor": self.expert_tensor > 1,
            "pipeline": self.pipeline > 1,
            "context": self.context > 1,
        }


def problems(
    asked: Parallelism,
    *,
    refused: Mapping[str, str],
    cut_by_tensor: Mapping[str, int],
    cut_by_expert: Mapping[str, int],
    cut_by_expert_tensor: Mapping[str, int],
) -> list[str]:
    """Why a model cannot be trained so, empty if it can.

    Args:
        refused: kinds that the model does not support, with the reason.
        cut_by_tensor: sizes that tensor parallelism divides, by name.
        cut_by_expert: sizes that expert parallelism divides.
        cut_by_expert_tensor: sizes that expert tensor parallelism divides.
    """
    found = [
        f"{kind} parallelism: {refused[kind]}" for kind, wanted in asked.asked().items() if wanted and kind in refused
    ]
    if asked.sequence and asked.tensor == 1:
        found.append("sequence_parallel: got true with tensor_parallel 1, expected tensor_parallel > 1")
    for name, by, sizes in (
        ("tensor_parallel", asked.tensor, cut_by_tensor),
        ("expert_parallel", asked.expert, cut_by_expert),
        ("expert_tensor_parallel", asked.expert_tensor, cut_by_expert_tensor),
    ):
        if bad := [f"{size} {value}" for size, value in sizes.items() if value % by]:
            found.append(f"{name} {by} does not divide {', '.join(bad)}; choose a common divisor")
    return found
