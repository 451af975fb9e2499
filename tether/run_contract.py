"""What must stay the same when a run is resumed, and how a difference is told.

The contract is a flat dictionary of digests and settings. The number of updates is not part of it, nor is anything
that only decides where a run computes or what it keeps (`settings.UNCONTRACTED`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.episodes import RolloutFunction, single_turn
from tether.functions import source_of
from tether.rewards import RewardFunction
from tether.settings import UNCONTRACTED, Settings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MODEL_FILES = ("config.json", "*.safetensors")
CHUNK_BYTES = 16 << 20


def run_contract(
    *,
    model: Path,
    data: Sequence[Path],
    settings: Settings,
    reward: RewardFunction,
    rollout: RolloutFunction = single_turn,
) -> dict[str, Any]:
    """The contract of a run. Reads every byte of the model once."""
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if name not in UNCONTRACTED}
    return {
        "model_digest": digest_files(path for pattern in MODEL_FILES for path in sorted(model.glob(pattern))),
        "tokenizer_digest": digest_files(model / name for name in TOKENIZER_FILES if (model / name).is_file()),
        "data_digest": digest_files(data),
        "reward_digest": _short(hashlib.blake2b(source_of(reward))),
        **({"rollout_digest": _short(hashlib.blake2b(source_of(rollout)))} if settings.rollout else {}),
        **kept,
    }


def check_contract(
    *, saved: Mapping[str, Any], now: Mapping[str, Any], where: Path, allowed: Iterable[str] = ()
) -> dict[str, Any]:
    """Compares the contract of a run with that of its resume.

    Args:
        allowed: fields that may differ.

    Returns:
        The allowed fields that do differ, each with [before, now].

    Raises:
        ValueError: another field differs (named, with both values), or no field has an allowed name.
    """
    allowed, known = set(allowed), saved.keys() | now.keys()
    if unknown := sorted(allowed - known):
        raise ValueError(f"--allow-change {', '.join(unknown)}: expected one of {', '.join(sorted(known))}")
    differing = sorted(name for name in known if saved.get(name) != now.get(name))
    if names := [name for name in differing if name not in allowed]:
        lines = [f"  {name}: the run has {saved.get(name)!r}, now {now.get(name)!r}" for name in names]
        raise ValueError(
            f"{where}: cannot resume, the run contract differs:\n" + "\n".join(lines) + "\n"
            "Give the same model, data and settings, allow a change by name (--allow-change "
            f"{names[0]}), or start another run in another directory."
        )
    return {name: [saved.get(name), now.get(name)] for name in differing}


def digest_files(paths: Iterable[Path]) -> str:
    """One digest over the names and contents of files, in the order given."""
    digest = hashlib.blake2b()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return _short(digest)


def _short(digest: Any) -> str:
    return digest.hexdigest()[:32]
