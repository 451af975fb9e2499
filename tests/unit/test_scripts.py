"""What the set-up script and the `tether` command say when they cannot go on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tether.cli import main

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "dirname", "flock", "grep", "rm", "sed", "sha256sum", "tail")


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, and a PATH without any Python in `tools`."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    (tmp_path / "tools").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "tools" / tool).symlink_to(found)
    return tmp_path / "checkout"


def setup(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "scripts" / "setup.sh"), *arguments]
    environment = {"PATH": str(checkout.parent / "tools"), "VIRTUAL_ENV": "/nowhere"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("arguments", "version"), [(["--python"], "3.11"), (["--gpu"], "3.12")])
def test_setup_without_the_right_python(bare_checkout: Path, arguments: list[str], version: str) -> None:
    """It says which Python is missing and what to do, fails, and leaves nothing behind."""
    done = setup(bare_checkout, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"Python {version} is needed" in done.stderr and "Install it" in done.stderr
    assert not (bare_checkout / ".venv").exists()


def test_setup_refuses_unknown_options(bare_checkout: Path) -> None:
    done = setup(bare_checkout, "--cpu")
    assert done.returncode == 2
    assert "scripts/setup.sh --gpu" in done.stderr


def test_tether_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage names every subcommand; an unknown one is an error."""
    assert main(["--help"]) == main([]) == 0
    assert main(["fly"]) == 2
    printed = capsys.readouterr()
    assert "train" in printed.out and "convert" in printed.out
    assert "unknown command 'fly'" in printed.err
