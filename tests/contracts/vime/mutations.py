"""Wrong hooks, one at a time: the optional test must notice each of them."""

from __future__ import annotations

from typing import Any

import torch


def ignored_depths() -> None:
    """The record arrives and is not replayed."""
    from tether.vime.replay import DepthReplay

    DepthReplay.rows = lambda self, side, **_: None  # type: ignore[method-assign]


def shifted_depths() -> None:
    """Every token takes its neighbour's depth."""
    from tether.vime.replay import DepthReplay

    own = DepthReplay.rows

    def rows(self: Any, side: Any, **given: Any) -> Any:
        found = own(self, side, **given)
        return None if found is None else found.roll(1)

    DepthReplay.rows = rows  # type: ignore[method-assign]


def ignored_experts() -> None:
    """The framework's queues are emptied and not replayed."""
    from tether.vime.replay import ExpertReplay

    own = ExpertReplay.rows
    ExpertReplay.rows = lambda self, side, **given: own(self, side, **given) and None  # type: ignore[method-assign]

    def rows(self: Any, side: Any, **given: Any) -> None:
        own(self, side, **given)

    ExpertReplay.rows = rows  # type: ignore[method-assign]


def swapped_reading() -> None:
    """Two tensors of one shape are exchanged on the way in."""
    from tether.vime import install

    own = install.hf_tensor

    def hf_tensor(name: str, reader: Any, config: Any) -> torch.Tensor:
        return own(name.replace("q_proj", "K").replace("k_proj", "q_proj").replace("K", "k_proj"), reader, config)

    install.hf_tensor = hf_tensor


def swapped_writing() -> None:
    """Two tensors of one shape are exchanged on the way out."""
    from tether.vime import install

    own = install.to_hf

    def to_hf(args: Any, name: str, param: torch.Tensor) -> Any:
        return own(args, name.replace("q_proj", "K").replace("k_proj", "q_proj").replace("K", "k_proj"), param)

    install.to_hf = to_hf


def lost_record() -> None:
    """One sample comes without its depths, and the conversion lets it through, as the framework's own does."""
    from tether.vime import samples

    own = samples.convert_samples

    def convert_samples(args: Any, given: Any) -> Any:
        data = own(args, given)
        data["multimodal_train_inputs"][1] = None
        return data

    samples.convert_samples = convert_samples


def unmarked_shards() -> None:
    """Parameters that tensor parallelism cuts do not say so."""
    from tether.vime import model

    own = model.FrameworkModel.__init__

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        own(self, *given, **named)
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False

    model.FrameworkModel.__init__ = __init__  # type: ignore[method-assign]
