"""The engine of a rollout process, as the framework's arguments and our own settings say.

Own settings are attributes of the arguments, put into the file of the framework's --custom-config-path:

    tether_engine            "local" (a vLLM process here), "1+2" (prefill and decode processes), or a server's URL
    tether_execution         how much of the model a token runs, such as "early:0.9:2:4"; the checkpoint's own if absent
    tether_engine_devices    "5" or "5,6,7": CUDA devices that its processes share evenly; the first ones if absent
    tether_engine_directory  for a server elsewhere: a directory that it sees too
    tether_kv_cache_bytes    memory of the KV cache; by default vLLM's share of the device, 64 MiB on CPU
    tether_deadline_seconds  longest wait for any answer of the engine
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from adapters.contract import Engine
from tether.vime.arguments import facts_of

CPU_CACHE_BYTES = 64 << 20


def start_engine(args: Any) -> Engine:
    """The engine that `tether_engine` says. Raises what its constructor does."""
    kind = str(getattr(args, "tether_engine", "local"))
    if "://" in kind:
        from adapters.vllm_engine.http.engine import HttpEngine
        from adapters.vllm_engine.http.settings import HttpSettings

        directory = getattr(args, "tether_engine_directory", None)
        return HttpEngine(
            HttpSettings(
                url=kind,
                directory=None if directory is None else Path(directory),
                max_model_len=context_tokens(args),
                deadline_seconds=_deadline(args),
            )
        )
    if kind == "local":
        from adapters.vllm_engine.client.local import LocalEngine

        return LocalEngine(engine_settings(args, "engine", 0, 1))
    if (counts := re.fullmatch(r"(\d+)\+(\d+)", kind)) is None:
        raise ValueError(f"tether_engine: got {kind!r}, expected local, PREFILL+DECODE such as 1+2, or a server's URL")
    from adapters.vllm_engine.disaggregated.engine import DisaggregatedEngine

    prefill, decode = int(counts[1]), int(counts[2])
    names = [f"prefill{i}" for i in range(prefill)] + [f"decode{i}" for i in range(decode)]
    workers = [engine_settings(args, name, place, len(names)) for place, name in enumerate(names)]
    return DisaggregatedEngine(prefill=workers[:prefill], decode=workers[prefill:])


def engine_settings(args: Any, name: str, place: int, count: int) -> Any:
    """The engine process at `place` of `count`.

    Raises:
        ValueError: the devices cannot be shared evenly.
    """
    from adapters.vllm_engine.settings import EngineSettings

    logs = Path(getattr(args, "save", None) or ".") / "tether_logs"
    logs.mkdir(parents=True, exist_ok=True)
    devices = tuple(int(each) for each in str(getattr(args, "tether_engine_devices", "")).split(",") if each)
    each = len(devices) // count
    if each * count != len(devices):
        raise ValueError(
            f"tether_engine_devices: got {devices!r}, expected a multiple of {count}, the engine's processes"
        )
    size = getattr(args, "tether_kv_cache_bytes", None) or (None if torch.cuda.is_available() else CPU_CACHE_BYTES)
    return EngineSettings(
        model=Path(args.hf_checkpoint).resolve(),
        log_path=(logs / f"{name}.log").resolve(),
        max_model_len=context_tokens(args),
        dtype=_dtype(args),
        devices=devices[place * each : (place + 1) * each],
        tensor_parallel=max(each, 1),
        kv_cache_bytes=size,
        deadline_seconds=_deadline(args),
    )


def context_tokens(args: Any) -> int:
    """Tokens of the longest sequence."""
    if getattr(args, "rollout_max_context_len", None):
        return args.rollout_max_context_len
    if getattr(args, "rollout_max_prompt_len", None) and getattr(args, "rollout_max_response_len", None):
        return args.rollout_max_prompt_len + args.rollout_max_response_len
    return facts_of(args).config.max_position_embeddings


def _dtype(args: Any) -> str:
    """What training publishes."""
    return str(getattr(args, "params_dtype", None) or "auto").removeprefix("torch.")


def _deadline(args: Any) -> float:
    return float(getattr(args, "tether_deadline_seconds", 600.0))
