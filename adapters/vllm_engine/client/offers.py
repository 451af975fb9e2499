"""What every engine does with a version: writes it into buckets once, offers it, keeps it for a restart.

How an offer reaches the workers is the engine's own (`_transact`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Self

import msgspec
import torch

from adapters.clock import Clock
from adapters.contract import EngineDead, EngineTimeout, Health, Manifest, PublishReport, TensorSpec, Version
from adapters.vllm_engine.memory.buckets import Bucket, BucketStore

InFlight = Literal["drain", "abort"]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A version, whole, in the buckets that it is published with.

    Those of the version that is served are kept: they are what a restarted engine is given, and workers hold the same
    pages to roll back to.
    """

    version: Version
    manifest: Manifest
    buckets: tuple[Bucket, ...]


class PublishingEngine:
    """The half of an engine that publishes, and its life as a context manager. Not for use from several threads."""

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        self._committed: Offer | None = None
        self._interrupted: Offer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def health(self) -> Health:
        raise NotImplementedError

    def weight_version(self) -> Version:
        return self.health().version

    def _transact(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        """Makes every worker serve the offer, or leaves all of them as they were. Raises what `publish` does."""
        raise NotImplementedError

    def publish(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        in_flight: InFlight = "drain",
    ) -> PublishReport:
        """See `contract.Engine.publish`. Tensors are copied once, into memory that the workers map.

        After EngineDead or EngineTimeout the tensors are kept there: `restart` and `republish` go on with
        them. Publishing again is right as well: if the commit had reached the engine, it is accepted as done.

        Args:
            in_flight: what happens to running requests before commit: they finish, or end with what they have.
        """
        clock = Clock()
        buckets: list[Bucket] = []
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._drop_interrupted()
        try:
            specs: list[TensorSpec] = []
            for bucket, described in self._store.write(pairs):
                buckets.append(bucket)
                specs += described
        except BaseException:
            self._store.remove(buckets)
            raise
        clock.lap("write")
        offered = Offer(version=version, manifest=Manifest(tensors=tuple(specs)), buckets=tuple(buckets))
        return self._offer(offered, in_flight, clock)

    def republish(self) -> PublishReport:
        """Offers again what EngineDead or EngineTimeout interrupted, from where it was written.

        Raises:
            ValueError: no publication was interrupted.
        """
        if self._interrupted is None:
            raise ValueError("republish: no publication was interrupted")
        offered, self._interrupted = self._interrupted, None
        return self._offer(offered, "drain", Clock())

    def _offer(self, offered: Offer, in_flight: InFlight, clock: Clock) -> PublishReport:
        try:
            self._transact(offered, in_flight, clock)
        except (EngineDead, EngineTimeout):
            self._interrupted = offered
            raise
        except BaseException:
            self._store.remove(offered.buckets)
            raise
        if self._committed is not None:
            self._store.recycle(self._committed.buckets)  # every worker settled: none goes back to them
        self._committed = offered
        return PublishReport(
            version=offered.version,
            manifest_digest=offered.manifest.digest,
            num_bytes=sum(bucket.num_bytes for bucket in offered.buckets),
            seconds=clock.seconds,
        )

    def _forget_offers(self) -> None:
        """Removes every bucket: the engine is closed."""
        self._store.close()
        self._committed = self._interrupted = None

    def _drop_interrupted(self) -> None:
        """Lets an interrupted version go. Not to be recycled: the engine may have committed it and hold its pages."""
        if self._interrupted is not None:
            self._store.remove(self._interrupted.buckets)
        self._interrupted = None
