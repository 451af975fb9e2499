"""Which updates are profiled, and that the trace shows what ran in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tether.profiling import Profiler, parse_updates


def test_updates_are_read_and_checked() -> None:
    """START:STOP, both included."""
    assert parse_updates("2:4") == range(2, 5) and parse_updates("3:3") == range(3, 4) and parse_updates("") is None
    for text in ("3", "4:3", "0:2", "a:b"):
        with pytest.raises(ValueError, match="profile: got"):
            parse_updates(text)


def test_the_trace_has_the_updates_of_the_range_and_no_others(tmp_path: Path) -> None:
    """Each update here runs one operation of its own; a run that ends inside the range leaves a trace as well."""
    work = {1: torch.sin, 2: torch.cos, 3: torch.tan, 4: torch.exp}
    for updates, seen in ((range(2, 4), {"cos", "tan"}), (range(3, 9), {"tan", "exp"})):
        with Profiler(updates, tmp_path) as profiler:
            for number, operation in work.items():
                with profiler.update(number):
                    operation(torch.ones(3))
        events = json.loads((tmp_path / "profile_rank0.json").read_text())["traceEvents"]
        names = {
            event["name"].removeprefix("aten::") for event in events if str(event.get("name")).startswith("aten::")
        }
        assert names & {"sin", "cos", "tan", "exp"} == seen
