"""A run that saves after every update is killed at 20 random moments, and ends where an undisturbed run ends."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters.megatron import checkpoint_files
from tests.e2e.recipe import RECIPE, ROOT, assert_equal_runs
from tests.e2e.zygote import ForkedRun, Zygote
from tether.run_directory import read_json_lines as read_lines

pytestmark = pytest.mark.slow
DEMO = ROOT / "runs" / "ouro-demo-model"
SETTINGS = (
    "depth=cycle:3,4,2", "save_every=1", "async_save=true", "keep_last=3", "prompts_per_update=8", "max_new_tokens=8",
    "lr=1e-3", "lr_warmup_updates=5", "max_concurrent_samples=256",
)  # fmt: skip
BEFORE_FIRST_SAVE, WHILE_WRITING, AFTER_RENAME, ANY = "before the first save", "writing", "just renamed", "any moment"
MOMENTS = [*[BEFORE_FIRST_SAVE] * 3, *[WHILE_WRITING] * 7, *[AFTER_RENAME] * 3, *[ANY] * 7]


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    """A process that starts runs quickly; the demo's model exists afterwards."""
    if not (DEMO / "demo.json").exists():
        subprocess.run([RECIPE, "--dry-run", "--out", tmp_path / "none"], check=True, timeout=600)
    zygote = Zygote(tmp_path / "zygote.log")
    yield zygote
    zygote.close()


def start(zygote: Zygote, out: Path, updates: int, *more: str) -> ForkedRun:
    arguments = ["--model", str(DEMO / "warm"), "--data", str(DEMO / "train.jsonl"), "--updates", str(updates), *more]
    return zygote.start([*arguments, *(text for each in SETTINGS for text in ("--set", each))], out)


def test_twenty_kills(tmp_path: Path, zygote: Zygote) -> None:
    """Each start resumes from the checkpoint that was newest when its predecessor died; nothing is lost or repeated."""
    out, draw = tmp_path / "killed", random.Random(6)
    moments = MOMENTS[:3] + draw.sample(MOMENTS[3:], len(MOMENTS) - 3)
    met: Counter[str] = Counter()
    newest: list[int | None] = []
    for moment in moments:
        before = newest_of(out)
        resume = () if before is None else ("--resume",)
        process = start(zygote, out, 400, *resume)
        wait_for(moment, process, out, draw)
        assert process.is_running, process.text
        process.kill()
        met[moment] += 1
        met["left a half-written one"] += bool(list((out / "checkpoints").glob(".iter_*.partial")))
        newest.append(newest_of(out))
        print(f"{moment}: killed at {newest[-1]}", flush=True)
        resumed = [line["update"] for line in read_lines(out / "events.jsonl") if line["event"] == "resume"]
        assert before is None or not resumed or resumed[-1] <= before
    assert newest[:2] == [None, None], "killed too late to be before the first save"
    print(dict(met), newest)
    last = newest[-1]
    assert last is not None and last >= 5 and met["left a half-written one"] >= 3

    total = last + 2
    start(zygote, out, total, "--resume").finish()
    check_events(out, newest)
    undisturbed = tmp_path / "undisturbed"
    start(zygote, undisturbed, total).finish()
    assert_equal_runs(undisturbed, out, update=total)
    assert len(checkpoint_files.complete_checkpoints(out / "checkpoints")) == 3
    assert not list((out / "checkpoints").glob(".iter_*")), "what kills left behind must be gone"


def check_events(out: Path, newest: list[int | None]) -> None:
    """Every resume began at the newest checkpoint of its time, and `saved` was never said of one that was not there."""
    events = read_lines(out / "events.jsonl")
    resumed = [line["update"] for line in events if line["event"] == "resume"]
    assert set(resumed) <= {update for update in newest if update is not None}
    assert resumed[-1] == newest[-1] and resumed == sorted(resumed)
    saved: list[int] = []
    for line in events:
        if line["event"] == "saved":
            saved.append(line["update"])
        if line["event"] == "resume":
            assert not saved or line["update"] >= max(saved), "a checkpoint that was said to be durable was lost"


def newest_of(out: Path) -> int | None:
    newest = checkpoint_files.latest(out / "checkpoints")
    return None if newest is None else checkpoint_files.number(newest)


def wait_for(moment: str, process: ForkedRun, out: Path, draw: random.Random) -> None:
    if moment == BEFORE_FIRST_SAVE:
        shutil.rmtree(out / "logs", ignore_errors=True)
        if draw.random() < 0.6:  # else in the first moments
            poll(process, lambda: (out / "logs").exists(), pause=0.002)
        time.sleep(draw.uniform(0.0, 0.8))
        return
    begun = len(read_lines(out / "metrics.jsonl"))
    first = draw.choice((0, 1, 2))
    poll(process, lambda: len(read_lines(out / "metrics.jsonl")) >= begun + first, pause=0.05)
    if moment == ANY:
        time.sleep(draw.uniform(0.0, 3.0))
        return
    folder = out / "checkpoints"
    names = {path.name for path in folder.glob("*")} | {path.name for path in folder.glob(".iter*")}
    pattern = ".iter_*.partial" if moment == WHILE_WRITING else "iter_*"
    poll(process, lambda: any(path.name not in names for path in folder.glob(pattern)), pause=0.0005)
    time.sleep(draw.uniform(0.0, 0.02))


def poll(process: ForkedRun, condition: Callable[[], bool], *, pause: float) -> None:
    deadline = time.monotonic() + 400
    while not condition() and process.is_running:
        assert time.monotonic() < deadline, "the run does not go on"
        time.sleep(pause)
