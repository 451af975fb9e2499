"""The recipe at a real shape with random weights: Ouro-1.4B, GRPO updates at several depths, a resume in the middle.

    python -m benchmarks.full_size --folder DIR [--updates 4] [--set key=value ...]

Writes a random checkpoint of the published shape and prompts of random tokens, runs the driver as a user would, ends
it half-way, resumes it in a fresh process, and records every update's metrics. What it cannot say is anything about the
real weights' behaviour.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import record
from providers.ouro.config import OuroConfig
from providers.ouro.physical import physical_tensors

OURO_1_4B: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--name", default="full_size_ouro_1_4b")
    parser.add_argument("--commit", help="of a working tree without git, as on a lent machine")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    folder = arguments.folder
    write_model(folder / "model")
    write_data(folder / "data.jsonl")
    runs = [
        run(folder, arguments.updates // 2, arguments.set),
        run(folder, arguments.updates, [*arguments.set], resume=True),
    ]
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    path = record.write(
        arguments.name,
        command=f"python -m benchmarks.full_size --updates {arguments.updates}",
        settings={"set": arguments.set, "model": OURO_1_4B},
        results={"process_seconds": runs, "metrics": metrics},
        commit_id=arguments.commit,
    )
    print(path)


def even_share(*, response_token_ids: Sequence[int], **_: Any) -> float:
    """A reward that random weights can vary in: the share of even tokens."""
    return sum(token % 2 == 0 for token in response_token_ids) / len(response_token_ids)


def write_model(path: Path) -> None:
    """Random weights at standard deviation 0.02, norms 1, in bf16; made on the accelerator where there is one."""
    path.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, tensor in physical_tensors(OuroConfig.from_hf(OURO_1_4B)).items():
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        value = torch.ones_like(noise) if "norm" in name else 0.02 * noise
        tensors[name] = value.to(torch.bfloat16).cpu()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(OURO_1_4B, indent=1))
    write_tokenizer(path)


def write_tokenizer(path: Path) -> None:
    """Token i is the word t{i}."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(OURO_1_4B["vocab_size"])}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (path / "tokenizer_config.json").write_text(text)


def write_data(path: Path) -> None:
    rng = random.Random(0)
    lines = [{"prompt_token_ids": [rng.randrange(4, 49152) for _ in range(128)], "label": ""} for _ in range(64)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, updates: int, settings: Sequence[str], *, resume: bool = False) -> float:
    """One process of the driver, to the given update. Returns its seconds."""
    command = [
        sys.executable,
        "-m",
        "tether.train",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "data.jsonl"),
    ]
    command += ["--out", str(folder / "run"), "--updates", str(updates), *(["--resume"] if resume else [])]
    for pair in ("reward=benchmarks.full_size:even_share", *settings):
        command += ["--set", pair]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
