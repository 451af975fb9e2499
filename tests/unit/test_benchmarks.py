"""Benchmarks that a run on a device pays for run to their end at tiny size before they are sent there.

What they say of a limit is worked out here by hand, and a run that was cut off has a record that says so.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure, record, tables
from benchmarks.performance_tables import rollout_steps, update_phases
from benchmarks.rollout_limits import experts_read, limit
from benchmarks.shapes import config_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train_replay", "logprob", "olmoe_train"])
def test_runs_at_tiny_size(module: str) -> None:
    """Exit status 0, a line of JSON, and no record among the results."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--tiny", "--repeats", "1", "--profile"]
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads("{" + done.stdout.strip().splitlines()[-1].partition("{")[2])
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before


@pytest.mark.slow
def test_rollouts_of_olmoe_run_beside_vllms_own_model() -> None:
    """A line for each case of both engines; the peer itself refuses to measure another class than vLLM's."""
    command = [sys.executable, "-m", "benchmarks.rollout", "--tiny", "--model", "olmoe-1b-7b", "--repeats", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[0] for line in done.stdout.splitlines() if "tokens/s" in line]
    assert lines == ["graphs"] * 3 + ["peer"] * 3, done.stdout


def test_experts_that_are_read_are_those_of_all_choices() -> None:
    """Two tokens of tiny-olmoe choose 2 of 8 experts each: counted over every pair of choices."""
    choices = [set(each) for each in itertools.combinations(range(8), 2)]
    counted = [len(one | other) for one in choices for other in choices]
    assert experts_read(config_of("tiny-olmoe"), 2) == pytest.approx(sum(counted) / len(counted), rel=1e-12)
    assert experts_read(config_of("tiny-ouro"), 2) is None


@pytest.mark.parametrize(
    ("name", "loops", "read_bytes", "prompt_flops", "token_bytes"),
    [
        # Width 2048, attention 4 x 2048^2; Ouro: 24 layers, 3 x 5632 x 2048; OLMoE: 16 layers, a router of 64 rows and
        # 8 experts of 3 x 1024 x 2048, all that one token reads. In bf16; keys and values of 16 heads of 128.
        (
            "ouro-1.4b",
            2.0,
            2 * (2 * 24 * (4 * 2048**2 + 3 * 5632 * 2048) + 49152 * 2048),
            2 * (4 * 24 * (4 * 2048**2 + 3 * 5632 * 2048) * 128 + 49152 * 2048),
            2 * 2 * 2048 * 24 * 2,
        ),
        (
            "olmoe-1b-7b",
            1.0,
            2 * (16 * (4 * 2048**2 + 64 * 2048 + 8 * 3 * 1024 * 2048) + 50304 * 2048),
            2 * (16 * (4 * 2048**2 + 64 * 2048 + 8 * 3 * 1024 * 2048) * 128 + 50304 * 2048),
            2 * 2 * 2048 * 16,
        ),
    ],
)
def test_limit_of_one_request(name: str, loops: float, read_bytes: int, prompt_flops: int, token_bytes: int) -> None:
    """100 tokens behind a prompt of 128: the weights at each, and keys and values of 178 tokens in the mean."""
    row = {"requests": 1, "response": 100, "depth_mean": loops}
    seconds = 100 * (read_bytes + 178 * token_bytes) / 4e12 + prompt_flops / 8e14
    machine = {"bytes_per_second": 4e12, "flops_per_second": 8e14}
    assert limit(row, config_of(name), machine) == pytest.approx(100 / seconds, rel=1e-12)


def test_record_of_a_run_that_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written after every part; record and table call it incomplete until the end, and nothing else is left behind."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    path, text = tmp_path / "rollout_olmoe_cuda.json", "<!-- table rollout_olmoe_cuda -->\n<!-- end -->"
    assert "Not measured yet." in tables.render(text)
    recording = record.Recording("rollout_olmoe_cuda", command="measure", settings={}, commit_id="f" * 40)
    assert not path.exists()
    row = {"engine": "peer", "requests": 32, "response": 256, "experts_read": 63.1, "limit_tokens_per_second": 200.0}
    recording.save(rows=[{**row, "tokens_per_second": [90.0, 110.0]}])
    assert json.loads(path.read_text())["complete"] is False
    assert "| peer | 32 x 256 | 63.1 | 100 | 90 .. 110 | 200 | 50 % |" in tables.render(text)
    assert "**incomplete**" in tables.render(text)
    recording.finish(last=1)
    assert json.loads(path.read_text())["results"].keys() == {"rows", "last"}
    assert "incomplete" not in tables.render(text)
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    recording = record.Recording("any", command="", settings={}, is_kept=False)
    recording.save(rows=[])
    recording.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("table", "results"),
    [
        ("memory_ouro_1_4b.engine", {"trainer": []}),
        ("difference_ouro_1_4b", {}),
        ("difference_ouro_1_4b.operations", {"rows": []}),
        ("train_replay_cuda", {"limit": {"flops_per_second": 1.0}, "updates": [], "peers": []}),
        ("olmoe_train_cuda", {"limit": {"flops_per_second": 1.0}}),
        ("rollout_before_cuda.steps", {"rows": [], "profiled_steps": []}),
    ],
)
def test_table_of_a_part_that_was_not_reached(table: str, results: dict[str, object]) -> None:
    """It says so, and that the record is incomplete."""
    about = {"command": "measure", "commit": "f" * 40, "date": "2026-11-30", "device": "1 x X", "complete": False}
    made = tables.TABLES[table]({**about, "results": results})
    assert made.startswith("Not in this record.") and "**incomplete**" in made


def test_phases_of_updates_are_those_that_the_record_has() -> None:
    """An older record says of a publication only how long it was; in a newer one an update may lack a phase."""
    old = {"update": 1, "execution": "full", "rollout_seconds": 2.0, "publish_seconds": 0.5, "save_seconds": 0.25}
    new = old | {"update": 2, "publish_write_seconds": 0.375, "publish_read_back_seconds": 0.125}
    head, rows = update_phases({"results": {"metrics": [old]}})
    assert head[2:] == ["rollout s", "train s", "publish s", "save s"]
    assert rows[0][2:] == ["2.00", "0.00", "0.500", "0.25"]
    head, rows = update_phases({"results": {"metrics": [old, new]}})
    assert head[4:] == ["publish s", "publish write s", "publish read back s", "save s"]
    assert [row[4:] for row in rows] == [["0.500", "0.000", "0.000", "0.25"], ["0.500", "0.375", "0.125", "0.25"]]


def test_what_the_host_spends_a_step_on() -> None:
    """The function that takes the time comes first, with its calls; a record without the host's part has no column."""

    def busy() -> int:
        return sum(i * i for i in range(1000))

    found = measure.top_functions(lambda: [busy() for _ in range(100)], count=2)
    assert "<genexpr>" in found[0]["name"] and "test_benchmarks.py" in found[0]["name"]
    assert found[0]["calls"] == 100 * 1001 and found[0]["ms"] > found[1]["ms"] > 0
    step = {"policy": "full", "requests": 1, "steps": 2, "ms_per_step": 3.0, "kernels_ms": 2.0}
    step["top"] = [{"name": "void work<int>(int)", "ms": 1.0}]
    head, rows = rollout_steps({"results": {"profiled_steps": [step]}})
    assert len(head) == len(rows[0]) == 5
    head, rows = rollout_steps({"results": {"profiled_steps": [step | {"host": found[:1]}]}})
    assert head[-1].startswith("largest of the host") and f"`{found[0]['name']}` " in rows[0][-1]
