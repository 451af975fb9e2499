"""Where metrics go beside metrics.jsonl: TensorBoard event files, and a Prometheus endpoint. Rank 0 only.

Numbers go as they are called in metrics.jsonl; lists and texts stay there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics, but for the update itself."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "update" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Sinks:
    """What the settings ask for.

    Args:
        tensorboard: directory of event files, or None.
        prometheus_port: where `http://localhost:PORT/metrics` answers, or 0 for nowhere.
        first_update: what follows; events of a run that was killed further on are marked as gone.

    Raises:
        ImportError: the library that a setting asks for is not installed; says which.
        OSError: the port is taken.
    """

    def __init__(self, *, tensorboard: Path | None, prometheus_port: int, first_update: int) -> None:
        self._writer = None if tensorboard is None else _event_writer(tensorboard, first_update)
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        if prometheus_port:
            self._serve(prometheus_port)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One update has finished."""
        update = int(metrics["update"])
        for name, value in numbers(metrics).items():
            if self._writer is not None:
                self._writer.add_scalar(_group(name), value, update)
            if self._server is not None:
                self._gauge(name).set(value)
        if self._writer is not None:
            self._writer.flush()
        if self._server is not None:
            self._gauge("update").set(update)

    def _serve(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._server, _ = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        logger.info("metrics for Prometheus at http://127.0.0.1:%d/metrics", port)

    def _gauge(self, name: str) -> Any:
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(f"tether_{name}", f"{name} of the newest update", registry=self._registry)
        return self._gauges[name]


def _event_writer(directory: Path, first_update: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=first_update)


def _group(name: str) -> str:
    """TensorBoard's tag: figures that belong together share what stands before the slash."""
    if name.startswith("eval_"):
        return f"held_out/{name.removeprefix('eval_')}"
    if name.endswith("_seconds"):
        return f"seconds/{name.removesuffix('_seconds')}"
    if name.endswith("_bytes"):
        return f"memory/{name}"
    if name.endswith(("_per_second", "_flops", "_mfu")):
        return f"speed/{name}"
    for part in ("logprob_diff", "mismatch", "num_tokens", "prompts", "skipped"):
        if name.startswith(part):
            return f"{part}/{name}"
    return f"run/{name}"
