"""Model FLOPs against matrix products as torch counts them in other programs of the models; rates by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from adapters.hf_convert.directory import HFDirectory
from providers.olmoe.config import OlmoeConfig
from providers.ouro.config import OuroConfig
from tests.oracle import Oracle
from tests.tiny import write_olmoe, write_ouro
from tether.settings import Settings
from tether.throughput import forward_flops, rates, training_flops

LOOPS = [4, 1, 3, 4, 2, 1, 2, 4, 3]


def config_of(kind: Any, path: Path) -> Any:
    return kind.from_hf(HFDirectory(path).config)


@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 2, "vocab_size": 384, "intermediate_size": 192}])
def test_ouro_counts_what_the_oracle_multiplies(tmp_path: Path, heads: dict[str, int]) -> None:
    """Tokens of mixed depths. The oracle also multiplies later positions, masked then, and its gate."""
    path = write_ouro(tmp_path, **heads)
    oracle, n = Oracle(path, torch.float32), len(LOOPS)
    with FlopCounterMode(display=False) as counter:
        oracle.run(list(range(5, 5 + n)), LOOPS)
    c = oracle.config
    queries = c["num_attention_heads"] * c["head_dim"]
    later = sum(loops * (n - 1 - position) for position, loops in enumerate(LOOPS))
    beside = 4 * queries * c["num_hidden_layers"] * later + 2 * c["hidden_size"] * sum(LOOPS)
    counted = forward_flops(config_of(OuroConfig, path), np.array(LOOPS, np.uint8), num_prompt_tokens=1)
    assert counted == counter.get_total_flops() - beside
    shallow = forward_flops(config_of(OuroConfig, path), np.array(LOOPS[:-1] + [1], np.uint8), num_prompt_tokens=1)
    assert shallow < counted


def test_olmoe_counts_what_transformers_multiplies(tmp_path: Path) -> None:
    """Of its experts only those that a token uses. transformers also multiplies later positions."""
    from transformers import AutoModelForCausalLM

    path, n = write_olmoe(tmp_path), 11
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(n)[None], use_cache=False)
    c = model.config
    beside = 4 * c.hidden_size * c.num_hidden_layers * n * (n - 1) // 2
    counted = forward_flops(config_of(OlmoeConfig, path), np.ones(n, np.int64), num_prompt_tokens=1)
    assert counted == counter.get_total_flops() - beside


def test_only_responses_are_scored(tmp_path: Path) -> None:
    """A longer prompt in the same sequence saves a row of the head for each of its tokens."""
    config = config_of(OuroConfig, write_ouro(tmp_path))
    one, four = (forward_flops(config, np.array(LOOPS), num_prompt_tokens=n) for n in (1, 4))
    assert one - four == 3 * 2 * config.hidden_size * config.vocab_size


def test_an_update_is_three_passes_and_old_scores_one(tmp_path: Path) -> None:
    """For each epoch; old log-probs cost a pass where the first step cannot find them."""
    from providers.ouro import trace

    config = config_of(OuroConfig, write_ouro(tmp_path))
    samples = [SimpleNamespace(trace=torch.tensor(LOOPS), prompt_token_ids=[1, 2])] * 2
    once = 2 * forward_flops(config, np.array(LOOPS), num_prompt_tokens=2)

    def flops(**settings: Any) -> int:
        job = SimpleNamespace(settings=Settings(**settings), config=config, part=lambda name: trace)
        return training_flops(job, samples)  # type: ignore[arg-type]

    assert flops() == 3 * once
    assert flops(epochs=2) == flops(epochs=2, mini_batches=2) == 7 * once
    assert flops(mini_batches=3) == 4 * once
    assert flops(epochs=2, old_policy="rollout", mismatch="none") == 6 * once


METRICS = {
    "train_seconds": 2.0, "rollout_seconds": 0.5, "train_model_flops": 6e12, "num_input_tokens": 300,
    "num_response_tokens": 100, "num_steps": 1, "skipped_steps": 0,
}  # fmt: skip


def test_rates() -> None:
    """Of all ranks together; the share of the peak is of all their devices."""
    told = rates(METRICS, Settings(peak_flops=1e13, train_devices=2, epochs=2))
    assert told == {
        "train_tokens_per_second": 300.0,
        "train_flops_per_second": 3e12,
        "train_mfu": 0.15,
        "rollout_tokens_per_second": 200.0,
    }


def test_what_was_not_measured_is_not_told() -> None:
    """No peak, no share of it; rollouts made beside training have no time of their own; no step, no FLOPs."""
    assert rates(METRICS, Settings(overlap_rollouts=True)).keys() == {
        "train_tokens_per_second",
        "train_flops_per_second",
    }
    idle = rates({**METRICS, "num_steps": 0}, Settings(peak_flops=1e13))
    assert (idle["train_flops_per_second"], idle["train_mfu"], idle["train_tokens_per_second"]) == (0, 0, 0)
    skipped = rates({**METRICS, "num_steps": 0, "skipped_steps": 1}, Settings())
    assert skipped["train_flops_per_second"] == 3e12
