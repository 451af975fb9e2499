"""The data file: every mistake is named by file and line before a model loads; the prompt order repeats exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.toy_task import problem, train_tokenizer
from tether.data import PromptOrder, load_records, load_tokenizer

VOCABULARY = 320


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(path, [problem((7, 2, 5))["prompt"]], vocab_size=VOCABULARY, context=512)
    return load_tokenizer(path)


def load(path: Path, tokenizer: Any, *lines: Any, max_prompt_tokens: int = 40) -> list:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return load_records(path, tokenizer, max_prompt_tokens=max_prompt_tokens, vocab_size=VOCABULARY)


def test_prompts_come_as_text_messages_or_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """Text is taken as it is, messages go through the chat template, ids are used unchanged."""
    messages = [{"role": "user", "content": "digits"}]
    text, chat, ids, gsm8k = load(
        tmp_path / "d.jsonl",
        tokenizer,
        {"prompt": "digits", "label": "1", "metadata": {"level": 2}},
        {"prompt": messages, "label": "1"},
        "",
        {"prompt_token_ids": [5, 6], "label": "1"},
        {"question": "digits", "answer": "#### 1"},
    )
    assert tokenizer.decode(text.prompt_token_ids) == "digits" and text.metadata == {"level": 2}
    assert tokenizer.decode(chat.prompt_token_ids) == "<|im_start|>user\ndigits<|im_end|>\n<|im_start|>assistant\n"
    assert (chat.prompt, ids.prompt, ids.prompt_token_ids) == (messages, None, (5, 6))
    assert (gsm8k.prompt, gsm8k.label) == ("digits", "#### 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "malformed JSON"),
        ("[1]", "got a JSON list, expected an object"),
        ({"label": "1"}, "expected exactly one of prompt and prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1], "label": "1"}, "expected exactly one of"),
        ({"prompt": "a"}, "label is missing"),
        ({"prompt": "a", "label": "1", "metdata": 1}, "'metdata'"),
        ({"prompt": "a", "question": "b", "label": "1"}, "expected each once"),
        ({"prompt": 3, "label": "1"}, "expected text or a list of chat messages"),
        ({"prompt": [{"role": "user"}], "label": "1"}, "expected text or a list of chat messages"),
        ({"prompt": "", "label": "1"}, "the prompt has no tokens"),
        ({"prompt_token_ids": ["a"], "label": "1"}, "expected a list of integers"),
        ({"prompt_token_ids": [VOCABULARY], "label": "1"}, "below the vocabulary size 320"),
        ({"prompt_token_ids": [5] * 41, "label": "1"}, "the prompt has 41 tokens, expected at most 40"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, tokenizer: Any, line: Any, message: str) -> None:
    """The line number counts from 1 and includes blank lines, as an editor does."""
    good = {"prompt": "a", "label": "1"}
    with pytest.raises(ValueError) as refused:
        load(tmp_path / "d.jsonl", tokenizer, good, "", line, good)
    assert str(refused.value).startswith(f"{tmp_path / 'd.jsonl'}:3: ") and message in str(refused.value)


def test_many_bad_lines_are_counted_not_all_shown(tmp_path: Path, tokenizer: Any) -> None:
    """The first ten, then how many more."""
    with pytest.raises(ValueError) as refused:
        load(tmp_path / "d.jsonl", tokenizer, *["{"] * 14)
    assert len(str(refused.value).splitlines()) == 11 and "and 4 more lines" in str(refused.value)


def test_missing_and_empty_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A wrong path is the commonest mistake."""
    with pytest.raises(ValueError, match="cannot read the data file"):
        load_records(tmp_path / "no.jsonl", tokenizer, max_prompt_tokens=4, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="the file is empty"):
        load(tmp_path / "d.jsonl", tokenizer, "", "")


def test_prompt_order_covers_every_record_once_an_epoch() -> None:
    """Each epoch is a permutation, and another one than the epoch before."""
    taken = PromptOrder(10, seed=1).take(0, 30)
    epochs = [taken[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert taken != PromptOrder(10, seed=2).take(0, 30)


def test_prompt_order_resumes_at_any_position() -> None:
    """A fresh process at position p takes what a continuous one takes there, across epochs too."""
    taken = PromptOrder(7, seed=3).take(0, 40)
    for position in (0, 5, 6, 7, 20):
        assert PromptOrder(7, seed=3).take(position, 11) == taken[position : position + 11]
