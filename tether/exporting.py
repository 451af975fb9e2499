"""Writes stored weights as a Hugging Face directory that others can use as it is, without this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.contract import Manifest
from adapters.hf_convert.directory import CONFIG
from adapters.hf_convert.dtypes import DTYPES
from adapters.hf_convert.export import DEFAULT_SHARD_BYTES, export_directory
from adapters.hf_convert.files import SideFiles
from adapters.hf_convert.names import listing, name_problems, raise_problems, value_problems
from providers.registry import provider, remote_code
from tether.depth import FULL, DepthSchedule
from tether.settings_rules import REMOTE_CODE
from tether.stored import Weights
from tether.token_ids import GENERATION, fixes, token_problems


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What an export changes.

    Raises:
        ValueError: an unknown remote_code.
    """

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest file of weights; a larger tensor gets a file of its own."""
    dtype: str | None = None
    """Convert to this one and say so in config.json; None keeps what is stored."""
    remote_code: str = "keep"
    """Code for transformers: "ours" puts in ours, "keep" leaves the source's, "none" leaves all out."""
    depth: str | None = None
    """The policy that config.json shall name; None takes the one that the run trained at."""
    fix_token_ids: bool = False
    """Write the tokenizer's bos, eos and pad over those in config.json and generation_config.json."""

    def __post_init__(self) -> None:
        if self.remote_code not in REMOTE_CODE:
            raise ValueError(f"remote_code: got {self.remote_code!r}, expected one of {', '.join(REMOTE_CODE)}")


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, and what its user should know."""

    manifest: Manifest
    depth: str
    """The depth at which the directory runs by default, and why, in a sentence."""
    warnings: tuple[str, ...]


def export_weights(weights: Weights, destination: Path, options: ExportOptions | None = None) -> ExportReport:
    """Writes stored weights as a Hugging Face directory, with the config, tokenizer and code of their source.

    Raises:
        ValueError: the weights are not exactly those of the source's config, the destination is taken, or an option
            does not fit the model.
    """
    options = options or ExportOptions()
    stored, weights = weights, weights.without_padding()
    expected = weights.expected()
    problems = name_problems(weights.shapes, expected) + value_problems("shape", weights.shapes, expected)
    raise_problems(weights.path, problems, advice=f"It was not made from {weights.source.path}")
    code, auto_map = _code(weights, options.remote_code)
    depth, why = _depth(weights, options.depth)
    updates: dict[str, Any] = {**_dtype_entries(weights, options.dtype), **auto_map}
    updates |= provider(weights.model_type, "trace").depth_entries(depth, weights.config())
    ids = fixes(weights.source.path) if options.fix_token_ids else {}
    manifest = export_directory(
        tensors=_converted(weights.read(expected), options.dtype),
        source=weights.source.path,
        destination=destination,
        max_shard_bytes=options.max_shard_bytes,
        side=SideFiles(code=code, updates={CONFIG: {**updates, **ids}, GENERATION: ids}),
        facts={"weights": str(weights.path), "source": str(weights.source.path), "depth": depth},
    )
    warnings = [*_padding(stored, weights), *token_problems(destination), *_unloadable(weights, code)]
    return ExportReport(manifest=manifest, depth=f"depth {depth} by default ({why})", warnings=tuple(warnings))


def _converted(tensors: Iterator[tuple[str, torch.Tensor]], dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        converted = tensor if dtype is None else tensor.to(DTYPES[dtype])
        del tensor  # one tensor at a time
        yield name, converted
        del converted


def _dtype_entries(weights: Weights, dtype: str | None) -> dict[str, str]:
    """What config.json must say instead, in the spelling it uses: `dtype` (transformers 5) or `torch_dtype`."""
    config = weights.source.config
    written = dtype or next(iter(weights.dtypes.values()))
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {key: written for key in keys if config.get(key) != written}


def _code(weights: Weights, choice: str) -> tuple[tuple[Path, ...] | None, dict[str, Mapping[str, str] | None]]:
    """The Python files to write instead of the source's (None: those), and what config.json must say of them."""
    if choice == "keep":
        return None, {}
    if choice == "none":
        return (), {"auto_map": None}
    ours = remote_code(weights.model_type)
    if ours is None:
        raise ValueError(
            f"--remote-code ours: transformers itself has {weights.model_type!r} and there is no code of ours for it; "
            "use none or keep"
        )
    return tuple(ours.FOLDER / name for name in ours.FILES), {"auto_map": ours.AUTO_MAP}


def _depth(weights: Weights, asked: str | None) -> tuple[str, str]:
    """The policy to record, and the reason. Only a run that trained at one policy has one of its own."""
    if asked is not None:
        return asked, "asked for"
    if weights.depth is None:
        return getattr(weights.config(), "default_depth", FULL), "as in the source's config.json"
    policies = DepthSchedule.parse(weights.depth).policies
    if len(set(policies)) == 1:
        return policies[0], "the run trained at it"
    return FULL, f"the run trained at {weights.depth}; --depth chooses one"


def _padding(stored: Weights, weights: Weights) -> list[str]:
    cut = [name for name, shape in weights.shapes.items() if stored.shapes[name] != shape]
    rows = weights.config().vocab_size
    return [f"left out the vocabulary's padding, rows from {rows} on, of {listing(cut)}"] if cut else []


def _unloadable(weights: Weights, code: tuple[Path, ...] | None) -> list[str]:
    """A warning if transformers alone cannot load the directory."""
    carries = bool(code) or (code is None and "auto_map" in weights.source.config)
    if carries or remote_code(weights.model_type) is None:
        return []
    return [
        f"transformers has no {weights.model_type!r}, and the directory carries no code for it: only vLLM with this "
        "project's plugin loads it. --remote-code ours puts the code in"
    ]
