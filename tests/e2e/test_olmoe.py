"""The whole thing for OLMoE: examples/olmoe/run.sh, stopped and resumed, exported, and the export served and scored."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.hf_convert.directory import HFDirectory
from providers.olmoe.config import OlmoeConfig
from providers.olmoe.physical import physical_tensors
from tether.stored import open_weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FEW_PROMPTS = ("--set", "prompts_per_update=8")


def recipe(out: Path, *arguments: str) -> None:
    command = [str(ROOT / "examples" / "olmoe" / "run.sh"), "--out", str(out), *arguments, *FEW_PROMPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(out: Path) -> list[dict[str, Any]]:
    lines = read_lines(out / "metrics.jsonl")
    timed = ("_seconds", "_per_second", "_mfu")
    return [{key: value for key, value in line.items() if not key.endswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Four updates in one go, and two and a resumed two."""
    folder = tmp_path_factory.mktemp("olmoe")
    recipe(folder / "one")
    recipe(folder / "two", "--updates", "2")
    recipe(folder / "two", "--updates", "4", "--resume")
    return folder / "one", folder / "two"


def test_resumed_equals_continuous(runs: tuple[Path, Path]) -> None:
    """Parameters of every expert, Adam's moments and masters, metrics and rollouts are bitwise the same."""
    stored = [open_weights(out) for out in runs]
    names = sorted(stored[0].reader.shapes)
    assert names == sorted(stored[1].reader.shapes) and len(names) == 4 * 69
    pairs = zip(*(weights.reader.read(names) for weights in stored), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    for update in range(1, 5):
        one, two = (read_lines(out / "rollouts" / f"update_{update:07d}.jsonl") for out in runs)
        assert [sample["experts"] for sample in one] == [sample["experts"] for sample in two]


def test_metrics(runs: tuple[Path, Path]) -> None:
    """Every update reports its routers, and trainer and engine agree."""
    for line in metrics_of(runs[0]):
        print({name: line[name] for name in ("reward_mean", "logprob_diff_mean", "logprob_diff_max", "router_z_loss")})
        assert line["logprob_diff_max"] < 1e-4 and line["routing_agreement"] > 0.999
        assert line["load_balance_loss"] >= 0.99 and line["dead_experts"] == 0
        load = torch.tensor(line["expert_load"])
        assert load.shape == (2, 8) and (load.sum(-1) == 2 * line["num_input_tokens"]).all()


@pytest.mark.usefixtures("megatron")
def test_export_serves_and_scores_alike(runs: tuple[Path, Path]) -> None:
    """OUT/hf holds exactly the config's tensors; vLLM's log-probs on it are the trainer's, within its own rounding."""
    from tests.contracts.depth.harness import rollouts
    from tests.contracts.experts.test_experts import FULL, apart, from_oracle, made, summary, trainer_scores
    from tests.unit.olmoe import reference

    hf = runs[0] / "hf"
    directory = HFDirectory(hf)
    table = physical_tensors(OlmoeConfig.from_hf(directory.config))
    directory.check({name: tensor.shape for name, tensor in table.items()}, dtype="float32")
    rows = made(rollouts(hf, "plain", (FULL,))).rows
    scores = trainer_scores(hf, torch.float32, rows, replay=True)
    off = apart(rows, scores)
    oracle = reference.load(hf, torch.float64)
    by_trainer = [type(row)(**{**vars(row), "logprobs": tuple(own)}) for row, own in zip(rows, scores, strict=True)]
    own = from_oracle(oracle, by_trainer)
    print(f"engine from trainer {summary(off)}; trainer fp32 from transformers fp64 {summary(own)}")
    assert max(off) <= 3 * max(own) and sum(off) <= 2 * sum(own)
