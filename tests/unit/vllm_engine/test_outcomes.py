"""What a request has produced so far, from the outputs of vLLM's core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from adapters.contract import GenerationRequest, SamplingParams
from adapters.vllm_engine.process.outcomes import Running

REQUEST = GenerationRequest(request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3), seed=0)


def output(*tokens: int, sampled: tuple[int, ...] | None = None, **others: Any) -> EngineCoreOutput:
    """Of a step with two requests; this is the second one. Columns: the sampled token, the likeliest one."""
    rows = np.array([(9, 8), *((token, 8) for token in sampled or tokens)], np.int32)
    found = LogprobsLists(rows, -0.25 * rows.astype(np.float32), np.ones(len(rows), np.int32))
    return EngineCoreOutput(
        request_id="a-00000000",
        new_token_ids=list(tokens),
        new_logprobs=found.slice_request(1, len(tokens)),
        **others,
    )


def test_steps_add_up() -> None:
    """Tokens, and the log-prob of each, in the order of the steps; the last output says where a prompt's keys are."""
    running = Running(REQUEST, "a-00000000", None)
    running.extend(output(5))
    assert running.params is None
    running.extend(output(3, 6, finish_reason=FinishReason.STOP, kv_transfer_params={"from": 1}))
    assert (running.token_ids, running.logprobs) == ([5, 3, 6], [-1.25, -0.75, -1.5])
    assert running.params == {"from": 1}


def test_an_end_without_tokens_and_a_score_have_no_log_probs() -> None:
    running = Running(REQUEST, "a-00000000", None)
    running.extend(EngineCoreOutput(request_id="a-00000000", new_token_ids=[], finish_reason=FinishReason.ERROR))
    running.extend(EngineCoreOutput(request_id="a-00000000", new_token_ids=[4], finish_reason=FinishReason.LENGTH))
    assert (running.token_ids, running.logprobs) == ([4], [])


def test_log_probs_of_other_tokens_are_refused() -> None:
    running = Running(REQUEST, "a-00000000", None)
    with pytest.raises(RuntimeError, match=r"request 'a': log-probs of \[5, 7\], of \[5, 6\]"):
        running.extend(output(5, 6, sampled=(5, 7)))
