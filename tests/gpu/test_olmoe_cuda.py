"""OLMoE on CUDA: the grouped product, and trainer = engine with replay, in fp32 and bf16, by DESIGN's yardstick."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.contract import GenerationRequest, SamplingParams
from adapters.vllm_engine.client.local import LocalEngine
from tests.contracts.depth.harness import MIXED, Row, first_turn
from tests.contracts.engine.conftest import next_version, run, settings_for
from tests.contracts.experts.test_experts import apart, from_oracle, summary, trainer_scores
from tests.tiny import write_olmoe
from tests.unit.olmoe import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("megatron")]


def test_grouped_product_equals_one_product_an_expert() -> None:
    """bf16: value and gradients of the grouped product, also with experts without rows, within bf16 rounding."""
    from adapters.megatron.moe import grouped_linear

    torch.manual_seed(0)
    counts = torch.tensor([0, 5, 64, 0, 1, 130, 0, 56])
    x = torch.randn(int(counts.sum()), 128, device="cuda")
    weight = 0.1 * torch.randn(len(counts), 192, 128, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        rows, each = (t.to(torch.bfloat16).to(dtype).detach().requires_grad_() for t in (x, weight))
        out = grouped_linear(rows, each, counts)
        out.float().square().sum().backward()
        results.append((out, rows.grad, each.grad))
    for got, want in zip(*results, strict=True):
        off = (got.float() - want).abs().max() / want.abs().max()
        print(f"{float(off):.1e}")
        assert off < 2e-2
    assert not results[0][2][0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_equals_engine(tmp_path: Path, dtype: str) -> None:
    """Replayed scores within the yardstick; a publication of the same weights changes nothing; experts read back."""
    path = write_olmoe(tmp_path / "model", dtype=getattr(torch, dtype))
    with LocalEngine(settings_for(path, tmp_path / "log", dtype=dtype)) as engine:
        rows = roll(engine)
        from safetensors.torch import load_file

        engine.publish(next_version(engine), load_file(path / "model.safetensors"))
        again = roll(engine)
    kind = getattr(torch, dtype)
    narrow, live = (trainer_scores(path, kind, rows, replay=replay) for replay in (True, False))
    off, without = apart(rows, narrow), apart(rows, live)
    by_trainer = [type(row)(**{**vars(row), "logprobs": tuple(own)}) for row, own in zip(rows, narrow, strict=True)]
    own = from_oracle(reference.load(path, torch.float64), by_trainer)
    print(f"{dtype}: replayed {summary(off)}; routed anew {summary(without)}; own rounding {summary(own)}")
    assert max(off) <= 3 * max(own) and sum(off) <= 2 * sum(own)
    same = sum(a.tokens == b.tokens for a, b in zip(rows, again, strict=True))
    print(f"{same} of {len(rows)} rollouts the same after publishing the same weights")
    assert same >= len(rows) // 2, "batches may differ, weights must not"


def roll(engine: LocalEngine) -> list[Row]:
    requests = [
        GenerationRequest(
            request_id=f"{i}",
            prompt_token_ids=tuple(w["prompt"]),
            sampling=SamplingParams(max_tokens=w["tokens"], temperature=w["temperature"], ignore_eos=True),
            seed=w["seed"],
        )
        for i, w in enumerate(first_turn(MIXED))
    ]
    return [
        Row(
            prompt=request.prompt_token_ids,
            tokens=result.token_ids,
            logprobs=result.logprobs,
            scores=result.logprobs,
            loops=tuple(result.trace.data),
            temperature=request.sampling.temperature,
            seed=request.effective_seed,
            execution="",
        )
        for request, result in zip(requests, run(engine, requests), strict=True)
    ]
