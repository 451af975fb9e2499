"""Functions that a setting names as module:function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_named(name: str, *, what: str, signature: str, **arguments: Any) -> Callable[..., Any]:
    """The function that "module:function" names.

    Args:
        what: the setting, for errors.
        signature: what a function should look like, for errors.
        arguments: that it will be called with.

    Raises:
        ValueError: the module cannot be imported, has no such function, or the function does not take the arguments.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{what} {name!r}: cannot import {module_name!r} ({error}); is it on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{what} {name!r}: {module_name} has no function {function_name!r}")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{what} {name!r}: {error}; expected a signature of {signature}") from error
    return function


def source_of(function: Callable[..., Any]) -> bytes:
    """What the run contract digests for a function: the file that defines it."""
    path = inspect.getsourcefile(inspect.unwrap(function))
    return Path(path).read_bytes() if path else repr(function).encode()
