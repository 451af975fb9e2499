"""Prompts: JSON lines read, checked and turned into tokens before any model loads, and the order they are used in.

A record has `prompt` (text, taken as it is, or chat messages, put through the tokenizer's chat template) or
`prompt_token_ids`, a `label`, and optional `metadata`; a GSM8K record's `question` and `answer` serve as prompt and
label. Other fields are refused: a misspelt one would be lost silently.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.contract import derive_seed
from providers.registry import register_configs

ALIASES = {"question": "prompt", "answer": "label"}
FIELDS = frozenset({"prompt", "prompt_token_ids", "label", "metadata"})
SHOWN_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the data file."""

    prompt: Any
    """Text or chat messages; None when the line has prompt_token_ids only."""
    prompt_token_ids: tuple[int, ...]
    """What the model reads."""
    label: Any
    """What the reward function compares with."""
    metadata: Any = None
    """Handed to the reward function unchanged."""


def load_tokenizer(model: Path) -> Any:
    """The Hugging Face tokenizer of a model directory; never asks the network.

    Raises:
        ValueError: the directory has no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every model type that transformers itself does not have
    register_configs()  # or a directory with code of its own is asked about on the terminal
    try:
        return AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"{model}: no usable tokenizer ({error}); expected tokenizer.json beside config.json"
        ) from error


def load_records(path: Path, tokenizer: Any, *, max_prompt_tokens: int, vocab_size: int) -> list[Record]:
    """All records of a data file, in its order.

    Raises:
        ValueError: the file is missing or empty, or lines are malformed, lack a field, or hold a prompt that is empty,
            longer than max_prompt_tokens or outside the vocabulary; names file, line and reason of the first ten.
    """
    records, problems = [], []
    for number, line in _lines(path):
        try:
            record = _record(line, tokenizer)
            _check_prompt(record.prompt_token_ids, max_prompt_tokens, vocab_size)
            records.append(record)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise ValueError("\n".join(problems[:SHOWN_PROBLEMS] + ([f"... and {more} more lines"] if more > 0 else [])))
    if not records:
        raise ValueError(f"{path}: the file is empty, expected one JSON object a line with prompt and label")
    return records


class PromptOrder:
    """Every record once an epoch, each epoch in an order of its own that depends on (seed, epoch) alone."""

    def __init__(self, num_records: int, *, seed: int) -> None:
        self.num_records, self.seed = num_records, seed
        self._epoch, self._order = -1, list[int]()

    def take(self, position: int, count: int) -> list[int]:
        """Record indices of the prompts number position .. position + count - 1 since the start of the run."""
        return [self._at(p) for p in range(position, position + count)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_records)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.num_records))
            random.Random(derive_seed(self.seed, "prompt order", epoch)).shuffle(self._order)
        return self._order[place]


def _lines(path: Path) -> list[tuple[int, str]]:
    """(line number, text) of the lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot read the data file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    return [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _record(line: str, tokenizer: Any) -> Record:
    fields = _fields(line)
    prompt, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (prompt is None) == (token_ids is None):
        raise ValueError("expected exactly one of prompt and prompt_token_ids")
    if fields.get("label") is None:
        raise ValueError("label is missing")
    ids = _token_ids(token_ids) if prompt is None else _tokenize(prompt, tokenizer)
    return Record(prompt=prompt, prompt_token_ids=ids, label=fields["label"], metadata=fields.get("metadata"))


def _fields(line: str) -> dict[str, Any]:
    try:
        got = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(got, dict):
        raise ValueError(f"got a JSON {type(got).__name__}, expected an object")
    fields = {ALIASES.get(name) or name: value for name, value in got.items()}
    if len(fields) < len(got) or not fields.keys() <= FIELDS:
        raise ValueError(f"got the fields {sorted(got)}, expected each once and only {sorted(FIELDS)}")
    return fields


def _tokenize(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    if not (isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)):
        raise ValueError("prompt: expected text or a list of chat messages with role and content")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise ValueError(f"prompt: the tokenizer's chat template refused these messages ({error})") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _token_ids(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)):
        raise ValueError("prompt_token_ids: expected a list of integers")
    return tuple(value)


def _check_prompt(ids: Sequence[int], max_prompt_tokens: int, vocab_size: int) -> None:
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) > max_prompt_tokens:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, expected at most {max_prompt_tokens} "
            "(the model's context without max_new_tokens); shorten it or lower max_new_tokens"
        )
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"the prompt has token ids {outside[:5]}, expected ids below the vocabulary size {vocab_size}")
