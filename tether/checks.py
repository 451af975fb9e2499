"""Findings as one table: what was checked, how it went, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool | None
    """None: not done, and `detail` says why."""
    detail: str


def check(name: str, problems: list[str], fine: str) -> Check:
    """A line that fails with the problems, or passes saying what is fine."""
    return Check(name=name, passed=not problems, detail="; ".join(problems) or fine)


def table(checks: list[Check]) -> str:
    """The checks as text, one line each."""
    width = max(len(c.name) for c in checks)
    words = {True: "ok", False: "FAILED", None: "-"}
    return "\n".join(f"{c.name:<{width}}  {words[c.passed]:<6}  {c.detail}" for c in checks)
