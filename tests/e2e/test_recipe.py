"""The whole thing: examples/ouro/run.sh with real Megatron-Core and real vLLM, killed, resumed, exported and served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from adapters.contract import GenerationRequest, SamplingParams
from tests.oracle import Oracle
from tether.stored import find_checkpoint, open_weights

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "ouro" / "run.sh"
SMALL = ("--set", "prompts_per_update=8", "--set", "depth=cycle:3,4,2")
"""Few prompts, and a schedule that a resume has to enter in the middle."""
KEYS = {
    "update", "weight_version", "reward_mean", "loss", "grad_norm", "logprob_diff_mean", "logprob_diff_max",
    "num_tokens", "rollout_seconds", "train_seconds", "publish_seconds", "save_seconds",
}  # fmt: skip
ROLLOUT_KEYS = {
    "prompt_token_ids", "response_token_ids", "response", "logprobs", "exit_depths", "seed", "temperature",
    "weight_version", "reward", "advantage", "finish_reason",
}  # fmt: skip


def start(out: Path, *arguments: object) -> subprocess.Popen[str]:
    """The recipe, its output going to OUT.log."""
    command = [str(RECIPE), "--out", str(out), *map(str, arguments), *SMALL]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=out.parent)


def finish(process: subprocess.Popen[str], out: Path) -> str:
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    text = out.with_suffix(".log").read_text()
    assert code == 0, text
    return text


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def processes_of(out: Path) -> list[int]:
    """Pids of the processes whose command line names a run directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:
            continue
        if os.fsencode(out) in command:
            found.append(int(entry.parent.name))
    return found


@pytest.fixture(scope="module")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four updates in one go: OUT and what was printed."""
    out = tmp_path_factory.mktemp("continuous") / "run"
    return out, finish(start(out), out)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, continuous: tuple[Path, str]) -> Path:
    """A run killed without warning in update 4, when its newest checkpoint is that of update 2."""
    out = tmp_path_factory.mktemp("killed") / "run"
    process = start(out, "--updates", "40")  # the number of updates is not part of the contract
    try:
        wait_until(
            lambda: process.poll() is not None or len(read_lines(out / "metrics.jsonl")) >= 3,
            seconds=240,
            what="three updates",
        )
        assert process.poll() is None, out.with_suffix(".log").read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    return out


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Path:
    """The killed run, gone on from update 2 to 4 by a fresh process."""
    assert find_checkpoint(killed).name == "iter_0000002", "killed too late for this test"
    assert len(read_lines(killed / "metrics.jsonl")) >= 3 and (killed / "rollouts" / "update_0000003.jsonl").exists()
    finish(start(killed, "--updates", "4", "--resume"), killed)
    return killed


def test_recipe_leaves_a_whole_run(continuous: tuple[Path, str]) -> None:
    """Metrics, every sample, checkpoints from the very start, an export, and three lines that say what next."""
    out, text = continuous
    lines = read_lines(out / "metrics.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3, 4] == [line["weight_version"] for line in lines]
    assert all(line.keys() >= KEYS for line in lines)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["iter_0000000", "iter_0000002", "iter_0000004", "latest"]
    for update in range(1, 5):
        samples = read_lines(out / "rollouts" / f"update_{update:07d}.jsonl")
        assert len(samples) == 64 and all(sample.keys() >= ROLLOUT_KEYS for sample in samples)
        assert {tuple(sample["weight_version"].values()) for sample in samples} == {(1, update - 1)}
        assert len({sample["seed"] for sample in samples}) == 64
    assert [line.split(":")[0] for line in text.splitlines()[-3:]] == ["run", "resume", "export"]
    assert not processes_of(out)


def test_engine_of_a_killed_run_ends_by_itself(killed: Path) -> None:
    """Nothing is left behind that holds memory or a device."""
    wait_until(lambda: not processes_of(killed), seconds=30, what="the engine of the killed run")


def test_killed_and_resumed_equals_continuous(continuous: tuple[Path, str], resumed: Path) -> None:
    """Parameters, Adam moments and masters, metrics and samples are bitwise the same; only times differ."""
    one, other = open_weights(continuous[0]), open_weights(resumed)
    assert one.path.name == other.path.name == "iter_0000004"
    names = sorted(one.reader.shapes)
    assert names == sorted(other.reader.shapes)
    pairs = zip(one.reader.read(names), other.reader.read(names), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []
    assert sum(name.startswith("optimizer.") for name in names) == 3 * 36, "moments and masters of 36 trained tensors"

    def without_times(out: Path) -> list[dict[str, Any]]:
        lines = read_lines(out / "metrics.jsonl")
        return [{key: value for key, value in line.items() if not key.endswith("_seconds")} for line in lines]

    assert without_times(resumed) == without_times(continuous[0])
    for update in range(1, 5):
        rollouts = [read_lines(out / "rollouts" / f"update_{update:07d}.jsonl") for out in (continuous[0], resumed)]
        incarnations = [{sample["weight_version"].pop("incarnation") for sample in samples} for samples in rollouts]
        assert incarnations == [{1}, {1 if update <= 2 else 2}], "a resume opens a new incarnation"
        assert rollouts[0] == rollouts[1]


def test_served_export_scores_as_the_trainer_does(continuous: tuple[Path, str], tmp_path: Path) -> None:
    """vLLM serves OUT/hf with the trainer's log-probs, within rounding of the trained weights."""
    from adapters.vllm_engine.local import LocalEngine
    from adapters.vllm_engine.settings import EngineSettings

    hf = continuous[0] / "hf"
    samples = read_lines(continuous[0] / "rollouts" / "update_0000004.jsonl")[::4]
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_token_ids=tuple(sample["prompt_token_ids"]),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True),
            seed=i,
            execution="full",
        )
        for i, sample in enumerate(samples)
    ]
    settings = EngineSettings(
        model=hf, log_path=tmp_path / "engine.log", max_model_len=64, dtype="float32", kv_cache_bytes=64 << 20
    )
    with LocalEngine(settings) as engine:
        results = {result.request_id: result for result in engine.generate(requests)}
    tokens = [(list(r.prompt_token_ids), list(results[r.request_id].token_ids)) for r in requests]
    engine_scores = [value for request in requests for value in results[request.request_id].logprobs]
    trainer_scores = score_with_trainer(hf, tokens)
    oracle = Oracle(hf)
    exact = [value for prompt, response in tokens for value in oracle_scores(oracle, prompt, response)]

    floor = [abs(a - b) for a, b in zip(trainer_scores, exact, strict=True)]
    apart = [abs(a - b) for a, b in zip(trainer_scores, engine_scores, strict=True)]
    print(f"engine against trainer: max {max(apart):.1e} mean {fmean(apart):.1e} of {len(apart)}, first {apart[:5]}")
    print(f"trainer against fp64: max {max(floor):.1e} mean {fmean(floor):.1e}")
    # Rounding grows with trained weights: the trainer's own fp32 error is the yardstick (DESIGN.md).
    assert max(apart) <= 3 * max(floor) and fmean(apart) <= 2 * fmean(floor)


def score_with_trainer(hf: Path, tokens: list[tuple[list[int], list[int]]]) -> list[float]:
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron import cpu_runtime, runtime
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer
    from providers.ouro.config import OuroConfig
    from providers.ouro.model import build

    runtime.initialize(runtime.RuntimeSettings())
    try:
        source = HFDirectory(hf)
        model = build(OuroConfig.from_hf(source.config), dtype=torch.float32)
        trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-3), tokens_per_microbatch=4096)
        trainer.load_hf(source)
        samples = [TrainSample(prompt_token_ids=prompt, response_token_ids=response) for prompt, response in tokens]
        return [value for values in trainer.score(samples) for value in values]
    finally:
        runtime.shutdown()
        cpu_runtime.uninstall()


def oracle_scores(oracle: Oracle, prompt: list[int], response: list[int]) -> list[float]:
    inputs = [*prompt, *response][:-1]
    logits, _ = oracle.run(inputs, [oracle.config["total_ut_steps"]] * len(inputs))
    rows = logits[len(prompt) - 1 :].log_softmax(-1)
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
