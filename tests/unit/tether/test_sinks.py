"""TensorBoard files and the Prometheus endpoint hold the numbers of metrics.jsonl."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path

import pytest

from tests.ports import free_port
from tether.sinks import Sinks, numbers

LINE = {
    "update": 3,
    "reward_mean": 0.25,
    "eval_reward_mean": 0.5,
    "train_seconds": 1.5,
    "loss": None,
    "depth_histogram": [1, 2],
    "tripped": [],
    "num_tokens": 12,
    "grad_norm": math.inf,
    "execution": "full",
}


def test_only_finite_numbers_leave() -> None:
    """Lists, texts, missing figures and the update itself do not."""
    assert numbers(LINE) == {"reward_mean": 0.25, "eval_reward_mean": 0.5, "train_seconds": 1.5, "num_tokens": 12.0}


def test_event_files_are_read_by_the_library_and_cut_back_on_resume(tmp_path: Path) -> None:
    """A run killed in update 3 and resumed from 2 has one value for update 3: the resumed one's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, updates, shift in ((1, (1, 2, 3), 0.0), (3, (3, 4), 10.0)):
        with Sinks(tensorboard=tmp_path, prometheus_port=0, first_update=first) as sinks:
            for update in updates:
                sinks.write({**LINE, "update": update, "reward_mean": update + shift})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("run/reward_mean")] == [(1, 1), (2, 2), (3, 13), (4, 14)]
    assert {"held_out/reward_mean", "seconds/train", "num_tokens/num_tokens"} <= set(events.Tags()["scalars"])


def test_prometheus_answers_with_the_newest(tmp_path: Path) -> None:
    """On this machine only; a taken port is an error at the start."""
    port = free_port()
    with Sinks(tensorboard=None, prometheus_port=port, first_update=1) as sinks:
        sinks.write(LINE)
        sinks.write({**LINE, "update": 4, "reward_mean": 0.75})
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(OSError):
            Sinks(tensorboard=None, prometheus_port=port, first_update=1)
    lines = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    assert lines["tether_reward_mean"] == "0.75" and lines["tether_update"] == "4.0"
