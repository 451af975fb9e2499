"""Samples that take several turns: the model writes, an environment answers, the model goes on. Rank 0 only.

A rollout function is called once per batch of samples as

    function(episodes: Sequence[Episode], generate: Generate, tokenizer) -> None

and brings every episode to its end: `generate(some, max_tokens=None)` lets the model write the next turn of some of
them, all at once; `episode.append(token_ids)` puts what the environment says behind it. Environment tokens are not
trained on. What the function does may depend on nothing but the episodes, or a resumed run differs from a continuous
one.

A later turn continues the earlier ones: what its tokens ran is given to the engine with them, so that a sample has one
trace and the trainer's replay sees what the engine saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from adapters.contract import Engine, EngineError, GenerationRequest, GenerationResult, derive_seed
from tether.data import Record


@dataclass(kw_only=True)
class Episode:
    """One sample in the making."""

    record: Record
    group: int
    request: GenerationRequest
    """Of the first turn; its max_tokens bounds the whole response."""
    results: list[GenerationResult] = field(default_factory=list)
    """One a turn."""
    token_ids: list[int] = field(default_factory=list)
    """The response so far, the environment's tokens in it."""
    logprobs: list[float] = field(default_factory=list)
    """Of each response token; 0 for one of the environment's."""
    loss_mask: list[bool] = field(default_factory=list)
    """Which response tokens the model wrote."""

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.request.sampling.max_tokens - len(self.token_ids)

    @property
    def turn_token_ids(self) -> tuple[int, ...]:
        """What the model wrote in its last turn."""
        return self.results[-1].token_ids if self.results else ()

    def append(self, token_ids: Sequence[int]) -> None:
        """Puts tokens of the environment behind the response, as many as there is room for."""
        kept = list(token_ids)[: self.room]
        self.token_ids += kept
        self.logprobs += [0.0] * len(kept)
        self.loss_mask += [False] * len(kept)

    def next_request(self, max_tokens: int | None = None) -> GenerationRequest:
        """What the engine is asked for the next turn, of at most max_tokens."""
        turn, room = len(self.results), self.room if max_tokens is None else min(max_tokens, self.room)
        sampling = msgspec.structs.replace(self.request.sampling, max_tokens=room)
        if turn == 0 and not self.token_ids:
            return msgspec.structs.replace(self.request, sampling=sampling)
        return msgspec.structs.replace(
            self.request,
            request_id=f"{self.request.request_id}/turn-{turn}",
            prompt_token_ids=(*self.request.prompt_token_ids, *self.token_ids),
            sampling=sampling,
            seed=derive_seed(self.request.effective_seed, "turn", turn),
            trace=self.results[-1].trace if self.results else None,
        )

    def finish_turn(self, result: GenerationResult) -> None:
        """Takes what the model wrote.

        Raises:
            EngineError: other weights wrote an earlier turn: no version is the whole sample's.
        """
        if self.results and self.results[0].version != result.version:
            raise EngineError(f"{result.request_id}: weights {result.version}, turns before {self.results[0].version}")
        self.results.append(result)
        self.token_ids += result.token_ids
        self.logprobs += result.logprobs
        self.loss_mask += [True] * len(result.token_ids)

    def whole(self) -> tuple[GenerationResult, tuple[bool, ...]]:
        """The response as one result, and its loss mask. What the environment said last is left out: nobody read it.

        Raises:
            ValueError: the model wrote nothing.
        """
        if not any(self.loss_mask):
            raise ValueError(f"{self.request.request_id}: the rollout function let the model write nothing")
        length = len(self.loss_mask) - self.loss_mask[::-1].index(True)
        whole = msgspec.structs.replace(
            self.results[-1],
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids[:length]),
            logprobs=tuple(self.logprobs[:length]),
            seed=self.results[0].seed,
        )
        return whole, () if all(self.loss_mask[:length]) else tuple(self.loss_mask[:length])


class Generate(Protocol):
    """Lets the model write the next turn of episodes; those without room are left as they are."""

    def __call__(self, episodes: Sequence[Episode], *, max_tokens: int | None = None) -> None: ...


RolloutFunction = Callable[[Sequence[Episode], Generate, Any], None]


def single_turn(episodes: Sequence[Episode], generate: Generate, tokenizer: Any) -> None:
    """The default: one response each."""
    generate(episodes)


def generate_with(engine: Engine) -> Generate:
    """What a rollout function is given to let the model write."""

    def generate(episodes: Sequence[Episode], *, max_tokens: int | None = None) -> None:
        going_on = [episode for episode in episodes if episode.room > 0]
        requests = [episode.next_request(max_tokens) for episode in going_on]
        if not requests:
            return
        results = in_order(requests, engine.generate(requests))
        for episode, result in zip(going_on, results, strict=True):
            episode.finish_turn(result)

    return generate


def in_order(requests: Sequence[GenerationRequest], results: Any) -> list[GenerationResult]:
    """Results in the order of their requests.

    Raises:
        EngineError: a request failed, was aborted or has no result; names the first five.
    """
    by_id = {result.request_id: result for result in results}
    problems = []
    for request in requests:
        result = by_id.get(request.request_id)
        if result is None or result.finish_reason not in ("stop", "length"):
            reason = "no result" if result is None else result.error or result.finish_reason
            problems.append(f"{request.request_id}: {reason}")
    if problems:
        raise EngineError(f"rollout: {len(problems)} of {len(requests)} requests failed: {'; '.join(problems[:5])}")
    return [by_id[request.request_id] for request in requests]
