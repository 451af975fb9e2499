"""Which framework calls us, VIME or slime, and what of it we lean on. Each use is checked before it is relied on."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("vime", "slime")
"""Names under which the framework is imported. They have the same modules."""


def part(name: str) -> ModuleType:
    """A module of the framework that runs us, such as "backends.megatron_utils.hf_to_megatron".

    Raises:
        ImportError: neither framework is there, or it has no such module.
    """
    running = [package for package in PACKAGES if package in sys.modules] or list(PACKAGES)
    errors = []
    for package in running:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ImportError as error:
            errors.append(f"{package}: {error}")
    raise ImportError(f"no module {name!r} in {' or '.join(running)}: {'; '.join(errors)}. {MOVED}")


MOVED = "The framework is missing or has moved; docs/vime.md names the version that these hooks were written for"


def require_parameters(function: Any, names: tuple[str, ...], what: str) -> None:
    """Raises RuntimeError unless the function takes exactly these parameters."""
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise RuntimeError(f"{what}: got parameters {found}, expected {names}. {MOVED}")


def require(holds: bool, what: str) -> None:
    """Raises RuntimeError, naming what was relied on, if it does not hold."""
    if not holds:
        raise RuntimeError(f"{what}. {MOVED}")
