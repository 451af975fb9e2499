"""Resolves and checks everything about a run before anything heavy starts: the work of a dry run, and of any start.

Each trainer process resolves for itself; only the main one reads the whole model for its digest and looks at OUT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from adapters.hf_convert.directory import HFDirectory
from adapters.megatron import checkpoint_files
from adapters.megatron.parameter_groups import parse_groups, schedule_problems
from adapters.parallelism import Parallelism
from providers.registry import Part, provider
from tether.data import Record, load_records, load_tokenizer
from tether.depth import DepthSchedule
from tether.episodes import RolloutFunction, single_turn
from tether.functions import function_named
from tether.learn import grpo_settings
from tether.mix import PromptMix, parse_files
from tether.profiling import parse_updates
from tether.rewards import RewardFunction, load_reward
from tether.run_contract import check_contract, run_contract
from tether.run_directory import RunDirectory
from tether.settings import RunArguments, Settings
from tether.tripwires import Tripwires


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, resolved."""

    arguments: RunArguments
    settings: Settings
    """With dtype resolved."""
    directory: RunDirectory
    source: HFDirectory
    """The model to start from; its tensors fit its config."""
    config: Any
    """The provider's config of the model."""
    tokenizer: Any
    records: list[Record]
    """Of DATA, then of each file of more_data."""
    sources: list[tuple[int, float]]
    """Records and weight of each file."""
    held_out: list[Record]
    """Prompts to evaluate on; empty without eval_data."""
    rollout: RolloutFunction
    """Makes samples of prompts."""
    tripwires: Tripwires
    depth: DepthSchedule
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""
    contract: dict[str, Any]
    """Empty on all processes but the main one."""
    changes: dict[str, Any]
    """Fields of the contract that a resume was allowed to change, with [before, now]; known to the main process."""

    def part(self, name: Part) -> ModuleType:
        """A module of the model's provider."""
        return provider(self.source.config["model_type"], name)

    def order(self) -> PromptMix:
        """The order in which the records are used."""
        sizes, weights = zip(*self.sources, strict=True)
        return PromptMix(sizes, weights, seed=self.settings.seed)

    @property
    def context_tokens(self) -> int:
        """Longest sequence of this run: the longest prompt and max_new_tokens."""
        records = self.records + self.held_out
        return max(len(record.prompt_token_ids) for record in records) + self.settings.max_new_tokens


def prepare(arguments: RunArguments, *, is_main: bool = True) -> Job:
    """Reads and checks model, data, reward, depth schedule and OUT.

    Raises:
        ValueError: anything that is wrong with them, before any model loads.
    """
    directory = RunDirectory(arguments.out)
    if is_main:
        run = _check_out(directory, arguments)
    source, config = read_model(arguments.model)
    settings = arguments.settings
    settings = settings.replace(dtype=config.dtype if settings.dtype == "auto" else settings.dtype)
    reward = load_reward(settings.reward)
    making = _rollout(settings)
    grpo_settings(settings)
    _check_schedule(settings)
    _check_reference(settings)
    more = parse_files(settings.more_data)
    _check_parallelism(settings, config, is_dry_run=arguments.dry_run)
    depth = _depth(settings, source, config)
    tokenizer = load_tokenizer(arguments.model)
    read = partial(
        load_records,
        tokenizer=tokenizer,
        max_prompt_tokens=config.max_position_embeddings - settings.max_new_tokens,
        vocab_size=config.vocab_size,
    )
    files = [read(path) for path in (arguments.data, *(path for path, _ in more))]
    contract = _contract(arguments, settings, reward, making) if is_main else {}
    changes = {}
    if is_main and arguments.resume:
        changes = check_contract(
            saved=run["contract"], now=contract, where=directory.path, allowed=arguments.allow_change
        )
    return Job(
        arguments=arguments,
        settings=settings,
        directory=directory,
        source=source,
        config=config,
        tokenizer=tokenizer,
        records=[record for records in files for record in records],
        sources=[(len(r), w) for r, w in zip(files, (1.0, *(weight for _, weight in more)), strict=True)],
        held_out=read(Path(settings.eval_data)) if settings.eval_data else [],
        rollout=making,
        tripwires=Tripwires.parse(settings),
        depth=depth,
        stop_token_ids=tuple(sorted(set(stop_token_ids(source.path, tokenizer)))),
        contract=contract,
        changes=changes,
    )


def _check_out(directory: RunDirectory, arguments: RunArguments) -> dict[str, Any]:
    """run.json of the run to resume; {} for a new one, which needs a free directory."""
    if not arguments.resume:
        directory.check_free()
        return {}
    run = directory.read_run()
    done = checkpoint_files.number(directory.checkpoint_to_resume(arguments.resume_from))
    if arguments.updates < done:
        raise ValueError(
            f"--updates: got {arguments.updates}, expected at least {done}: {directory.path} has done that many already"
        )
    return run


def read_model(model: Path) -> tuple[HFDirectory, Any]:
    """A Hugging Face directory and its provider's config.

    Raises:
        ValueError: it is missing, of an unknown model type, or its tensors do not fit its config.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"{model}: no Hugging Face model here (config.json is missing)")
    source = HFDirectory(model)
    model_type = str(source.config.get("model_type"))
    config_class = provider(model_type, "config").Config
    config = config_class.from_hf(source.config, where=str(model / "config.json"))
    tensors = provider(model_type, "physical").physical_tensors(config)
    source.check({name: tensor.shape for name, tensor in tensors.items()})
    return source, config


def _check_schedule(s: Settings) -> None:
    """Raises ValueError for a schedule, parameter groups or updates to profile that cannot be."""
    parse_groups(s.param_groups)
    parse_updates(s.profile)
    problems = schedule_problems(
        schedule=s.lr_schedule, warmup=s.lr_warmup_updates, decay=s.lr_decay_updates, wsd=s.lr_wsd_updates
    )
    if problems:
        raise ValueError("settings:\n  " + "\n  ".join(problems))


def _check_reference(s: Settings) -> None:
    """Raises ValueError if two engines would each take most of a device."""
    import torch

    if s.reference_scorer == "engine" and not s.kv_cache_bytes and torch.cuda.is_available():
        raise ValueError(
            "kv_cache_bytes: got 0 with reference_scorer=engine on CUDA, expected the size of each engine's cache: "
            "two of them share the device"
        )


def _rollout(settings: Settings) -> RolloutFunction:
    if not settings.rollout:
        return single_turn
    signature = "(episodes, generate, tokenizer) -> None"
    return function_named(
        settings.rollout, what="rollout", signature=signature, episodes=[], generate=None, tokenizer=None
    )


def _check_parallelism(settings: Settings, config: Any, *, is_dry_run: bool) -> None:
    """Raises ValueError if the model cannot be trained on such a layout, or other processes were started."""
    s = settings
    problems = config.parallel_problems(
        Parallelism(
            devices=s.train_devices,
            tensor=s.tensor_parallel,
            expert=s.expert_parallel,
            expert_tensor=s.expert_tensor_parallel,
            pipeline=s.pipeline_parallel,
            context=s.context_parallel,
            sequence=s.sequence_parallel,
        )
    )
    world = int(os.environ.get("WORLD_SIZE", s.train_devices if is_dry_run else 1))
    if world != s.train_devices:
        problems.append(
            f"train_devices: got {s.train_devices} in {world} process(es), expected as many; "
            "`python -m tether.launch` starts them"
        )
    if problems:
        raise ValueError("this model cannot be trained so:\n  " + "\n  ".join(problems))


def _depth(settings: Settings, source: HFDirectory, config: Any) -> DepthSchedule:
    trace = provider(source.config["model_type"], "trace")
    schedule = DepthSchedule.parse(settings.depth)
    schedule.check(lambda policy: trace.parse_policy(policy, config))
    return schedule


def _contract(
    arguments: RunArguments, settings: Settings, reward: RewardFunction, making: RolloutFunction
) -> dict[str, Any]:
    data = [arguments.data, *(path for path, _ in parse_files(settings.more_data))]
    return run_contract(model=arguments.model, data=data, settings=settings, reward=reward, rollout=making)


def stop_token_ids(model: Path, tokenizer: Any) -> Iterator[int]:
    """End tokens that a model's config.json, generation_config.json or tokenizer name."""
    files = (model / "config.json", model / "generation_config.json")
    named = [json.loads(path.read_text()).get("eos_token_id") for path in files if path.is_file()]
    for value in (*named, tokenizer.eos_token_id):
        yield from () if value is None else value if isinstance(value, list) else (value,)
