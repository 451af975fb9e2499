"""How a vLLM server is used by `HttpEngine`, and how one that it can use is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from adapters.vllm_engine.http.client import DEVELOPMENT
from adapters.vllm_engine.process.main import CPU_ENVIRONMENT, CUDA_ENVIRONMENT, ENVIRONMENT
from adapters.vllm_engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    url: str
    """Where the server listens, such as http://host:8000."""
    directory: Path | None = None
    """Where weights are written for the server to read; None takes this machine's shared memory."""
    max_model_len: int = 1
    """Tokens of the longest sequence that it must take; a server with less is refused."""
    execution: str | None = None
    """Execution policy of requests that name none; None takes the checkpoint's own."""
    max_concurrent: int = 64
    """Requests sent at the same time."""
    start_seconds: float = 300.0
    """Longest wait for the server to be healthy."""
    deadline_seconds: float = 600.0
    """Longest wait for any answer of the server."""


def server_command(settings: EngineSettings, *, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """How a server that `HttpEngine` can use is started: its command, and what its environment must have."""
    options = {
        "--model": settings.model,
        "--host": host,
        "--port": port,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--block-size": settings.block_size,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--seed": settings.seed,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": "adapters.vllm_engine.http.worker.HttpWorker",
    }
    if settings.kv_cache_bytes is not None:
        options["--kv-cache-memory-bytes"] = settings.kv_cache_bytes
    if settings.num_kv_blocks is not None:
        options["--num-gpu-blocks-override"] = settings.num_kv_blocks
    flags = ["--enforce-eager", "--no-async-scheduling", "--tokens-only", "--disable-log-stats"]
    flags.append("--enable-prefix-caching" if settings.enable_prefix_caching else "--no-enable-prefix-caching")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    for name, value in options.items():
        command += [name, str(value)]
    name, _, value = DEVELOPMENT.partition("=")
    return command, {**CPU_ENVIRONMENT, **CUDA_ENVIRONMENT, **ENVIRONMENT, name: value}
