"""Says what a run will take of a device before anything starts.

    python -m tether.memory MODEL [--set key=value ...] [--device-gib 140] [--context-tokens N]

MODEL needs only its config.json. Trainer and engine are put on one device if their settings put them there: the engine
on the first device, where the first trainer process is. The exit code is 1 if they do not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.hf_convert.directory import CONFIG, read_json
from providers.registry import provider
from tether import footprint
from tether.footprint import CONTEXT_BYTES, Shape
from tether.prepare import Job
from tether.settings import Settings, from_pairs

GIB = 1 << 30
FRAGMENTS = 0.03
"""Of a device, what allocators cannot use."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes by purpose, of one process on one device."""

    trainer: dict[str, int]
    engine: dict[str, int]

    @property
    def together(self) -> int:
        """Bytes of a device that both share, with a context for each."""
        return sum(self.trainer.values()) + sum(self.engine.values()) + 2 * CONTEXT_BYTES

    def lines(self) -> list[str]:
        """Text, one line per side."""
        return [
            f"{side}: {_gib(sum(parts.values()))} per device ("
            + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
            + ")"
            for side, parts in (("trainer", self.trainer), ("engine", self.engine))
        ]


def estimate(job: Job) -> Estimate:
    """Memory of one trainer device and one engine device of a run."""
    return estimate_of(shape_of(job))


def estimate_of(shape: Shape) -> Estimate:
    """The same, of what it follows from."""
    parts = footprint.engine(shape)
    if shape.settings.reference_scorer == "engine":
        parts["reference engine"] = sum(parts.values()) + CONTEXT_BYTES
    return Estimate(trainer=footprint.trainer(shape), engine=parts)


def shape_of(job: Job) -> Shape:
    """What a run's memory follows from."""
    table = job.part("physical").physical_tensors(job.config)
    return Shape(config=job.config, table=table, settings=job.settings, context_tokens=job.context_tokens)


def cache_bytes(job: Job) -> int:
    """Keys and values of max_concurrent_samples sequences of the longest length."""
    return footprint.cache_bytes(shape_of(job))


def advice(shape: Shape, device_bytes: int) -> list[str]:
    """Settings that would save memory, the largest saving first; nothing if all fits."""
    now = estimate_of(shape).together
    if now <= device_bytes * (1 - FRAGMENTS):
        return []
    s = shape.settings
    changes: dict[str, dict[str, Any]] = {
        "recompute=true": {"recompute": True},
        f"tokens_per_microbatch={s.tokens_per_microbatch // 2}": {
            "tokens_per_microbatch": s.tokens_per_microbatch // 2
        },
        "staging=host": {"staging": "host"},
        f"max_concurrent_samples={s.max_concurrent_samples // 2}": {
            "max_concurrent_samples": max(1, s.max_concurrent_samples // 2),
            "kv_cache_bytes": s.kv_cache_bytes // 2,
        },
        f"train_devices={2 * s.train_devices}": {"train_devices": 2 * s.train_devices},
    }
    if getattr(shape.config, "num_experts", 0):
        doubled = {"train_devices": 2 * s.train_devices, "expert_parallel": 2 * s.expert_parallel}
        changes[f"train_devices={2 * s.train_devices} expert_parallel={2 * s.expert_parallel}"] = doubled
    saved = {}
    for name, change in changes.items():
        changed = dataclasses.replace(shape, settings=s.replace(**change))
        saved[name] = now - estimate_of(changed).together
    ordered = sorted((size, name) for name, size in saved.items() if size > 0)[::-1]
    return [f"{name} saves {_gib(size)}" for size, name in ordered]


def report(shape: Shape, device_bytes: int | None) -> tuple[list[str], bool]:
    """The table, what to give the engine, and whether it fits."""
    found = estimate_of(shape)
    lines = []
    for side, parts in (("trainer", found.trainer), ("engine", found.engine)):
        lines += [f"{side:<10}{name:<24}{_gib(size):>12}" for name, size in parts.items()]
    lines.append(f"{'both':<10}{'2 contexts':<24}{_gib(2 * CONTEXT_BYTES):>12}")
    lines.append(f"{'':<10}{'together':<24}{_gib(found.together):>12}")
    if device_bytes is None:
        return lines, True
    fits = found.together <= device_bytes * (1 - FRAGMENTS)
    usable = f"{_gib(device_bytes)}, {FRAGMENTS:.0%} of it kept free"
    lines.append(f"{'fits' if fits else 'DOES NOT FIT'} one device of {usable}")
    cache = found.engine["keys and values"]
    left = int(device_bytes * (1 - FRAGMENTS)) - found.together + cache
    if left > 0:
        lines.append(
            f"kv_cache_bytes can be up to {left}; max_concurrent_samples={shape.settings.max_concurrent_samples} "
            f"sequences of {shape.context_tokens} tokens need {footprint.cache_bytes(shape)}"
        )
    share = (sum(found.engine.values()) + CONTEXT_BYTES) / device_bytes
    lines.append(f"the engine's share of the device is {share:.2f}; kv_cache_bytes says so to vLLM, not a fraction")
    return lines + advice(shape, device_bytes), fits


def read_shape(model: Path, settings: Settings, context_tokens: int | None) -> Shape:
    """What memory follows from, of a model that may have no weights yet.

    Raises:
        ValueError: no config.json, an unknown model, or a config that is wrong.
    """
    if not (model / CONFIG).is_file():
        raise ValueError(f"{model}: no {CONFIG} here")
    raw = read_json(model / CONFIG)
    model_type = str(raw.get("model_type"))
    config = provider(model_type, "config").Config.from_hf(raw, where=str(model / CONFIG))
    settings = settings.replace(dtype=config.dtype if settings.dtype == "auto" else settings.dtype)
    table = provider(model_type, "physical").physical_tensors(config)
    tokens = context_tokens or min(config.max_position_embeddings, 2 * settings.max_new_tokens)
    return Shape(config=config, table=table, settings=settings, context_tokens=tokens)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _device_bytes(given: float | None) -> int | None:
    if given is not None:
        return int(given * GIB)
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def main(argv: Sequence[str] | None = None) -> int:
    """One command line; see the module. 0 if it fits (or no device is known), 1 if not, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="tether memory", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory; its config.json is enough")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    parser.add_argument("--device-gib", type=float, help="memory of the device (default: of the first CUDA device)")
    parser.add_argument(
        "--context-tokens", type=int, help="longest prompt and response together (default: twice max_new_tokens)"
    )
    arguments = parser.parse_args(argv)
    try:
        shape = read_shape(arguments.model, from_pairs(arguments.set), arguments.context_tokens)
    except ValueError as error:
        print(f"tether memory: {error}", file=sys.stderr)
        return 2
    lines, fits = report(shape, _device_bytes(arguments.device_gib))
    print("\n".join(lines))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
