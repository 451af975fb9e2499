from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contracts.vime.framework import model_arguments


@pytest.fixture(scope="session")
def arguments(tiny_ouro: Path, tiny_olmoe: Path) -> Callable[..., SimpleNamespace]:
    """The framework's arguments for a tiny model, by its name."""

    def make(model: str, **overrides: Any) -> SimpleNamespace:
        path = {"ouro": tiny_ouro, "olmoe": tiny_olmoe}[model]
        return model_arguments(path, json.loads((path / "config.json").read_text()), **overrides)

    return make
