"""One worker's part in a publication: stage, prepare, commit, and the way back.

Until `commit` nothing that is served changes: staged tensors are views of mapped memory (`staging`). Commit loads them
in place, so addresses and captured graphs stay valid, and returns a fingerprint read back from the live weights. The
first commit goes by vLLM's own reload, after trying out whether writing to the served memory directly (`direct`) leaves
the same; if so, later loads do that. What served before is retained until `settle` says that every worker's commit was
verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from adapters.clock import Clock
from adapters.contract import Manifest, TensorSpec, Version
from adapters.hf_convert.digests import Part, finite_digests, partial_digests
from adapters.hf_convert.directory import HFDirectory
from adapters.vllm_engine.memory.buckets import BUCKET_BYTES, Bucket
from adapters.vllm_engine.memory.staging import Mapped, Staging
from adapters.vllm_engine.worker.direct import is_same_as, load_directly
from adapters.vllm_engine.worker.experts import prepack
from adapters.vllm_engine.worker.model_interface import LiveTensor

logger = init_logger(f"vllm.{__name__}")  # vLLM sets up the log of its own names only
Fingerprint = dict[str, tuple[int, bool]]
"""Per physical tensor: this worker's digest of its part, and whether the part is only one of several."""


Named = Iterable[tuple[str, torch.Tensor]]
Source = Callable[[], Named]
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
        self._direct: bool | None = None
        self._places: tuple[list[int], list[LiveTensor]] | None = None
        self._clock = Clock()

    def stage(self, bucket: Bucket) -> None:
        """Maps a bucket; a shadow is copied to the device. Staging one again replaces it."""
        tensors = self._mapped.tensors(bucket)
        self._staged.update(tensors)
        if self._staging == "shadow":
            self._shadow.update((name, self._on_device(tensor)) for name, tensor in tensors)

    def prepare(self, manifest: Manifest) -> list[str]:
        """Everything wrong with what was staged, one line each; nothing served has changed."""
        problems = [f"{name}: not in the manifest" for name in self._staged.keys() - {t.name for t in manifest.tensors}]
        described = []
        for spec in manifest.tensors:
            tensor = self._staged.get(spec.name)
            if tensor is None:
                problems.append(f"{spec.name}: never staged")
            elif tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
                problems.append(f"{spec.name}: staged as {tuple(tensor.shape)} {tensor.dtype}, not as in the manifest")
            else:
                described.append(spec)
        return sorted(problems + self._content_problems(described))

    def commit(self, version: Version) -> Fingerprint:
        """Loads the staged tensors in place -> fingerprint of the live weights. On an error, call `rollback`."""
        self._clock = Clock()
        staged, shadow = self._staged, self._shadow
        self._staged, self._shadow = {}, {}
        self._load({**staged, **shadow}.items())
        self._previous, self._current, self._version = self._current, staged.items, version
        self._clock.lap("load")
        fingerprint = self.fingerprint()
        self._clock.lap("read back")
        return fingerprint

    def seconds(self) -> dict[str, float]:
        """How long the parts of the latest commit took here."""
        return self._clock.seconds

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
        live = self._live_tensors()
        parts = [Part(tensor=t.part, shape=t.shape, dim=t.dim or 0, offset=t.offset) for t in live]
        digests = partial_digests(parts)
        return {t.name: (total, tuple(t.part.shape) != t.shape) for t, total in zip(live, digests, strict=True)}

    def _live_tensors(self) -> list[LiveTensor]:
        """Found anew when a parameter has moved; kept only where they are known to be served memory, no copies."""
        model = self._runner.get_model()
        if not self._direct:
            return list(model.live_tensors())
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        if self._places is None or self._places[0] != addresses:
            self._places = addresses, list(model.live_tensors())
        return self._places[1]

    def _content_problems(self, specs: list[TensorSpec]) -> list[str]:
        """What is wrong with the values of staged tensors, computed on the worker's device."""
        problems = []
        staged = {**self._staged, **self._shadow}
        for group in _groups(specs, staged, self._runner.device):
            tensors = [self._on_device(staged[spec.name]) for spec in group]
            for spec, (digest, is_finite) in zip(group, finite_digests(tensors), strict=True):
                if not is_finite:
                    problems.append(f"{spec.name}: holds values that are not finite")
                elif digest != spec.digest:
                    problems.append(f"{spec.name}: content differs from the manifest's digest {spec.digest}")
        return problems

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Staged memory stays as it is until a publication ends: nothing waits for the copy but what reads it."""
        return tensor.to(self._runner.device, non_blocking=True)

    def _load(self, tensors: Named) -> None:
        """Serves other weights. The first time it tries out how: see `direct`."""
        self._half_loaded = True
        if self._direct is None:
            self._direct = False  # also if what follows fails: the way back is vLLM's own
            device, dtype = self._runner.device, self._vllm_config.model_config.dtype
            is_direct = is_same_as(self._load_by_vllm, self._runner.get_model(), dtype=dtype, device=device)
            self._load_by_vllm(tensors)
            self._direct = is_direct
            logger.info("weights are loaded %s", "directly" if is_direct else "by vLLM: it does more than write them")
        elif self._direct:
            load_directly(self._runner.get_model(), self._live_tensors(), tensors)
            self._reset_caches()
        else:
            self._load_by_vllm(tensors)
        self._half_loaded = False

    def _load_by_vllm(self, tensors: Named) -> None:
        self._places = None
        with set_current_vllm_config(self._vllm_config):
            self._runner.reload_weights(weights_iterator=iter(tensors))
            prepack(self._runner.get_model())

    def _reset_caches(self) -> None:
        """What vLLM's `reload_weights` does besides."""
        self._runner.reset_lora_state()
        self._runner.reset_encoder_cache()
        self._runner.reset_mm_cache()

    def _from_directory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights the engine started from, read again from disk."""
        config = self._vllm_config.model_config
        directory = HFDirectory(Path(config.model))
        for name in directory.tensors:
            yield name, directory.read(name).to(config.dtype)


def _groups(
    specs: Sequence[TensorSpec], staged: dict[str, torch.Tensor], device: torch.device
) -> Iterator[list[TensorSpec]]:
    """What is looked at together: at most about a bucket's size of tensors that have to be copied to the device."""
    group: list[TensorSpec] = []
    size = 0
    for spec in specs:
        group.append(spec)
        size += staged[spec.name].nbytes * (staged[spec.name].device.type != device.type)
        if size > BUCKET_BYTES:
            yield group
            group, size = [], 0
    yield group
