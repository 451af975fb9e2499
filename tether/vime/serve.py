"""A vLLM server that `tether_engine=http://HOST:PORT` can use, in place of this process.

python -m tether.vime.serve MODEL --port 8000 [--host 0.0.0.0] [--context TOKENS] [--tensor-parallel N]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from tether.vime.arguments import read_facts
from tether.vime.engines import CPU_CACHE_BYTES


def command(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """What to run, and what its environment must have."""
    from adapters.vllm_engine.http.settings import server_command
    from adapters.vllm_engine.settings import EngineSettings

    config = read_facts(arguments.model).config
    settings = EngineSettings(
        model=arguments.model.resolve(),
        log_path=Path(os.devnull),
        max_model_len=arguments.context or config.max_position_embeddings,
        dtype=arguments.dtype or config.dtype,
        tensor_parallel=arguments.tensor_parallel,
        kv_cache_bytes=arguments.kv_cache_bytes or (None if torch.cuda.is_available() else CPU_CACHE_BYTES),
    )
    return server_command(settings, host=arguments.host, port=arguments.port)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Starts a vLLM server with Tether's plugin and worker.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--context", type=int, help="longest sequence in tokens; default: what the checkpoint has room for"
    )
    parser.add_argument("--dtype", help="default: the checkpoint's")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-cache-bytes", type=int)
    return parser.parse_args(words)


def main() -> None:
    words, environment = command(parse(sys.argv[1:]))
    os.execvpe(words[0], words, {**os.environ, **environment})


if __name__ == "__main__":
    main()
