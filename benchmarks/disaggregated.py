"""Prompts and answers in different processes at Ouro-1.4B's shape, beside the local engine in the same run.

    python -m benchmarks.disaggregated [--tiny] [--commit ID]

One card shared by both workers, and a card for each where there are two. What NIXL's transports are was found by the
probe that every start makes; what it met on the way is in the record. Log-probs of equal tokens are compared with the
local engine's: other batches, so rounding of the model's dtype. The time of a first token is that of requests which ask
for one token. The record is written after each.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.contract import GenerationRequest, GenerationResult, SamplingParams, derive_seed
from adapters.vllm_engine.client.local import LocalEngine
from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine
from adapters.vllm_engine.settings import EngineSettings
from benchmarks import record
from benchmarks.shapes import SHAPES, write_model

POLICY = "early:0.8:2:4"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--commit", help="of a working tree without git")
    arguments = parser.parse_args(argv)
    remarks = Remarks()
    logging.getLogger("adapters").addHandler(remarks)
    shape, work = ("tiny-ouro", (4, 40, 8)) if arguments.tiny else ("ouro-1.4b", (32, 1024, 128))
    recording = record.Recording(
        "disaggregated_cuda",
        command="python -m benchmarks.disaggregated",
        settings={
            "model": SHAPES[shape],
            "requests": work[0],
            "prompt": work[1],
            "response": work[2],
            "depth": POLICY,
        },
        commit_id=arguments.commit,
        is_kept=not arguments.tiny,
    )
    recording.save(remarks=remarks.lines)
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", shape)
        reference: list[GenerationResult] = []
        for placement in placements():
            with start(placement, model, shape) as engine:
                row, answers = measure(engine, shape, *work)
            reference = reference or answers
            row |= compare(answers, reference) if placement != "local" else {}
            row["transports"] = getattr(engine, "transports", None)
            recording.save(**{placement: row})
            print(placement, json.dumps(row), flush=True)
    recording.finish()
    return 0


class Remarks(logging.Handler):
    """Keeps what the engines log, the probe's findings among it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:500])


def placements() -> list[str]:
    two = torch.cuda.device_count() > 1
    return ["local", "1P1D, one card" if torch.cuda.is_available() else "1P1D", *(["1P1D, two cards"] if two else [])]


def start(placement: str, model: Path, shape: str) -> LocalEngine | DisaggregatedEngine:
    def worker(role: str, *devices: int) -> EngineSettings:
        return EngineSettings(
            model=model,
            log_path=model / f"{role}.log",
            max_model_len=1280 if shape == "ouro-1.4b" else 128,
            kv_cache_bytes=36_000_000_000 if shape == "ouro-1.4b" else 64 << 20,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            devices=devices,
        )

    if placement == "local":
        return LocalEngine(worker("local"))
    second = (1,) if placement.endswith("two cards") else (0,)
    devices = ((0,), second) if torch.cuda.is_available() else ((), ())
    return DisaggregatedEngine(prefill=[worker("prefill", *devices[0])], decode=[worker("decode", *devices[1])])


def measure(
    engine: LocalEngine | DisaggregatedEngine, shape: str, count: int, prompt: int, response: int
) -> tuple[dict[str, Any], list[GenerationResult]]:
    vocabulary = SHAPES[shape]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, vocabulary, (3, count, prompt), generator=generator).tolist()

    def run(which: int, tokens: int) -> tuple[float, list[GenerationResult]]:
        requests = [
            GenerationRequest(
                request_id=f"{which}-{i}",
                prompt_token_ids=tuple(each),
                sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
                seed=derive_seed(which, i),
                execution=POLICY,
            )
            for i, each in enumerate(prompts[which])
        ]
        started = time.perf_counter()
        results = {result.request_id: result for result in engine.generate(requests)}
        seconds = time.perf_counter() - started
        failed = [result.error for result in results.values() if result.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
        return seconds, [results[request.request_id] for request in requests]

    run(0, response)  # warm-up
    first_tokens, _ = run(1, 1)
    seconds, results = run(2, response)
    return {
        "seconds": seconds,
        "tokens_per_second": count * response / seconds,
        "seconds_to_one_token_of_each": first_tokens,
        "kv_bytes": sum(result.kv_bytes for result in results),
    }, results


def compare(answers: Sequence[GenerationResult], reference: Sequence[GenerationResult]) -> dict[str, Any]:
    """Differences of log-probs up to the first token in which an answer differs."""
    apart, same = [], 0
    for ours, theirs in zip(answers, reference, strict=True):
        pairs = list(zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True))
        equal = next((i for i, (a, b, *_) in enumerate(pairs) if a != b), len(pairs))
        apart += [abs(a - b) for _, _, a, b in pairs[:equal]]
        same += equal == len(pairs)
    figures = {"compared_tokens": len(apart), "logprob_diff_mean": sum(apart) / max(1, len(apart))}
    return {**figures, "logprob_diff_max": max(apart, default=None), "answers_with_equal_tokens": same}


if __name__ == "__main__":
    sys.exit(main())
