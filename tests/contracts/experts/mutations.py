"""What is changed in an engine process: routers that choose by chance, late deliveries, and mechanisms taken away.

Routers that choose by chance, never the same twice, are the hard case: a recomputed token, a cached prefix or a scored
sequence can agree with the record only by following it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def coin() -> None:
    """Every router takes random experts where it may choose, with the probabilities that the live scores give them."""
    from adapters.vllm_engine.worker.experts import ExpertRouting

    force = ExpertRouting._force

    def forced(self: Any, router: Any, layer: int) -> None:
        choose = router._compute_routing

        def compute_routing(hidden_states: Any, router_logits: Any, indices_type: Any, **options: Any) -> Any:
            weights, experts = choose(hidden_states, router_logits, indices_type, **options)
            scores = router_logits.softmax(-1, dtype=torch.float32)
            picks = torch.rand_like(scores).topk(experts.shape[1]).indices
            return scores.gather(1, picks).to(weights.dtype), picks.to(experts.dtype)

        router._compute_routing = compute_routing
        force(self, router, layer)

    ExpertRouting._force = forced  # type: ignore[method-assign]


def coin_delivered_late() -> None:
    """What tokens ran comes two steps later, or when somebody waits: as on a device, with the host a step ahead."""
    from adapters.vllm_engine.worker import step
    from adapters.vllm_engine.worker.records import Records

    class Late:
        def __init__(self, values: torch.Tensor) -> None:
            self._values, self.is_here = values.to(torch.uint8), False
            under_way.append(self)
            arrive(under_way[:-2])

        def get(self) -> np.ndarray:
            arrive(under_way[: under_way.index(self) + 1] if self in under_way else [])
            return self._values.numpy()

    under_way: list[Late] = []

    def arrive(values: list[Late]) -> None:
        for each in values:
            each.is_here = True
            under_way.remove(each)

    def closed(self: Any, request_id: str) -> None:
        arrive(under_way[:])  # the request's last token has come, and with it what ran before
        close(self, request_id)

    coin()
    close = Records.close
    step.Later, Records.close = Late, closed  # type: ignore[assignment, method-assign, misc]


def late_without_waiting() -> None:
    """What is needed and has not come is taken for something that never ran."""
    from adapters.vllm_engine.worker.records import Deliveries

    coin_delivered_late()
    settle = Deliveries.settle
    Deliveries.settle = lambda self, *, wait: settle(self, wait=False)  # type: ignore[method-assign]


def coin_without_replay() -> None:
    """Recomputed and scored tokens choose anew."""
    from adapters.vllm_engine.worker.experts import ExpertRouting
    from adapters.vllm_engine.worker.records import Records

    coin()
    ExpertRouting.begin = lambda self, step, unknown: None  # type: ignore[method-assign]
    record = Records.record

    def fresh_only(self: Any, slots: Any, positions: Any, values: Any) -> None:
        fresh = positions >= self.known[slots]
        record(self, slots[fresh], positions[fresh], values[fresh])

    Records.record = fresh_only  # type: ignore[method-assign]


def coin_with_rows_of_other_slots() -> None:
    """A cached prefix gets the rows of slots beside its own."""
    from adapters.vllm_engine.worker.records import CacheRows

    coin()
    read = CacheRows.read
    CacheRows.read = lambda self, slots: read(self, np.roll(slots, 1))  # type: ignore[method-assign]


def coin_without_cache_rows() -> None:
    """Nobody writes down what cached tokens ran."""
    from adapters.vllm_engine.worker.records import CacheRows

    coin()
    CacheRows.write_later = lambda self, slots, values: None  # type: ignore[method-assign]


def coin_with_layers_exchanged() -> None:
    """The captured experts of the layers change places."""
    from adapters.vllm_engine.worker.experts import ExpertRouting

    coin()
    end = ExpertRouting.end
    ExpertRouting.end = lambda self, n: end(self, n).flip(1)  # type: ignore[method-assign]
