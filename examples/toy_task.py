"""The demo's task: put three digits in order. A thousand problems, a fifth held out; every answer can be checked.

The records have the shape of GSM8K's: a prompt in words and a label that a rule compares the response with.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_DIGITS = 3
HELD_OUT = 200


def problem(digits: Sequence[int]) -> dict[str, str]:
    """One record."""
    return {
        "prompt": f"Sort the digits {' '.join(map(str, digits))}:",
        "label": " ".join(map(str, sorted(digits))),
    }


def split(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, held out): every problem once, in random order."""
    problems = [problem(digits) for digits in itertools.product(range(10), repeat=NUM_DIGITS)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def train_tokenizer(path: Path, texts: Sequence[str], *, vocab_size: int, context: int) -> None:
    """Trains a byte-level BPE tokenizer on texts and writes it as Ouro's: the same special tokens, ids and template.

    Unused ids are filled with reserved tokens, so that every id the model can sample decodes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    reserved = range(vocab_size - tokenizer.get_vocab_size())
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in reserved])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1], "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0], "unk_token": SPECIAL[0], "clean_up_tokenization_spaces": False,
        "model_max_length": context, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
