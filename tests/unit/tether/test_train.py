"""The driver's own steps, with an engine that records what it was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from adapters.contract import EngineDead, PublishReport, Version
from tether.saving import State
from tether.train import Run, publish


class LostOnce:
    """An engine that dies after half of the tensors and then reports phases that no other one has."""

    def __init__(self, phases: dict[str, float]) -> None:
        self.phases, self.asked = phases, list[str]()

    def publish(self, version: Version, tensors: Iterable[tuple[str, Any]]) -> PublishReport:
        self.asked.append(f"publish {version.update} {next(iter(tensors))[0]}")
        raise EngineDead("lost")

    def restart(self) -> None:
        self.asked.append("restart")

    def republish(self) -> PublishReport:
        self.asked.append("republish")
        version = Version(incarnation=1, update=3)
        return PublishReport(version=version, manifest_digest="", num_bytes=0, seconds=self.phases)


def test_phases_are_the_engines_own() -> None:
    """Those of the try that succeeded, named as times are; the tensors are gathered to their end whatever happened."""
    gathered: list[str] = []

    def physical_tensors() -> Iterator[tuple[str, Any]]:
        for name in ("a", "b"):
            yield name, None
            gathered.append(name)

    engine = LostOnce({"stage": 0.25, "read back twice": 1.2500004})
    trainer = SimpleNamespace(physical_tensors=physical_tensors)
    nothing: Any = None
    run = Run(
        job=nothing,
        trainer=trainer,  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        rollouts=nothing,
        reference=None,
        state=State(update=3),
        saver=nothing,
    )
    assert publish(run) == {"publish_stage_seconds": 0.25, "publish_read_back_twice_seconds": 1.25}
    assert engine.asked == ["publish 3 a", "restart", "republish"] and gathered == ["a", "b"]
