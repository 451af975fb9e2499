"""examples/ouro/run.sh: its arguments arrive at the driver's own parser, from any directory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "examples" / "ouro" / "run.sh"


def recipe(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(RECIPE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def test_positional_arguments_and_settings_reach_the_parser(tiny_ouro: Path, tmp_path: Path) -> None:
    """Paths are relative to where it is called; an option beats the positional argument of the same meaning."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt_token_ids": [3], "label": "1"}) + "\n")
    done = recipe(
        tiny_ouro, "data.jsonl", "first", "4", "--out", "my run", "--updates", "6", "--set", "depth=early:0.9:2:4",
        "--set", "reward=tether.rewards:last_number_match", "--dry-run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("out my run: new run, up to update 6", "depth=early:0.9:2:4", "last_number_match", "nothing started"):
        assert part in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M", "D", "O"], "got 3 arguments, expected none or MODEL DATA OUT UPDATES"),
        (["--set"], "--set needs a value"),
        (["--fast"], "unknown option --fast"),
    ],
)
def test_wrong_usage_says_so_before_anything_is_set_up(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Exit status 2 and the usage."""
    done = recipe(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "examples/ouro/run.sh MODEL DATA OUT" in done.stderr
