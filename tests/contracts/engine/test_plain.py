"""vLLM's own LLM class on a directory that names a depth policy: the plugin alone makes it follow, in every request."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.tiny import write_ouro

POLICY = "early:0.6:1:4"
BOUND = 2e-6  # fp32 rounding of two correct programs at std 0.02


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 256, (length,), generator=generator).tolist() for length in (5, 90, 17, 66)]
    directory = write_ouro(folder / "hf", depth_policy=POLICY)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    module = ["-m", "tests.contracts.engine.plain_engine"]
    command = [sys.executable, *module, *(str(folder / name) for name in ("hf", "prompts.json", "found.json"))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"Ouro: depth {POLICY} of 4 loops by default (config.json)" in run.stdout + run.stderr
    return {"prompts": prompts, "directory": directory, "found": json.loads((folder / "found.json").read_text())}


@pytest.fixture(scope="module")
def model(case: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    from providers.ouro import remote_code

    remote_code.register()
    return AutoModelForCausalLM.from_pretrained(case["directory"]).eval()


def selected(model: Any, tokens: list[int], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of tokens[1:] and the loops of tokens[:-1], by the code for transformers."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        output = model(ids[:, :-1], **options)
    return output.logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], output.exit_depths[0]


@pytest.mark.parametrize("key", ["scored", "scored_again"])
def test_scoring_follows_the_policy(case: dict[str, Any], model: Any, key: str) -> None:
    """Prompt log-probs: every token by the directory's policy, in chunks, as transformers gives them."""
    for prompt, got in zip(case["prompts"], case["found"][key], strict=True):
        want, loops = selected(model, prompt)
        off = (torch.tensor(got) - want).abs()
        print(f"{len(prompt)} tokens: max {off.max():.1e} mean {off.mean():.1e}; loops {loops.unique().tolist()}")
        assert off.max() <= BOUND
        full, _ = selected(model, prompt, depth="full")
        assert (full - want).abs().max() > 100 * BOUND, "a policy that is ignored must be seen"


@pytest.mark.parametrize(("key", "depth"), [("default", POLICY), ("default_again", POLICY), ("fixed:1", "fixed:1")])
def test_generation_follows_the_policy(case: dict[str, Any], model: Any, key: str, depth: str) -> None:
    """Prompts whole, generated tokens by the policy, also behind scored and cached prompts."""
    for prompt, got in zip(case["prompts"], case["found"][key], strict=True):
        options = {"depth": depth, "num_prompt_tokens": len(prompt)}
        want, loops = selected(model, [*prompt, *got["tokens"]], **options)
        off = (torch.tensor(got["logprobs"]) - want[len(prompt) - 1 :]).abs()
        print(f"{len(prompt)} tokens: max {off.max():.1e}; loops {loops[len(prompt) :].tolist()}")
        assert off.max() <= BOUND
        alone = model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=256, depth=depth
        )
        assert alone[0, len(prompt) :].tolist() == got["tokens"]


def test_nothing_accumulates(case: dict[str, Any]) -> None:
    """Of all requests at most the last batch is remembered: vLLM tells a worker of an end one step later."""
    assert case["found"]["records"] <= len(case["prompts"])
