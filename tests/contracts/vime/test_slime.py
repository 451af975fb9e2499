"""Our hooks in a real checkout of slime, on CPU. Only with TETHER_SLIME=path; docs/vime.md says how to get there.

slime's own parser, actor, log-probs, loss, training steps, checkpoints, weight walks and directory publication run as
they are (`slime_process` says what stands in for CUDA). What they say is compared with Tether's driver, with the
checkpoint, and between layouts; every comparison is also made with a hook that is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contracts.vime.slime_case import REPOSITORY, Case, run, write_case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TETHER_SLIME" not in os.environ, reason="TETHER_SLIME=path of a slime checkout"),
]

SAME_SCORES = 2e-6
"""fp32, std 0.02: rounding of two orders of summation."""
CASES = [
    Case("ouro"),
    Case("ouro", world=2),
    Case("ouro", world=2, tensor=2),
    Case("olmoe"),
    Case("olmoe", world=2, expert=2),
    Case("olmoe", world=2, tensor=2),
    Case("ouro", world=2, bf16=True),
]
MUTATIONS = [
    ("ignored_depths", Case("ouro"), "scores"),
    ("shifted_depths", Case("ouro"), "scores"),
    ("lost_record", Case("ouro"), "error: execution_depths"),
    ("swapped_reading", Case("ouro"), "scores"),
    ("swapped_writing", Case("ouro"), "weights"),
    ("unmarked_shards", Case("ouro", world=2, tensor=2), "error: Shape mismatch"),
    ("ignored_experts", Case("olmoe"), "scores"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model)
            write_case(made[model], model)
        return made[model]

    return folder


@pytest.fixture(scope="module")
def trained(folders: Callable[[str], Path]) -> Callable[[Case], dict[str, Any]]:
    """Findings of the stages `train` and `resume` of a case, run once."""
    done: dict[Case, dict[str, Any]] = {}

    def findings(case: Case) -> dict[str, Any]:
        if case not in done:
            out = folders(case.model) / case.name
            done[case] = {}
            for stage in ("train", "resume"):
                assert not (output := run(stage, case, folders(case.model), out=out)), output
                done[case][stage] = torch.load(out / f"{stage}.pt", weights_only=False)
        return done[case]

    return findings


@pytest.fixture(scope="module")
def driver(folders: Callable[[str], Path], megatron: None) -> Callable[..., list[list[float]]]:
    """The driver's own scores of the first rollout, in fp32 unless asked otherwise."""
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer
    from providers.registry import provider

    def scores(model: str, dtype: torch.dtype = torch.float32) -> list[list[float]]:
        directory = HFDirectory(folders(model) / "model")
        config = provider(model, "config").Config.from_hf(directory.config)
        built = provider(model, "model").build(config, dtype=dtype)
        trainer = Trainer(built, optimizer=OptimizerSettings(learning_rate=1e-3), tokens_per_microbatch=64)
        trainer.load_hf(directory)
        samples = []
        for record in json.loads((folders(model) / "samples_0.json").read_text()):
            prompt = len(record["tokens"]) - record["response_length"]
            rows = record["depths"][:-1] if model == "ouro" else record["experts"]
            samples.append(
                TrainSample(
                    prompt_token_ids=record["tokens"][:prompt],
                    response_token_ids=record["tokens"][prompt:],
                    trace=torch.tensor(rows),
                )
            )
        return trainer.score(samples)

    return scores


def apart(scores: dict[int, list[float]], wanted: list[list[float]]) -> float:
    """Largest difference of a response token's log-prob."""
    pairs = [(a, b) for place, own in enumerate(wanted) for a, b in zip(scores[place], own, strict=True)]
    return max(abs(a - b) for a, b in pairs)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_saves_publishes_and_resumes(case: Case, folders: Any, trained: Any, driver: Any) -> None:
    """HF load, log-probs equal to the driver's, two steps, publication, and a fresh process that goes on bitwise."""
    first, second = trained(case)["train"], trained(case)["resume"]
    off = apart(first["scores"], driver(case.model))
    print(f"{case.name}: log-probs {off:.1e} from the driver's")
    print("  loss, norm:", [(round(s["train/loss"], 6), round(s["train/grad_norm"], 4)) for s in first["steps"]])
    bound = SAME_SCORES
    if case.bf16:  # the yardstick: three times the driver's own rounding in bf16
        bound = 3 * apart(dict(enumerate(driver(case.model, torch.bfloat16))), driver(case.model))
        print(f"  three times the driver's own rounding in bf16: {bound:.1e}")
    assert off <= bound
    assert (first["start"], second["start"]) == (0, 1)
    assert equal(second["loaded"], first["trained"]), "the checkpoint holds other weights than were trained"
    assert equal(second["continued"], first["continued"]), "a fresh process goes on differently"
    assert second["steps"] == first["steps"][2:]
    assert not equal(first["trained"], first["continued"])
    published = folders(case.model) / case.name / "weights"
    assert json.loads((published / "tether_committed.json").read_text())["version"] == first["version"] == 1
    shards = {}
    for path in sorted((published / "weight_v000001").glob("*.safetensors")):
        shards |= load_file(path)
    assert equal(shards, first["trained"])
    assert second["version"] == 0, "the checkpoint was saved before the first publication: it has the next number again"


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.world > 1 and not case.bf16], ids=lambda case: case.name
)
def test_layouts_agree(case: Case, folders: Any, trained: Any) -> None:
    """Two ranks make the steps of one: weights differ by rounding, a ten-thousandth of what the steps changed."""
    one, several = trained(Case(case.model))["train"], trained(case)["train"]
    start = stored(folders(case.model))
    moved = max(float((one["continued"][name] - start[name]).abs().max()) for name in start)
    off = max(float((several["continued"][name] - one["continued"][name]).abs().max()) for name in start)
    print(f"{case.name}: weights moved {moved:.1e}, differ from one rank's by {off:.1e}")
    assert off <= 1e-4 * moved
    for mine, other in zip(several["steps"], one["steps"], strict=True):
        assert mine["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4, abs=1e-6)


def look(case: Case, folder: Path, *, mutate: str = "") -> tuple[dict[str, Any], str]:
    out = folder / f"{case.name}-{mutate or 'right'}"
    output = run("look", case, folder, out=out, mutate=mutate)
    return ({} if output else torch.load(out / "look.pt", weights_only=False)), output


@pytest.mark.parametrize("case", [Case("ouro"), Case("olmoe", world=2, expert=2)], ids=lambda case: case.name)
def test_both_walks_give_the_checkpoint(case: Case, folders: Any, driver: Any) -> None:
    """What is published through a directory and what the NCCL updater would send are the loaded tensors, bitwise."""
    found, output = look(case, folders(case.model))
    assert not output, output
    assert equal(found["loaded"], stored(folders(case.model))) and equal(found["nccl"], found["loaded"])
    assert apart(found["scores"], driver(case.model)) <= SAME_SCORES


@pytest.mark.parametrize(("mutation", "case", "seen"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_wrong_hooks_are_noticed(mutation: str, case: Case, seen: str, folders: Any, driver: Any) -> None:
    """Each wrong hook breaks the check that is there for it, far beyond its tolerance."""
    found, output = look(case, folders(case.model), mutate=mutation)
    if seen.startswith("error: "):
        assert seen.removeprefix("error: ") in output, output or "nothing was noticed"
    elif seen == "weights":
        assert not equal(found["loaded"], stored(folders(case.model)))
    else:
        off = apart(found["scores"], driver(case.model))
        print(f"{mutation}: log-probs {off:.1e} from the driver's")
        assert off >= 100 * SAME_SCORES


@pytest.mark.parametrize("model", ["ouro", "olmoe"])
def test_the_parser_takes_what_a_launch_script_gives(model: str, folders: Any, tmp_path: Path) -> None:
    """slime's own parser on `vime.sh --print`, and the provider's comparison of what it made of it."""
    (tmp_path / "data.jsonl").write_text("{}")
    script = REPOSITORY / "examples" / model / "vime.sh"
    command = [
        script,
        os.environ["TETHER_SLIME"],
        folders(model) / "model",
        tmp_path / "data.jsonl",
        tmp_path / "out",
        3,
    ]
    command += ["--gpus", 8, "--set", "tether_execution=full", "--print"]
    environment = {**os.environ, "PYTHON": sys.executable}
    printed = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    words = printed.stdout.split("\n")[2:-1]
    assert not (output := run("parse", Case(model), folders(model), out=tmp_path / "parsed", words=words)), output
    parsed = torch.load(tmp_path / "parsed" / "parse.pt", weights_only=False)
    assert parsed.pop("load") == str(folders(model) / "model"), "a fresh run starts from the model"
    assert (parsed.pop("tether_execution"), parsed.pop("update_weight_transport")) == ("full", "disk")
    assert all(path.startswith("tether.vime.") for path in parsed.values())


def test_slimes_own_rollout_takes_our_samples(folders: Any) -> None:
    """Loaded and called by slime's `generate_and_rm` with its own sampling parameters, filled into its own samples."""
    out = folders("ouro") / "generate"
    assert not (output := run("generate", Case("ouro"), folders("ouro"), out=out)), output
    found = torch.load(out / "generate.pt", weights_only=False)
    assert found["status"] == ["ABORTED", "COMPLETED", "COMPLETED", "TRUNCATED"] and found["versions"] == {"3.1"}
    assert ("t20", "t21", "t22", "t23") in found["responses"]
    assert found["trained"][0] == 0 and min(found["trained"][1:]) == 4, "the aborted one is masked"
    assert found["depths"] == found["tokens"]


HOOKS = {
    "test_plugin_path_loading_contracts.py": {},
    "test_plugin_generate_contracts.py": {},
    "test_plugin_rollout_contracts.py": {},
    "test_plugin_runtime_hook_contracts.py": {},
}


@pytest.mark.parametrize("file", HOOKS)
def test_slimes_own_contract_tests(file: str) -> None:
    """The checkout's own tests of hooks pass here, so that what they pin is what this file relies on."""
    slime = Path(os.environ["TETHER_SLIME"])
    command = [
        os.environ.get("TETHER_SLIME_PYTHON", sys.executable),
        "-m",
        "pytest",
        "-q",
        f"tests/plugin_contracts/{file}",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{slime}:{REPOSITORY}"}
    done = subprocess.run(command, cwd=slime, env=environment, capture_output=True, text=True, timeout=300)
    print(done.stdout[-400:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
