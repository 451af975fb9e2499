"""Compares two sets of tensors and words the differences: every offender counted, the first ten named, sorted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence


def listing(items: Iterable[str], *, limit: int = 10) -> str:
    """`items` sorted, the first `limit` of them spelled out: "a, b, c" or "a, b, ... and 7 more"."""
    ordered = sorted(items)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def name_problems(got: Collection[str], expected: Collection[str]) -> list[str]:
    """One line for what is missing and one for what should not be there; nothing when the sets are equal."""
    parts = {"missing": set(expected) - set(got), "unexpected": set(got) - set(expected)}
    return [f"{len(names)} {kind}: {listing(names)}" for kind, names in parts.items() if names]


def value_problems(what: str, got: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """One line for the names in both whose values differ: `2 with another shape: a (got (4,), expected (8,)), ...`."""
    wrong = [
        f"{name} (got {_plain(got[name])}, expected {_plain(expected[name])})"
        for name in got.keys() & expected.keys()
        if _plain(got[name]) != _plain(expected[name])
    ]
    return [f"{len(wrong)} with another {what}: {listing(wrong)}"] if wrong else []


def raise_problems(where: object, problems: Sequence[str], *, advice: str) -> None:
    """Raises ValueError with all problems, if there are any."""
    if problems:
        raise ValueError(f"{where}: " + "; ".join(problems) + f". {advice}")


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
