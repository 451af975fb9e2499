"""The engine that a run's settings ask for: one vLLM process, several, or a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.contract import derive_seed
from tether.memory import cache_bytes
from tether.prepare import Job

if TYPE_CHECKING:
    from adapters.vllm_engine.client.local import LocalEngine
    from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine
    from adapters.vllm_engine.http.engine import HttpEngine
    from adapters.vllm_engine.http.settings import HttpSettings
    from adapters.vllm_engine.settings import EngineSettings

    AnyEngine = LocalEngine | DisaggregatedEngine | HttpEngine

ENGINE_LOG, ENGINE_LOGS = "engine.log", "engine*.log"
"""The engine's log, and those of all workers of a disaggregated one: engine.prefill0.log and so on."""
REFERENCE_LOG = "engine.reference.log"
SMALLEST_CACHE_BYTES = 64 << 20
DEVICE_SHARE = 0.9
"""Of a device's memory, for the engines on it, where nothing says how large their caches are."""


def start_engine(job: Job) -> AnyEngine:
    """Starts the engine of a run and waits until it serves. Raises what its constructor does."""
    if job.settings.engine == "local":
        from adapters.vllm_engine.client.local import LocalEngine

        return LocalEngine(engine_settings(job))

    if job.settings.engine == "http":
        from adapters.vllm_engine.http.engine import HttpEngine

        return HttpEngine(http_settings(job))

    from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine

    prefill, decode = worker_settings(job)
    return DisaggregatedEngine(prefill=prefill, decode=decode, transports_wanted=job.settings.transports)


def start_reference_engine(job: Job) -> LocalEngine:
    """Starts an engine that keeps the weights of the model's directory. Raises what its constructor does."""
    from adapters.vllm_engine.client.local import LocalEngine

    log = job.directory.logs.resolve() / REFERENCE_LOG
    size = job.settings.kv_cache_bytes or max(cache_bytes(job), SMALLEST_CACHE_BYTES)
    return LocalEngine(dataclasses.replace(engine_settings(job), log_path=log, kv_cache_bytes=size, staging="host"))


def http_settings(job: Job) -> HttpSettings:
    """How the server of a run is used. Raises ValueError if the directory for weights is not there."""
    from adapters.vllm_engine.http.settings import HttpSettings

    s = job.settings
    directory = Path(s.engine_directory).resolve() if s.engine_directory else None
    if directory is not None and not directory.is_dir():
        raise ValueError(f"engine_directory: got {s.engine_directory!r}, expected a directory that exists")
    return HttpSettings(
        url=s.engine_url,
        directory=directory,
        max_model_len=job.context_tokens,
        max_concurrent=s.max_concurrent_samples,
        deadline_seconds=s.deadline_seconds,
    )


def engine_settings(job: Job) -> EngineSettings:
    """The engine of a run, or what all of its workers share; it can score every sequence that it can generate."""
    import torch

    from adapters.vllm_engine.settings import EngineSettings

    s = job.settings
    size = s.kv_cache_bytes or (None if torch.cuda.is_available() else max(cache_bytes(job), SMALLEST_CACHE_BYTES))
    return EngineSettings(
        model=job.arguments.model.resolve(),
        log_path=job.directory.logs.resolve() / ENGINE_LOG,
        max_model_len=job.context_tokens,
        dtype=s.dtype,
        max_num_seqs=s.max_concurrent_samples,
        kv_cache_bytes=size,
        enforce_eager=s.enforce_eager,
        tensor_parallel=s.rollout_devices,
        staging=s.staging,  # type: ignore[arg-type]
        seed=derive_seed(s.seed, "engine") % 2**31,
        deadline_seconds=s.deadline_seconds,
    )


def worker_settings(job: Job) -> tuple[list[EngineSettings], list[EngineSettings]]:
    """Prefill and decode workers. On CUDA each has devices of its own if there are enough, else all share the first."""
    import torch

    s, common = job.settings, engine_settings(job)
    names = [f"prefill{i}" for i in range(s.prefill)] + [f"decode{i}" for i in range(s.decode)]
    apart = torch.cuda.device_count() >= len(names) * s.rollout_devices
    together = 1 if apart else len(names)
    workers = [
        dataclasses.replace(
            common,
            log_path=common.log_path.with_name(f"engine.{name}.log"),
            devices=tuple(range(i * s.rollout_devices, (i + 1) * s.rollout_devices)) if apart else (),
            gpu_memory_utilization=DEVICE_SHARE / together,
        )
        for i, name in enumerate(names)
    ]
    return workers[: s.prefill], workers[s.prefill :]
