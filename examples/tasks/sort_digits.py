"""The demo's held-out problems as lm_eval reads them: from memory, so that nothing is asked of a hub."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import datasets

from examples.toy_task import split

SEED = 20  # of the demos: the held-out problems are those that no demo trained on


def documents(*, data: str | None = None, **_: Any) -> dict[str, Any]:
    """{"test": one document per problem}.

    Args:
        data: JSON lines with `prompt` and `label` to take instead (`--metadata '{"data": "FILE"}'`).
    """
    lines = Path(data).read_text().splitlines() if data else None
    records = split(SEED)[1] if lines is None else [json.loads(line) for line in lines if line]
    return {"test": datasets.Dataset.from_list([document(record) for record in records])}


def document(record: dict[str, Any]) -> dict[str, Any]:
    """A problem with choices: the record's own, or every order of the answer's words if those are few."""
    words = record["label"].split()
    orders = {" ".join(order) for order in itertools.permutations(words)} if len(words) <= 4 else {record["label"]}
    return {
        "prompt": record["prompt"],
        "label": record["label"],
        "choices": record.get("choices", sorted(orders)),
        "right": record.get("right", record["label"]),
    }
