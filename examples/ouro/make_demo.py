"""Builds the demo once: a tiny Ouro with the real architecture, a tokenizer, and a toy task it half masters.

    python -m examples.ouro.make_demo DIR

    DIR/base/                         std-0.02 random weights, for tests of exactness
    DIR/warm/                         the same architecture after supervised steps: right about two times in five
    DIR/train.jsonl, heldout.jsonl    the task
    DIR/demo.json                     what it was built from, and how the warm-up went

A directory that is up to date is left alone. GRPO needs a policy that is sometimes right; the warm-up provides one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from examples.ouro.toy_task import split, train_tokenizer, write_records
from providers.ouro.config import OuroConfig
from providers.ouro.physical import physical_tensors
from tether.data import load_tokenizer

if TYPE_CHECKING:
    from adapters.megatron.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("examples/ouro/*.py", "providers/ouro/*.py", "adapters/megatron/*.py")
SEED = 20
CONTEXT = 512
CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"], "model_type": "ouro", "attention_dropout": 0.0, "bos_token_id": 1,
    "early_exit_threshold": 1.0, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "hidden_size": 128,
    "initializer_range": 0.02, "intermediate_size": 128, "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": CONTEXT, "max_window_layers": 3, "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32", "total_ut_steps": 4,
    "use_cache": True, "use_sliding_window": False, "vocab_size": 320,
}  # fmt: skip
BATCH = 96
LEARNING_RATE = 3e-3
WANTED_REWARD = 0.35
MOST_STEPS = 100
EMBEDDING_GAIN, BRANCH_GAIN = 50.0, 0.3
"""What the warm-up starts from: an embedding of size 1 and branches of size 0.3. Every branch ends in a norm, so at
the base's 0.02 the first layer's output drowns the embedding and learning takes several times as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    warnings.simplefilter("ignore")  # of the libraries; they would bury the one line that matters
    build(parser.parse_args().directory)


def build(directory: Path) -> None:
    """Makes `directory` hold the demo, unless it does already. Only an earlier demo is ever replaced."""
    digest = sources_digest()
    stamp = directory / "demo.json"
    if stamp.is_file() and json.loads(stamp.read_text()).get("sources_digest") == digest:
        return
    if directory.exists() and not stamp.is_file():
        raise SystemExit(f"demo: {directory} exists and is not a demo (no demo.json); choose another directory")
    print(f"demo: building {directory} (once, about half a minute)", file=sys.stderr)
    staging = directory.with_name(directory.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    train = write_base(staging)
    report = warm_up(staging, train)
    (staging / "demo.json").write_text(json.dumps({"sources_digest": digest, **report}, indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)


def warm_up(directory: Path, train: list[dict[str, str]]) -> dict[str, Any]:
    """Writes DIR/warm: supervised steps on the training problems until the policy is right often enough.

    A policy gradient with advantage 1 at ratio 1 is the gradient of the log-likelihood, so the trainer needs no other
    loss: it is told that the right answers were rolled out with the log-probs that it gives them itself.
    """
    from adapters.hf_convert.directory import HFDirectory
    from adapters.hf_convert.export import export_directory
    from adapters.megatron import runtime
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer
    from providers.ouro.model import build as build_model

    began = time.perf_counter()
    runtime.initialize(runtime.RuntimeSettings(seed=SEED))
    try:
        source = directory / "start"
        export_directory(tensors=start_tensors(), source=directory / "base", destination=source)
        model = build_model(OuroConfig.from_hf(CONFIG), dtype=torch.float32)
        schedule = OptimizerSettings(learning_rate=LEARNING_RATE, lr_warmup_updates=10)
        trainer = Trainer(model, optimizer=schedule, tokens_per_microbatch=4096)
        trainer.load_hf(HFDirectory(source))
        steps, expected_reward = teach(trainer, answers(load_tokenizer(directory / "base"), train))
        export_directory(tensors=trainer.physical_tensors(), source=directory / "base", destination=directory / "warm")
        shutil.rmtree(source)
    finally:
        runtime.shutdown()
    return {"steps": steps, "expected_reward": expected_reward, "seconds": round(time.perf_counter() - began, 1)}


def start_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """The base's tensors with larger embeddings and smaller branches."""
    for name, tensor in random_tensors().items():
        if name == "model.embed_tokens.weight":
            tensor = EMBEDDING_GAIN * tensor
        elif "layernorm_2" in name:
            tensor = BRANCH_GAIN * tensor
        yield name, tensor


def answers(tokenizer: Any, records: list[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, tokens of the right answer) of each record."""
    return [
        (tokenizer.encode(r["prompt"]), [*tokenizer.encode(f" {r['label']}"), tokenizer.eos_token_id]) for r in records
    ]


def teach(trainer: Trainer, problems: list[tuple[list[int], list[int]]]) -> tuple[int, float]:
    """Supervised steps until a batch's right answers have the wanted probability: (steps, that probability)."""
    from adapters.megatron.packing import TrainSample

    rng = random.Random(SEED)
    for step in range(MOST_STEPS):
        batch = [
            TrainSample(prompt_token_ids=prompt, response_token_ids=answer, advantage=1.0)
            for prompt, answer in rng.sample(problems, BATCH)
        ]
        logprobs = trainer.score(batch)
        expected_reward = fmean(exp(sum(values)) for values in logprobs)
        if expected_reward >= WANTED_REWARD:
            return step, round(expected_reward, 3)
        trainer.train([replace(s, rollout_logprobs=v) for s, v in zip(batch, logprobs, strict=True)])
    raise RuntimeError(f"warm-up: expected reward {expected_reward:.3f} after {MOST_STEPS} steps, not {WANTED_REWARD}")


def sources_digest() -> str:
    """Changes whenever code that decides the demo's weights changes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_base(directory: Path) -> list[dict[str, str]]:
    """Writes the task, the tokenizer and the random checkpoint; returns the training records."""
    base = directory / "base"
    base.mkdir(parents=True)
    train, held_out = split(SEED)
    write_records(directory / "train.jsonl", train)
    write_records(directory / "heldout.jsonl", held_out)
    texts = [f"{record['prompt']} {record['label']}" for record in train]
    train_tokenizer(base, texts, vocab_size=CONFIG["vocab_size"], context=CONTEXT)
    (base / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    ends = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (base / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    save_file(random_tensors(), base / "model.safetensors", metadata={"format": "pt"})
    return train


def random_tensors() -> dict[str, torch.Tensor]:
    """Norms 1, the gate's bias 0, everything else normal with standard deviation 0.02."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, tensor in physical_tensors(OuroConfig.from_hf(CONFIG)).items():
        if "norm" in name:
            tensors[name] = torch.ones(tensor.shape)
        elif name.endswith("bias"):
            tensors[name] = torch.zeros(tensor.shape)
        else:
            tensors[name] = CONFIG["initializer_range"] * torch.randn(tensor.shape, generator=generator)
    return tensors


if __name__ == "__main__":
    main()
