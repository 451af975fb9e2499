"""The launch scripts: what they would run, and what they refuse. They start nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tether.vime
from tether.vime import serve
from tether.vime.arguments import read_facts
from tether.vime.flags import HOOKS, model_flags, settings_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(EXAMPLES / script / "vime.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """A checkout with a driver, data, and where to write."""
    (tmp_path / "framework").mkdir()
    (tmp_path / "framework" / "train.py").write_text("")
    (tmp_path / "data.jsonl").write_text("{}")
    return [tmp_path / "framework", tmp_path / "data.jsonl", tmp_path / "out"]


def options(words: list[str]) -> dict[str, str]:
    """Values of flags that have one."""
    return {a: b for a, b in zip(words, words[1:], strict=False) if a.startswith("--") and not b.startswith("--")}


@pytest.mark.parametrize("model", ["ouro", "olmoe"])
def test_what_is_run(model: str, inputs: list[Path], tiny_ouro: Path, tiny_olmoe: Path) -> None:
    """Every hook by a path that resolves, the model's own sizes, weights through a directory, and our settings."""
    path = {"ouro": tiny_ouro, "olmoe": tiny_olmoe}[model]
    framework, data, out = inputs
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    (out / "checkpoints" / "tether_versions.json").write_text('{"-1": 1, "0": 2, "1": 3}')
    done = run(
        model,
        framework,
        path,
        data,
        out,
        7,
        "--gpus",
        4,
        "--set",
        "tether_execution=full",
        "--print",
        "--",
        "--lr",
        "5",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")[1:-1]
    given = options(words)
    assert {flag: given[flag] for flag in HOOKS} == {flag: f"tether.vime.{name}" for flag, name in HOOKS.items()}
    assert all(callable(getattr(tether.vime, name)) for name in HOOKS.values())
    assert words[1 : 1 + len(model_flags(read_facts(path)))] == model_flags(read_facts(path))
    assert given["--hf-checkpoint"] == given["--ref-load"] == str(path)
    assert given["--load"] == given["--save"] == str(out / "checkpoints")
    assert (given["--num-rollout"], given["--lr"], given["--actor-num-gpus-per-node"]) == ("7", "5", "2")
    assert given["--update-weight-transport"] == "disk" and "--update-weight-disk-keep-files" in words
    assert json.loads(Path(given["--custom-config-path"]).read_text()) == {
        "tether_engine_devices": 3, "tether_execution": "full", "update_weight_start_version": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--nodes", "2"], "start a server elsewhere"),
        (["--set", "lr=1"], "expected tether_...=VALUE"),
        (["--fly"], "unknown option --fly"),
    ],
)
def test_what_is_refused(inputs: list[Path], tiny_ouro: Path, more: list[str], error: str) -> None:
    framework, data, out = inputs
    done = run("ouro", framework, tiny_ouro, data, out, 1, "--print", *more)
    assert done.returncode == 2 and error in done.stderr


def test_usage() -> None:
    for script in ("ouro", "olmoe"):
        printed = run(script, "--help").stdout
        assert printed.startswith("Trains an") and printed.endswith("docs/vime.md says what of this was run.\n")


def test_settings() -> None:
    got: dict[str, Any] = settings_of(
        ["tether_engine=1+2", "tether_kv_cache_bytes=1000", "tether_execution=early:0.9:2:4"]
    )
    assert got == {"tether_engine": "1+2", "tether_kv_cache_bytes": 1000, "tether_execution": "early:0.9:2:4"}


def test_the_server_that_draws_samples(tiny_ouro: Path) -> None:
    """`--serve` runs vLLM's own server with our worker, for the checkpoint's dtype unless told otherwise."""
    words, environment = serve.command(serve.parse([str(tiny_ouro), "--port", "7", "--context", "40"]))
    given = options(words)
    assert given["--port"] == "7" and given["--max-model-len"] == "40" and given["--dtype"] == "float32"
    assert given["--worker-extension-cls"].endswith("HttpWorker") and environment["VLLM_PLUGINS"] == "tether"
