"""Settings of one engine, resolved once by whoever starts it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How an engine passes keys and values on, or gets them."""

    role: Role
    """Computes prompts for others, or goes on from prompts that others computed."""
    transports: str
    """What UCX may use (its UCX_TLS), such as "tcp,self,sm"."""
    host: str = "127.0.0.1"
    """Address at which a prefill worker is asked for its handles, at a port that the system chooses."""
    transfer_seconds: float = 60.0
    """Longest time that the keys and values of one prompt may take to arrive."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """
    Raises:
        ValueError: a size below 1.
    """

    model: Path
    """Hugging Face directory: config, and the weights to start from."""
    log_path: Path
    """File that gets the engine process's output."""
    max_model_len: int
    """Longest sequence, prompt and response together, in tokens."""
    dtype: str = "auto"
    """Dtype of weights and activations: float32, bfloat16, or auto (what the checkpoint declares)."""
    execution: str | None = None
    """Execution policy of requests that name none; None takes the checkpoint's own."""
    max_num_seqs: int = 64
    """Requests decoded at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens of one scheduler step; longer prompts are computed in chunks."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; None lets vLLM take gpu_memory_utilization of the device."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that vLLM may use when kv_cache_bytes is None."""
    num_kv_blocks: int | None = None
    """Overrides the number of cache blocks; few of them force preemption."""
    block_size: int = 32
    """Tokens of a cache block."""
    enable_prefix_caching: bool = True
    """Share the blocks of common prompt prefixes."""
    staging: Literal["host", "shadow", "ipc"] = "host"
    """Where a published version waits until it is committed: see `staging`. Only `host` works without CUDA."""
    enforce_eager: bool = False
    """Without CUDA graphs: slower where few requests decode, a faster start. Only CUDA has them."""
    async_scheduling: bool = True
    """Prepare a step while the device computes the one before. Only on CUDA, and not between prefill and decode."""
    tensor_parallel: int = 1
    """Workers over which each layer is split."""
    seed: int = 0
    """vLLM's own seed; requests carry theirs."""
    devices: tuple[int, ...] = ()
    """CUDA devices of this engine, numbered among the visible ones; empty takes the first ones."""
    transfer: TransferSettings | None = None
    """Its part in a prefill/decode-disaggregated engine; None for an engine of its own."""
    start_method: Literal["spawn", "forkserver"] | None = None
    """How the process starts: anew, or forked from a server that has vLLM imported (seconds, but never with CUDA).
    None takes the fork server where no CUDA device is."""
    start_seconds: float = 300.0
    """Longest wait for the engine to come up."""
    deadline_seconds: float = 600.0
    """Longest wait for an answer or the next result without the process having finished anything."""
    heartbeat_seconds: float = 60.0
    """Longest silence of the process's heartbeat before it counts as hung."""

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel")
        if bad := [f"{name}={getattr(self, name)!r}" for name in sizes if getattr(self, name) < 1]:
            raise ValueError(f"engine settings: got {', '.join(bad)}, expected at least 1")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> EngineSettings:
        values = json.loads(text)
        transfer = TransferSettings(**values["transfer"]) if values["transfer"] else None
        paths = {name: Path(values[name]) for name in ("model", "log_path")}
        return cls(**{**values, **paths, "devices": tuple(values["devices"]), "transfer": transfer})
