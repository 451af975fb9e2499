"""One worker's part in a publication: stage, prepare, commit, and the way back.

Until `commit` nothing that is served changes: staged tensors are views of mapped memory (`staging`). Commit loads them
in place (vLLM's own reload, so addresses and captured graphs stay valid) and returns a fingerprint read back from the
live weights. What served before is retained until `settle` says that every worker's commit was verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from adapters.contract import Manifest, TensorSpec, Version
from adapters.hf_convert.digest import finite_digest, partial_digest
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.memory.buckets import Bucket
from adapters.vllm_engine.memory.staging import Mapped, Staging
from adapters.vllm_engine.worker.experts import prepack

Fingerprint = dict[str, tuple[int, bool]]
"""Per physical tensor: this worker's digest of its part, and whether the part is only one of several."""


Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Gives every tensor of a version again."""


class LiveWeights:
    """The weights of one worker."""

    def __init__(self, *, runner: Any, vllm_config: Any, staging: Staging) -> None:
        self._runner, self._vllm_config, self._staging = runner, vllm_config, staging
        self._mapped = Mapped()
        self._staged: dict[str, torch.Tensor] = {}
        self._shadow: dict[str, torch.Tensor] = {}
        self._previous: Source = self._from_directory
        self._current: Source = self._from_directory
        self._version: Version | None = None
        self._half_loaded = False

    def stage(self, bucket: Bucket) -> None:
        """Maps a bucket; a shadow is copied to the device. Staging one again replaces it."""
        tensors = self._mapped.tensors(bucket)
        self._staged.update(tensors)
        if self._staging == "shadow":
            self._shadow.update((name, tensor.to(self._runner.device)) for name, tensor in tensors)

    def prepare(self, manifest: Manifest) -> list[str]:
        """Everything wrong with what was staged, one line each; nothing served has changed."""
        problems = [f"{name}: not in the manifest" for name in self._staged.keys() - {t.name for t in manifest.tensors}]
        for spec in manifest.tensors:
            tensor = self._staged.get(spec.name)
            if tensor is None:
                problems.append(f"{spec.name}: never staged")
            elif tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
                problems.append(f"{spec.name}: staged as {tuple(tensor.shape)} {tensor.dtype}, not as in the manifest")
            elif problem := self._content_problem(spec):
                problems.append(f"{spec.name}: {problem}")
        return sorted(problems)

    def commit(self, version: Version) -> Fingerprint:
        """Loads the staged tensors in place -> fingerprint of the live weights. On an error, call `rollback`."""
        staged, shadow = self._staged, self._shadow
        self._staged, self._shadow = {}, {}
        self._load({**staged, **shadow}.items())
        self._previous, self._current, self._version = self._current, staged.items, version
        return self.fingerprint()

    def settle(self) -> None:
        """The commit counts: what served before is let go, and with it its memory."""
        self._previous, self._version = self._current, None
        self._mapped.end_round()

    def rollback(self, version: Version) -> Fingerprint:
        """Undoes the commit of a version, whether it succeeded here, failed half-way, or never began."""
        self.discard()
        if self._half_loaded:
            with set_current_vllm_config(self._vllm_config):
                finalize_layerwise_reload(self._runner.get_model(), self._vllm_config.model_config)
            self._load(self._current())
        elif self._version == version:
            self._load(self._previous())
            self._current, self._version = self._previous, None
        return self.fingerprint()

    def discard(self) -> None:
        """Forgets what was staged."""
        self._staged, self._shadow = {}, {}
        self._mapped.end_round()

    def fingerprint(self) -> Fingerprint:
        """Digest parts of every live tensor; over all workers the parts of a tensor add up to its digest."""
        return {
            live.name: (
                partial_digest(live.part, shape=live.shape, dim=live.dim or 0, offset=live.offset),
                tuple(live.part.shape) != live.shape,
            )
            for live in self._runner.get_model().live_tensors()
        }

    def _content_problem(self, spec: TensorSpec) -> str | None:
        """What is wrong with the values of a staged tensor, computed on the worker's device."""
        tensor = self._shadow.get(spec.name, self._staged[spec.name]).to(self._runner.device)
        digest, is_finite = finite_digest(tensor)
        if not is_finite:
            return "holds values that are not finite"
        if digest != spec.digest:
            return f"content differs from the manifest's digest {spec.digest}"
        return None

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._half_loaded = True
        with set_current_vllm_config(self._vllm_config):
            self._runner.reload_weights(weights_iterator=iter(tensors))
            prepack(self._runner.get_model())
        self._half_loaded = False

    def _from_directory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights the engine started from, read again from disk."""
        config = self._vllm_config.model_config
        directory = HFDirectory(Path(config.model))
        for name in directory.tensors:
            yield name, directory.read(name).to(config.dtype)
