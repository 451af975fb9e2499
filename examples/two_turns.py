"""A worked example of a rollout function: the model may try again when its answer is wrong.

    examples/ouro/run.sh --set rollout=examples.two_turns:retry --set reward=examples.two_turns:last_attempt \
        --set max_new_tokens=40

`tether.episodes` says what a rollout function is given and what it must keep to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tether.episodes import Episode, Generate

FIRST_TOKENS = 8
"""Longest first answer: what is left is for the second question and answer."""


def retry(episodes: Sequence[Episode], generate: Generate, tokenizer: Any) -> None:
    """One answer; where it is wrong, the environment says so and asks again, and there is a second one.

    The question's tokens are part of the response and not trained on; both answers are.
    """
    generate(episodes, max_tokens=FIRST_TOKENS)
    wrong = [episode for episode in episodes if not is_right(episode, tokenizer)]
    for episode in wrong:
        episode.append(tokenizer.encode(f"\nWrong. {episode.record.prompt}", add_special_tokens=False))
    generate(wrong)


def is_right(episode: Episode, tokenizer: Any) -> bool:
    answer = tokenizer.decode(episode.turn_token_ids, skip_special_tokens=True)
    return answer.strip() == str(episode.record.label)


def last_attempt(*, response: str, label: Any, **_: Any) -> float:
    """1 for the right answer at once, 0.5 for the right answer at the second attempt, else 0."""
    first, asked_again, second = response.partition("\nWrong.")
    if not asked_again:
        return float(first.strip() == str(label))
    return 0.5 * float(second.rpartition(":")[2].strip() == str(label))
