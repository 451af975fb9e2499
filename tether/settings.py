"""Every setting of a run: its default, its check and the only parser. Nothing else reads the command line.

`RunArguments` says where a run reads and writes; `Settings` says how it trains and is given by `--set key=value`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from tether.depth import DepthSchedule
from tether.learning_settings import LearningSettings, preset_lines, with_presets
from tether.settings_rules import violations


@dataclass(frozen=True, kw_only=True)
class Settings(LearningSettings):
    """How a run samples, trains and saves.

    Raises:
        ValueError: values outside their range, all of them in one message.
    """

    seed: int = 0
    """Seed of everything random: prompt order, every sample, the trainer."""
    dtype: str = "auto"
    """Weights and activations of trainer and engine: float32, bfloat16, or auto (what the checkpoint declares)."""
    group_size: int = 8
    """Samples per prompt; advantages are relative to their group."""
    prompts_per_update: int = 16
    """Prompts per update, taken in shuffled order, epoch after epoch."""
    max_new_tokens: int = 256
    """Longest response; prompt and response together must fit the model's context."""
    temperature: float = 1.0
    """Temperature of sampling, and of the log-probs that are trained."""
    lr: float = 1e-6
    """Peak learning rate of Adam."""
    depth: str = "full"
    """Loops of generated tokens: full, fixed:K, {early,delayed}:THRESHOLD:MIN:MAX, or several by update:
    cycle:3,4,early:0.8:2:4."""
    engine: str = "local"
    """Which engine makes the rollouts: local (one vLLM process), pd (prompts and answers in different ones), or http
    (a vLLM server that somebody else started, see docs/publication.md)."""
    engine_url: str = ""
    """Where that server listens, with engine=http, such as http://host:8000."""
    engine_directory: str = ""
    """Directory through which weights reach it; empty for shared memory, when it runs on this machine."""
    staging: str = "host"
    """Where published weights wait until they are committed: host, or on CUDA shadow or ipc (docs/publication.md)."""
    prefill: int = 1
    """Processes that compute prompts, with engine=pd."""
    decode: int = 1
    """Processes that generate from computed prompts, with engine=pd."""
    transports: str = "auto"
    """How keys and values travel between them, a list for UCX such as tcp,self,sm; auto takes the first that works."""
    reward: str = "tether.rewards:exact_match"
    """Reward function, module:function."""
    save_every: int = 2
    """Updates between checkpoints; the last state is always saved. 0 writes none: such a run cannot be resumed, and its
    export comes from the trainer's memory."""
    save_start: bool = True
    """Save before the first update too, so that a run killed at any later moment resumes."""
    tokens_per_microbatch: int = 4096
    """Most tokens in one packed forward and backward."""
    train_devices: int = 1
    """Trainer processes; more than one need `tether launch` or torchrun."""
    tensor_parallel: int = 1
    """Trainer processes that share one copy of the model; divides train_devices."""
    expert_parallel: int = 1
    """Trainer processes that divide the experts of a layer among them; divides train_devices."""
    expert_tensor_parallel: int = 1
    """Trainer processes that share each expert, every one with a slice of its width; divides train_devices."""
    sequence_parallel: bool = False
    """Cut activations between projections over tensor-parallel processes too; always so in models with experts."""
    pipeline_parallel: int = 1
    """Stages of layers; see docs/parallelism.md for what a model supports."""
    context_parallel: int = 1
    """Trainer processes that share a sequence; see docs/parallelism.md."""
    distributed_optimizer: bool = True
    """Data-parallel processes divide masters and moments among them; false keeps them whole on each."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the last micro-batch's backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather stepped parameters when they are next needed; needs overlap_grad_reduce and distributed_optimizer."""
    router_replay: str = "rollout"
    """Experts of a training pass: rollout (the recorded ones), trainer (the trainer's own at the start), or none."""
    balance_coefficient: float = 0.01
    """Weight of the routers' load balancing loss."""
    router_z_coefficient: float = 0.001
    """Weight of the routers' z-loss."""
    rollout_devices: int = 1
    """Devices of the engine, or of each of its processes (tensor parallel)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; the norm before is logged."""
    weight_decay: float = 0.0
    """Adam's decoupled weight decay."""
    lr_warmup_updates: int = 0
    """Updates over which the learning rate rises to lr."""
    lr_decay_updates: int = 0
    """Update at which the learning rate has fallen to lr_floor; 0 keeps it constant."""
    lr_schedule: str = "cosine"
    """How it falls: constant (not at all), linear, cosine, or wsd (in the last lr_wsd_updates only)."""
    lr_wsd_updates: int = 0
    """Updates of the fall of lr_schedule=wsd, before lr_decay_updates."""
    lr_floor: float = 0.0
    """Learning rate after the decay."""
    param_groups: str = ""
    """Factors by parameter name, PATTERN:lr=FACTOR:wd=FACTOR,...; the first pattern that matches counts."""
    freeze: str = ""
    """Parameters that are not trained: patterns of their names, PATTERN,PATTERN."""
    recompute: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    diagnose: bool = False
    """Also measure the score difference when responses are not replayed: every token whole, or routed anew."""
    eval_data: str = ""
    """JSON lines of held-out prompts, answered greedily and rewarded every eval_every updates."""
    eval_every: int = 0
    """Updates between evaluations on eval_data; 0 never evaluates."""
    eval_samples: int = 0
    """Answers drawn to each held-out prompt for pass@1, 2, 4, ...; 0 draws none beside the greedy one."""
    eval_pass_reward: float = 1.0
    """Reward from which an answer passes."""
    keep_rollouts: bool = True
    """Write every sample to OUT/rollouts."""
    tensorboard: bool = False
    """Also write metrics as TensorBoard event files, to OUT/tensorboard."""
    profile: str = ""
    """Updates to write a torch profiler trace of, START:STOP, to OUT/logs."""
    peak_flops: float = 0.0
    """Floating-point operations per second of one trainer device at its best, for train_mfu; 0 leaves that out."""
    prometheus_port: int = 0
    """Port of this machine at which the newest metrics are served for Prometheus; 0 serves none."""
    keep_last: int = 0
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of every so many updates are kept for good, whatever keep_last says; 0 makes no exception."""
    async_save: bool = False
    """Write checkpoints while training goes on; the last one is always waited for."""
    save_format: str = "reshardable"
    """reshardable, or same_layout: cheaper to save, for the layout that wrote it; the last one is reshardable."""
    stop_after_seconds: float = 0.0
    """Time after which the run finishes its update, saves and ends; 0 is no limit."""
    remote_code: str = "keep"
    """Code for transformers in OUT/hf: ours (written for transformers 5), keep (the model's own), or none."""
    enforce_eager: bool = False
    """Decode without CUDA graphs: slower, but the engine starts in seconds less. CPU has none."""
    max_concurrent_samples: int = 64
    """Samples the engine decodes at the same time."""
    kv_cache_bytes: int = 0
    """Memory of the engine's key and value cache; 0 sizes it for max_concurrent_samples (CPU) or asks vLLM (GPU)."""
    deadline_seconds: float = 1800.0
    """Longest wait for the engine, or for another trainer process, before the run ends with an error."""

    def __post_init__(self) -> None:
        problems = [f"{name}: got {getattr(self, name)!r}, expected {want}" for name, want in violations(self)]
        try:
            DepthSchedule.parse(self.depth)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("settings:\n  " + "\n  ".join(problems))

    def replace(self, **changes: Any) -> Settings:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


UNCONTRACTED = frozenset(
    {"train_devices", "tensor_parallel", "expert_parallel", "expert_tensor_parallel", "sequence_parallel",
     "pipeline_parallel", "context_parallel", "distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather",
     "rollout_devices",
     "engine", "engine_url", "engine_directory", "staging", "prefill", "decode", "transports",
     "save_every", "save_start",
     "keep_rollouts", "keep_last", "keep_every",
     "async_save", "save_format",
     "stop_after_seconds", "diagnose", "eval_data", "eval_every", "eval_samples", "eval_pass_reward", "tensorboard",
     "profile", "peak_flops", "prometheus_port", "remote_code",
     "max_concurrent_samples", "kv_cache_bytes", "enforce_eager",
     "deadline_seconds"}
    | {name for name in LearningSettings.__dataclass_fields__ if name.startswith("trip_")}
)  # fmt: skip
"""Settings that may change on resume: they decide where and how a run computes, not what."""


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """One command line."""

    model: Path
    """Hugging Face directory to start from."""
    data: Path
    """JSON lines of prompts and labels."""
    out: Path
    """Directory of the run."""
    updates: int
    """Update at which the run ends; on resume, counted from the very first."""
    resume: bool = False
    """Go on from the newest checkpoint in OUT."""
    resume_from: int | None = None
    """Go on from the checkpoint of this update instead; newer ones are set aside."""
    allow_change: tuple[str, ...] = ()
    """A field of the run contract that may differ on resume (lr, data_digest, ...); may be repeated."""
    dry_run: bool = False
    """Resolve and check everything, print it, start nothing."""
    settings: Settings = dataclasses.field(default_factory=Settings)
    """What --set gave, defaults filled in."""


def parse(argv: Sequence[str] | None = None, *, prog: str = "python -m tether.train") -> RunArguments:
    """Reads a command line; a wrong one prints the problem and exits with status 2."""
    parser = _parser(prog)
    got = vars(parser.parse_args(argv))
    try:
        if got["updates"] < 1:
            raise ValueError(f"--updates: got {got['updates']}, expected at least 1")
        settings = from_pairs(got.pop("set"))
        got["resume"] = got["resume"] or got["resume_from"] is not None
        got["allow_change"] = tuple(got["allow_change"])
        if got["allow_change"] and not got["resume"]:
            raise ValueError("--allow-change: expected it together with --resume")
        return RunArguments(**got, settings=settings)
    except ValueError as error:
        parser.error(str(error))


def from_pairs(pairs: Sequence[str]) -> Settings:
    """Settings from "key=value" texts; of two with the same key the later one counts. preset=NAME stands for several.

    Raises:
        ValueError: a text without "=", an unknown preset or key, or a value of the wrong type.
    """
    types, values, problems = get_type_hints(Settings), {}, []
    for pair in with_presets(list(pairs)):
        key, equals, text = pair.partition("=")
        if not equals or key not in types:
            problems.append(f"--set {pair}: expected key=value with a key of {', '.join(sorted(types))}")
            continue
        try:
            values[key] = _convert(text, types[key])
        except ValueError:
            problems.append(f"--set {pair}: got {text!r}, expected {_TYPE_NAMES[types[key]]}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return Settings(**values)


def to_argv(arguments: RunArguments) -> list[str]:
    """The command line that asks for the same run, without its number of updates and its switches."""
    argv = [text for name in ("model", "data", "out") for text in (f"--{name}", str(getattr(arguments, name)))]
    defaults = dataclasses.asdict(Settings())
    for name, value in dataclasses.asdict(arguments.settings).items():
        if value != defaults[name]:
            argv += ["--set", f"{name}={_text(value)}"]
    return argv


def describe(kind: type) -> dict[str, str]:
    """The line under each field of a dataclass, by field name, those of its bases first."""
    inherited = describe(kind.__base__) if dataclasses.is_dataclass(kind.__base__) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return inherited | {
        field.target.id: " ".join(str(line.value.value).split())
        for field, line in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    }


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _convert(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def _parser(prog: str) -> argparse.ArgumentParser:
    lines = describe(RunArguments)
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Trains a policy by GRPO: rollouts by vLLM, training by Megatron-Core, weights kept the same.",
        epilog=f"settings (--set key=value) and their defaults:\n{settings_table(Settings())}\n\n"
        f"shorthands for several settings:\n{preset_lines()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar=name.upper(), help=lines[name])
    parser.add_argument("--updates", type=int, required=True, metavar="N", help=lines["updates"])
    parser.add_argument("--resume", action="store_true", help=lines["resume"])
    parser.add_argument("--resume-from", type=int, metavar="UPDATE", help=lines["resume_from"])
    parser.add_argument("--allow-change", action="append", default=[], metavar="FIELD", help=lines["allow_change"])
    parser.add_argument("--dry-run", action="store_true", help=lines["dry_run"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting; may be repeated")
    return parser


def settings_table(settings: Settings) -> str:
    """One line per setting: key=value and what it means."""
    values = {name: f"{name}={_text(value)}" for name, value in dataclasses.asdict(settings).items()}
    width = max(map(len, values.values()))
    return "\n".join(f"  {values[name]:<{width}}  {line}" for name, line in describe(Settings).items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
