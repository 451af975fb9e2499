"""Compares the special tokens that the configs of a model directory name with those of its tokenizer.

A release can say that text begins, ends and is padded with token 0 while its tokenizer knows better: then nothing ever
stops. transformers and vLLM believe generation_config.json first, so a wrong one is not made good by a right tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.hf_convert.directory import CONFIG, read_json
from tether.data import load_tokenizer

GENERATION = "generation_config.json"
ROLES = ("bos", "eos", "pad")


def token_problems(directory: Path) -> list[str]:
    """Special tokens that are not the tokenizer's, or outside the vocabulary; nothing without a tokenizer.

    Raises:
        ValueError: the tokenizer, or a config, cannot be read.
    """
    configs = _configs(directory)
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        return []
    problems = [text for file, values in configs.items() for text in _of_config(file, values, tokenizer)]
    eos = tokenizer.eos_token_id
    if eos is not None and not any(_ids(values, "eos") for values in configs.values()):
        problems.append(
            f"no eos_token_id in {' or '.join(configs)}, the tokenizer's is {eos} ({tokenizer.eos_token!r})"
        )
    rows = configs[CONFIG].get("vocab_size")
    if isinstance(rows, int) and len(tokenizer) > rows:
        problems.append(f"the tokenizer has {len(tokenizer)} tokens, the model {rows} (vocab_size)")
    return problems


def fixes(directory: Path) -> dict[str, int]:
    """The tokenizer's own ids, as the configs should name them."""
    tokenizer = _tokenizer(directory)
    ids = {} if tokenizer is None else {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ROLES}
    return {name: value for name, value in ids.items() if value is not None}


def _tokenizer(directory: Path) -> Any:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return load_tokenizer(directory) if any((directory / name).is_file() for name in names) else None


def _configs(directory: Path) -> dict[str, dict[str, Any]]:
    return {name: read_json(directory / name) for name in (CONFIG, GENERATION) if (directory / name).is_file()}


def _ids(values: dict[str, Any], role: str) -> list[Any]:
    said = values.get(f"{role}_token_id")
    return [] if said is None else said if isinstance(said, list) else [said]


def _of_config(file: str, values: dict[str, Any], tokenizer: Any) -> list[str]:
    problems = []
    for role in ROLES:
        said, real = _ids(values, role), getattr(tokenizer, f"{role}_token_id")
        if said and real is not None and real not in said:
            name, text = f"{role}_token_id", getattr(tokenizer, f"{role}_token")
            problems.append(f"{file}: {name} is {values[name]!r}, the tokenizer's is {real} ({text!r})")
    return problems
