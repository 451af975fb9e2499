"""Samples from Tether's engines, filled into the framework's samples with everything that training has to know."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from adapters.contract import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    derive_seed,
    new_seed,
)
from tether.data import load_tokenizer
from tether.prepare import stop_token_ids
from tether.vime.about import ABOUT
from tether.vime.arguments import ModelFacts, facts_of
from tether.vime.engines import context_tokens, start_engine
from tether.vime.replay import DEPTHS, LENGTHS
from tether.vime.session import Session
from tether.vime.weights import CommittedWeights, where_weights_come

_IGNORED = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "max_new_tokens"}
"""Of the framework's sampling parameters: they say how text is made, which is made here from the tokens."""
_numbers = itertools.count()
_lock = threading.Lock()
_session: Session | None = None


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """For --custom-generate-function-path: draws one response.

    A sample that was aborted before starts anew, with another seed: a response never mixes weights. Aborted, truncated
    and empty responses keep what there is, and their status says so.

    Raises:
        EngineError: the engine failed.
        ValueError: sampling that cannot be trained on or that the engine does not have; weights that cannot reach it.
    """
    request = _request(args, sample, sampling_params, evaluation)
    if request is None:
        sample.status = type(sample.status).TRUNCATED
        return sample
    running = await asyncio.to_thread(session_of, args)
    fill(facts_of(args), sample, request, await running.generate(request))
    sample.response = _tokenizer(args.hf_checkpoint).decode(sample.tokens[len(request.prompt_token_ids) :])
    return sample


def session_of(args: Any) -> Session:
    """This process's engine, started on first use."""
    global _session
    with _lock:
        if _session is None:
            weights = CommittedWeights(where_weights_come(args), facts_of(args))
            _session = Session(lambda: start_engine(args), weights.bring)
        return _session


def close_session() -> None:
    """Ends this process's engine. Idempotent."""
    global _session
    with _lock:
        if _session is not None:
            _session.close()
        _session = None


def fill(facts: ModelFacts, sample: Any, request: GenerationRequest, result: GenerationResult) -> None:
    """Puts a result into the framework's sample.

    Raises:
        EngineError: the request failed.
        ValueError: the trace does not fit the tokens.
    """
    if result.finish_reason == "error":
        raise EngineError(f"{request.request_id}: {result.error}")
    ids, logprobs = list(result.token_ids), list(result.logprobs)
    if result.trace is None and result.finish_reason == "abort":
        ids, logprobs = [], []  # what was drawn without a record cannot be trained on
    statuses = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}
    sample.status = getattr(type(sample.status), statuses[result.finish_reason])
    sample.tokens = [*request.prompt_token_ids, *ids]
    sample.response_length, sample.rollout_log_probs = len(ids), logprobs
    sample.loss_mask = [1] * len(ids)
    sample.weight_versions = [*sample.weight_versions, str(result.version)]
    sample.metadata[ABOUT] = {
        **sample.metadata.get(ABOUT, {}),
        "seed": result.seed,
        "version": str(result.version),
        "finish_reason": result.finish_reason,
        "execution": request.execution,
    }
    _fill_trace(facts, sample, request, result)


def _fill_trace(facts: ModelFacts, sample: Any, request: GenerationRequest, result: GenerationResult) -> None:
    if not sample.response_length:
        sample.multimodal_train_inputs = sample.rollout_routed_experts = None
        return
    rows = facts.trace.rows_of(
        result.trace,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_tokens=len(sample.tokens),
        config=facts.config,
        where=request.request_id,
    )
    if facts.trace.KIND == "loops":
        depths = torch.tensor([*rows.tolist(), facts.trace.last_row(facts.config)])
        sample.multimodal_train_inputs = {DEPTHS: depths, LENGTHS: torch.tensor([len(depths)])}
    else:
        sample.rollout_routed_experts = torch.from_numpy(rows.astype("int32"))


def _request(args: Any, sample: Any, given: Mapping[str, Any], evaluation: bool) -> GenerationRequest | None:
    """What is asked of the engine; None if the framework leaves no room for a token."""
    _start_anew(sample)
    about = sample.metadata.setdefault(ABOUT, {})
    about["attempt"] = about.get("attempt", -1) + 1
    sample.tokens = prompt = _prompt(args, sample)
    room = context_tokens(args) - len(prompt)
    max_tokens = room if given["max_new_tokens"] is None else min(given["max_new_tokens"], room)
    if max_tokens < 1:
        return None
    parts = (
        getattr(args, "rollout_seed", 0),
        "evaluation" if evaluation else "rollout",
        sample.index,
        about["attempt"],
    )
    return GenerationRequest(
        request_id=f"sample-{sample.index}/{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling_of(args, given, max_tokens=max_tokens, evaluation=evaluation),
        seed=new_seed() if sample.index is None else derive_seed(*parts),
        execution=getattr(args, "tether_execution", None),
    )


def sampling_of(args: Any, given: Mapping[str, Any], *, max_tokens: int, evaluation: bool) -> SamplingParams:
    """The framework's sampling parameters in the contract's words.

    Raises:
        ValueError: a parameter that the engine does not have, or, unless this is an evaluation, one that cannot be
            trained on.
    """
    known = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"}
    unknown = {name: value for name, value in given.items() if name not in known | _IGNORED and value is not None}
    if unknown:
        raise ValueError(
            f"sampling: got {unknown}, expected only {', '.join(sorted(known))}; end tokens are given by id"
        )
    values = {
        name: given[name] for name in ("temperature", "top_p", "min_p", "ignore_eos") if given.get(name) is not None
    }
    ends = {*(given.get("stop_token_ids") or ()), *_end_tokens(args.hf_checkpoint)}
    sampling = SamplingParams(
        max_tokens=max_tokens, top_k=max(given.get("top_k") or 0, 0), stop_token_ids=tuple(sorted(ends)), **values
    )
    if not evaluation:
        sampling.check_trainable()
    return sampling


def _start_anew(sample: Any) -> None:
    """Takes away what an aborted attempt drew."""
    if sample.response_length:
        sample.tokens = list(sample.tokens[: len(sample.tokens) - sample.response_length])
    sample.response, sample.response_length, sample.rollout_log_probs, sample.loss_mask = "", 0, None, None
    sample.multimodal_train_inputs = sample.rollout_routed_experts = None
    sample.weight_versions = []


def _prompt(args: Any, sample: Any) -> list[int]:
    if sample.tokens:
        return list(sample.tokens)
    tokenizer = _tokenizer(args.hf_checkpoint)
    if isinstance(sample.prompt, str):
        return tokenizer.encode(sample.prompt, add_special_tokens=False)
    return list(tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, return_dict=False))


@lru_cache(maxsize=2)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(Path(path))


@lru_cache(maxsize=2)
def _end_tokens(path: str) -> frozenset[int]:
    return frozenset(stop_token_ids(Path(path), _tokenizer(path)))
