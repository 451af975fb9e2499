"""Prompts and answers in different processes on CUDA: the local engine's tokens, on keys and values that travelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine
from tests.contracts.engine.conftest import make_requests, run, settings_for, start_engine
from tests.tiny import write_ouro

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_local_engines(tmp_path: Path, dtype: str, cards: int) -> None:
    """fp32: the same tokens and traces, log-probs within 2e-6, because the batches differ. bf16 is only reported."""
    if torch.cuda.device_count() < cards:
        pytest.skip(f"{torch.cuda.device_count()} of {cards} devices")
    model = write_ouro(tmp_path / "model")
    ours, theirs = [], []
    with start_engine("local", model, tmp_path, dtype=dtype) as engine:
        theirs += run(engine, make_requests("cuda"))
    workers = {
        role: [settings_for(model, tmp_path / f"{role}.log", dtype=dtype, devices=(device,))]
        for role, device in (("prefill", 0), ("decode", cards - 1))
    }
    with DisaggregatedEngine(**workers) as joint:
        print(f"{cards} cards: transports {joint.transports}")
        ours += run(joint, make_requests("cuda"))
    assert min(r.kv_bytes for r in ours) > 0
    pairs = [(a, b) for r, s in zip(ours, theirs, strict=True) for a, b in zip(r.logprobs, s.logprobs, strict=False)]
    same = sum(r.token_ids == s.token_ids for r, s in zip(ours, theirs, strict=True))
    print(
        f"{dtype}: {same} of {len(ours)} with equal tokens, log-probs differ by {max(abs(a - b) for a, b in pairs):.1e}"
    )
    if dtype == "float32":
        assert same == len(ours) and [r.trace for r in ours] == [s.trace for s in theirs]
        assert max(abs(a - b) for a, b in pairs) <= 2e-6
