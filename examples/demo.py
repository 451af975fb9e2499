"""Builds the demo of an example once: a tiny model with the real architecture, a tokenizer, a task it half masters.

    DIR/base/                         std-0.02 random weights, for tests of exactness
    DIR/warm/                         the same architecture after supervised steps: right about two times in five
    DIR/train.jsonl, heldout.jsonl    the task
    DIR/demo.json                     what it was built from, and how the warm-up went

A directory that is up to date is left alone. GRPO needs a policy that is sometimes right; the warm-up provides one.
`examples/NAME/make_demo.py` says which model.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from examples.toy_task import split, train_tokenizer, write_records
from providers.registry import Part, provider
from tether.data import load_tokenizer

if TYPE_CHECKING:
    from adapters.megatron.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
SEED = 20
BATCH = 96
WANTED_REWARD = 0.35
MOST_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The model of a demo."""

    config: Mapping[str, Any]
    """config.json; its model_type names the provider."""
    start: Callable[[str, torch.Tensor], torch.Tensor]
    """(name, base tensor) -> what the warm-up starts from: sizes from which a tiny model learns fast."""
    learning_rate: float = 3e-3
    """Of the warm-up."""
    build_options: Callable[[], dict[str, Any]] = dict
    """More arguments of the provider's `build`."""

    def part(self, name: Part) -> Any:
        return provider(self.config["model_type"], name)

    @property
    def model_config(self) -> Any:
        return self.part("config").Config.from_hf(self.config)

    @property
    def sources_digest(self) -> str:
        """Changes whenever code that decides the demo's weights changes."""
        name = self.config["model_type"]
        folders = ("examples", f"examples/{name}", f"providers/{name}", "adapters/megatron")
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def main(demo: Demo) -> None:
    """The command line of a make_demo.py: the directory to build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    warnings.simplefilter("ignore")  # of the libraries; they would bury the one line that matters
    build(demo, parser.parse_args().directory)


def build(demo: Demo, directory: Path) -> None:
    """Makes `directory` hold the demo, unless it does already. Only an earlier demo is ever replaced.

    Of several recipes that start together one builds, and the others wait for it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the kernel if the builder dies
        _build(demo, directory)


def _build(demo: Demo, directory: Path) -> None:
    digest, stamp = demo.sources_digest, directory / "demo.json"
    if stamp.is_file() and json.loads(stamp.read_text()).get("sources_digest") == digest:
        return
    if directory.exists() and not stamp.is_file():
        raise SystemExit(f"demo: {directory} exists and is not a demo (no demo.json); choose another directory")
    print(f"demo: building {directory} (once, about half a minute)", file=sys.stderr)
    staging = directory.with_name(directory.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    train = write_base(demo, staging)
    report = warm_up(demo, staging, train)
    (staging / "demo.json").write_text(json.dumps({"sources_digest": digest, **report}, indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)


def warm_up(demo: Demo, directory: Path, train: list[dict[str, str]]) -> dict[str, Any]:
    """Writes DIR/warm: supervised steps on the training problems until the policy is right often enough.

    A policy gradient with advantage 1 at ratio 1 is the gradient of the log-likelihood, so the trainer needs no other
    loss: it is told that the right answers were rolled out with the log-probs that it gives them itself.
    """
    from adapters.hf_convert.directory import HFDirectory
    from adapters.hf_convert.export import export_directory
    from adapters.megatron import runtime
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer

    began = time.perf_counter()
    runtime.initialize(runtime.RuntimeSettings(seed=SEED))
    try:
        source = directory / "start"
        start = ((name, demo.start(name, tensor)) for name, tensor in random_tensors(demo).items())
        export_directory(tensors=start, source=directory / "base", destination=source)
        model = demo.part("model").build(demo.model_config, dtype=torch.float32, **demo.build_options())
        schedule = OptimizerSettings(learning_rate=demo.learning_rate, lr_warmup_updates=10)
        trainer = Trainer(model, optimizer=schedule, tokens_per_microbatch=4096)
        trainer.load_hf(HFDirectory(source))
        steps, expected_reward = teach(trainer, answers(load_tokenizer(directory / "base"), train))
        export_directory(tensors=trainer.physical_tensors(), source=directory / "base", destination=directory / "warm")
        shutil.rmtree(source)
    finally:
        runtime.shutdown()
    return {"steps": steps, "expected_reward": expected_reward, "seconds": round(time.perf_counter() - began, 1)}


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


def write_base(demo: Demo, directory: Path) -> list[dict[str, str]]:
    """Writes the task, the tokenizer and the random checkpoint; returns the training records."""
    base, config = directory / "base", demo.config
    base.mkdir(parents=True)
    train, held_out = split(SEED)
    write_records(directory / "train.jsonl", train)
    write_records(directory / "heldout.jsonl", held_out)
    texts = [f"{record['prompt']} {record['label']}" for record in train]
    train_tokenizer(base, texts, vocab_size=config["vocab_size"], context=config["max_position_embeddings"])
    (base / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (base / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    save_file(random_tensors(demo), base / "model.safetensors", metadata={"format": "pt"})
    return train


def random_tensors(demo: Demo) -> dict[str, torch.Tensor]:
    """Norms 1, biases 0, everything else normal with the config's standard deviation."""
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in demo.part("physical").physical_tensors(demo.model_config).items():
        if "norm" in name:
            tensors[name] = torch.ones(tensor.shape)
        elif name.endswith("bias"):
            tensors[name] = torch.zeros(tensor.shape)
        else:
            tensors[name] = demo.config["initializer_range"] * torch.randn(tensor.shape, generator=generator)
    return tensors
