"""What vLLM's own LLM class answers for a directory of ours, in a process of its own: one engine a process.

python -m tests.contracts.engine.plain_engine DIR TOKENS.json OUT.json    (TOKENS: a list of prompts as token ids)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def answers(directory: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Scores the prompts, generates from them by the directory's policy, and by one of the request's own."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=directory, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=256,
        max_num_batched_tokens=64, block_size=32, enable_prefix_caching=True,
    )  # fmt: skip
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]

    def scored() -> list[list[float]]:
        results = llm.generate(requests, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        return [
            [row[token].logprob for row, token in zip(r.prompt_logprobs[1:], prompt[1:], strict=True)]
            for r, prompt in zip(results, prompts, strict=True)
        ]

    def generated(**extra: Any) -> list[dict[str, Any]]:
        options = {"temperature": 0, "max_tokens": 10, "logprobs": 0, "ignore_eos": True, **extra}
        outputs = [result.outputs[0] for result in llm.generate(requests, SamplingParams(**options))]
        return [
            {"tokens": list(o.token_ids), "logprobs": [next(iter(row.values())).logprob for row in o.logprobs]}
            for o in outputs
        ]

    # Scoring first: its blocks must not serve the prompts that follow. Then again behind cached prompts.
    first = {"scored": scored(), "default": generated()}
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return {
        **first,
        "scored_again": scored(),
        "default_again": generated(),
        "fixed:1": generated(extra_args={"execution": "fixed:1"}),
        "records": len(worker._tether_plain.tether_records),
    }


if __name__ == "__main__":
    found = answers(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(found))
