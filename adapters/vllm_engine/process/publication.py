"""The engine's part in a publication: one transaction over all workers.

    begin -> stage (each bucket) -> prepare -> commit
                                             or abort, at any point before commit

Before commit nothing that is served changes. Commit happens on every worker only after all are prepared, and counts
only when the digests read back from the live weights of all workers equal the manifest's; otherwise every worker goes
back to what served before, and if that cannot be verified either, the engine refuses to generate until a newer full
version commits.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adapters.contract import (
    EngineBlocked,
    EngineError,
    Manifest,
    PublicationFailed,
    PublicationRefused,
    Version,
)
from adapters.hf_convert.digest import render_digest
from adapters.vllm_engine.memory.buckets import Bucket

if TYPE_CHECKING:  # it needs vLLM, which a client that runs the transaction does not
    from adapters.vllm_engine.worker.weights import Fingerprint

Rpc = Callable[..., list[Any]]
STARTED = Version(incarnation=0, update=0)
"""What an engine serves until something is published to it: the weights of its directory."""


def _refuse(version: Version, problems: list[str]) -> None:
    if problems:
        shown = "\n  ".join(problems[:10])
        rest = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise PublicationRefused(f"version {version}: {len(problems)} problem(s), nothing changed:\n  {shown}{rest}")


class Publication:
    """
    Attributes:
        version: what is served, or was last whole when `blocked` is set.
        blocked: why nothing may be generated; None while a whole version serves.
    """

    def __init__(
        self,
        rpc: Rpc,
        *,
        expected: dict[str, tuple[int, ...]],
        dtype: str,
        version: Version = STARTED,
        manifest_digest: str | None = None,
    ) -> None:
        """
        Args:
            rpc: calls a method of `LiveWeights` on every worker.
            expected: shape of every physical tensor.
            dtype: the only dtype that is accepted.
            version: that the workers serve already, and the digest of its manifest.
        """
        self._rpc, self._expected, self._dtype = rpc, expected, dtype
        self.version = version
        self.blocked: str | None = None
        self._served_manifest = manifest_digest
        self._served = self._fingerprint(rpc("fingerprint"))
        self._offered: tuple[Version, Manifest] | None = None
        self._prepared = False
        self._held: tuple[Version, str, dict[str, str]] | None = None

    @property
    def running(self) -> bool:
        return self._offered is not None or self._held is not None

    @property
    def held(self) -> bool:
        """Whether a commit waits for `settle` or `revert`."""
        return self._held is not None

    def begin(self, version: Version, manifest: Manifest) -> bool:
        """Opens a transaction, ending one that was left open. True if this very version is already served."""
        self.abort()
        repeated = version == self.version and manifest.digest == self._served_manifest
        if repeated and self.blocked is None:
            return True
        problems = self._check_manifest(manifest)
        if version <= self.version and not (repeated and self.blocked):
            problems.insert(0, f"got a version that is not newer than the served {self.version}")
        _refuse(version, problems)
        self._offered = version, manifest
        return False

    def stage(self, bucket: Bucket) -> None:
        """Hands a bucket to every worker. Staging one again replaces it."""
        self._transaction()
        self._prepared = False
        self._before_commit("stage", bucket)

    def prepare(self) -> None:
        """Every worker checks what it holds against the manifest. Idempotent."""
        version, manifest = self._transaction()
        workers = self._before_commit("prepare", manifest)
        problems = sorted({problem for worker in workers for problem in worker})
        if problems:
            self.abort()
        _refuse(version, problems)
        self._prepared = True

    def commit(self, drop_caches: Callable[[], None], *, hold: bool = False) -> None:
        """Makes the version the one that is served. The caller has ended or drained what was in flight.

        Args:
            hold: load and verify, and wait for `settle` or `revert`: other engines commit the same version.
        """
        version, manifest = self._transaction()
        if not self._prepared:
            raise PublicationRefused(f"version {version}: commit before prepare succeeded; nothing changed")
        wanted = {t.name: t.digest for t in manifest.tensors}
        try:
            self._verify(self._rpc("commit", version), wanted)
            drop_caches()
        except Exception as error:
            self._offered, self._prepared = None, False
            self._roll_back(version, drop_caches, error)
        self._offered, self._prepared = None, False
        self._held = version, manifest.digest, wanted
        if not hold:
            self.settle()

    def settle(self) -> None:
        """A held commit counts, and what served before is let go. Idempotent."""
        if self._held is not None:
            self._rpc("settle")
            (self.version, self._served_manifest, self._served), self._held = self._held, None
            self.blocked = None

    def revert(self, drop_caches: Callable[[], None]) -> None:
        """Takes a held commit back: what served before serves again, verified. Idempotent. Raises EngineBlocked."""
        if self._held is not None:
            (version, _, _), self._held = self._held, None
            with contextlib.suppress(PublicationFailed):
                self._roll_back(version, drop_caches, EngineError("another engine did not commit it"))

    def abort(self) -> None:
        """Forgets an open transaction; the served version is untouched. Idempotent."""
        if self._offered is not None:
            self._offered, self._prepared = None, False
            self._rpc("discard")

    def check_serving(self) -> None:
        """Raises EngineBlocked unless a whole version serves."""
        if self.blocked is not None:
            raise EngineBlocked(f"{self.blocked}; publish a newer full version")
        if self._held is not None:
            raise EngineBlocked(f"version {self._held[0]} is loaded and neither settled nor reverted")

    def _before_commit(self, method: str, argument: Any) -> list[Any]:
        """Calls every worker. An error ends the transaction: nothing that is served has changed."""
        version, _ = self._transaction()
        try:
            return self._rpc(method, argument)
        except Exception as error:
            self.abort()
            raise PublicationRefused(f"version {version}: {method} failed on a worker: {error!r}") from error

    def _transaction(self) -> tuple[Version, Manifest]:
        if self._offered is None:
            raise PublicationRefused("no publication is open: call begin first")
        return self._offered

    def _check_manifest(self, manifest: Manifest) -> list[str]:
        names = Counter(t.name for t in manifest.tensors)
        problems = [f"{name}: listed more than once" for name, count in sorted(names.items()) if count > 1]
        problems += [f"{n}: missing" for n in sorted(self._expected.keys() - names.keys())]
        problems += [f"{n}: unknown to this model" for n in sorted(names.keys() - self._expected.keys())]
        for spec in manifest.tensors:
            shape = self._expected.get(spec.name, spec.shape)
            if spec.shape != shape:
                problems.append(f"{spec.name}: got shape {spec.shape}, expected {shape}")
            if spec.dtype != self._dtype:
                problems.append(f"{spec.name}: got dtype {spec.dtype!r}, expected {self._dtype!r}")
        return problems

    def _roll_back(self, version: Version, drop_caches: Callable[[], None], cause: Exception) -> None:
        """Always raises: PublicationFailed when the old version serves again, EngineBlocked when it does not."""
        try:
            self._verify(self._rpc("rollback", version), self._served)
            drop_caches()
        except Exception as error:
            way_back = f"the way back to {self.version} ({error!r})"
            self.blocked = f"commit of {version} failed ({cause!r}) and so did {way_back}"
            raise EngineBlocked(self.blocked) from error
        raise PublicationFailed(f"commit of {version} failed, {self.version} serves again: {cause!r}") from cause

    def _verify(self, workers: list[Fingerprint], wanted: dict[str, str]) -> None:
        live = self._fingerprint(workers)
        if wrong := sorted(name for name in live.keys() | wanted.keys() if live.get(name) != wanted.get(name)):
            raise EngineError(f"live weights differ from the version's digests: {wrong[:10]} ({len(wrong)} in all)")

    @staticmethod
    def _fingerprint(workers: list[Fingerprint]) -> dict[str, str]:
        """Digests of the tensors as served: parts add up, whole copies must agree."""
        digests = {}
        for name, (first, partial) in workers[0].items():
            values = [worker[name][0] for worker in workers]
            if not partial and len(set(values)) > 1:
                digests[name] = "workers disagree"
            else:
                digests[name] = render_digest(sum(values) if partial else first)
        return digests
