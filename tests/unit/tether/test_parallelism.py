"""What a model says to a layout, and that docs/parallelism.md says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adapters.parallelism import KINDS, Parallelism
from providers.registry import provider

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "parallelism.md"
MODELS = ("ouro", "olmoe")


def config_of(model: str, path: Path) -> Any:
    return provider(model, "config").Config.from_hf(json.loads((path / "config.json").read_text()))


def test_the_document_says_what_the_code_refuses() -> None:
    """One row for each kind and one column for each model: a cell begins with yes or with refused."""
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in DOCUMENT.read_text().splitlines()]
    table = {row[0]: dict(zip(MODELS, row[2:], strict=True)) for row in rows if len(row) == 4}
    for kind in KINDS:
        for model in MODELS:
            refused = kind in provider(model, "config").REFUSED
            assert re.match("refused" if refused else "yes", table[kind][model]), (kind, model, table[kind])


@pytest.mark.parametrize(
    ("model", "asked", "wanted"),
    [
        ("ouro", {"devices": 4, "tensor": 2}, None),
        ("ouro", {"devices": 4, "tensor": 4, "sequence": True}, None),
        ("ouro", {"devices": 8, "tensor": 8}, "tensor_parallel 8 does not divide num_heads 4, num_kv_heads 4"),
        ("ouro", {"devices": 2, "expert": 2}, "expert parallelism: an Ouro has no experts"),
        ("olmoe", {"devices": 8, "expert": 8}, None),
        ("olmoe", {"devices": 2, "expert": 2, "tensor": 2}, None),
        ("olmoe", {"devices": 3, "expert": 3}, "expert_parallel 3 does not divide num_experts 8"),
        ("ouro", {"devices": 2, "expert_tensor": 2}, "expert tensor parallelism: an Ouro has no experts"),
        ("olmoe", {"devices": 4, "expert": 2, "expert_tensor": 2}, None),
        ("olmoe", {"devices": 3, "expert_tensor": 3}, "expert_tensor_parallel 3 does not divide intermediate_size"),
        ("olmoe", {"devices": 2, "pipeline": 2}, "pipeline parallelism: the trainer's schedule has one stage"),
        ("olmoe", {"devices": 2, "context": 2}, "context parallelism: attention sees whole packed sequences"),
        ("olmoe", {"sequence": True}, "sequence_parallel: got true with tensor_parallel 1"),
    ],
)
def test_layouts(tiny_ouro: Path, tiny_olmoe: Path, model: str, asked: dict[str, Any], wanted: str | None) -> None:
    """Accepted, or refused with the reason."""
    path = {"ouro": tiny_ouro, "olmoe": tiny_olmoe}[model]
    problems = config_of(model, path).parallel_problems(Parallelism(**asked))
    assert (problems == []) if wanted is None else any(text.startswith(wanted) for text in problems), problems
