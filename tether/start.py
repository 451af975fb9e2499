"""Starts what a run needs (its files, the engine, the trainer) and ends it again; exports the result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from adapters.contract import EngineError, derive_seed
from tether.engines import ENGINE_LOGS, start_engine, start_reference_engine
from tether.learn import grpo_settings
from tether.memory import estimate
from tether.prepare import Job
from tether.progress import last_lines
from tether.ranks import from_rank_zero, rank
from tether.recovery import MAX_RESTARTS
from tether.reference import EngineReference
from tether.reward_process import Judge, RewardProcesses
from tether.settings import settings_table
from tether.sinks import Sinks

if TYPE_CHECKING:
    import torch

    from adapters.megatron.routing import RouterSettings
    from adapters.megatron.trainer import Trainer
    from tether.engines import AnyEngine
    from tether.learn import Reference

logger = logging.getLogger(__name__)


def files(job: Job) -> None:
    """Makes OUT and writes run.json (rank 0); sends the log of this process to OUT/logs."""
    if rank() == 0:
        job.directory.lock()
        paths = {name: str(getattr(job.arguments, name).resolve()) for name in ("model", "data")}
        job.directory.create({**paths, "settings": dataclasses.asdict(job.settings), "contract": job.contract})
    job.directory.logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=job.directory.trainer_log(rank()),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.captureWarnings(True)


@contextlib.contextmanager
def launch_engine(
    job: Job, starts: Callable[[Job], AnyEngine] = start_engine
) -> Iterator[Callable[[], AnyEngine | None]]:
    """Starts an engine in the background, on rank 0; it is closed at the end.

    Yields:
        A function that waits for the engine and returns it, None on other ranks. All ranks must call it together.
    """
    with ThreadPoolExecutor(1) as executor:
        starting = executor.submit(starts, job) if rank() == 0 else None

        def wait() -> AnyEngine | None:
            from_rank_zero(lambda: starting.result() and None)  # type: ignore[union-attr]
            return starting.result() if starting else None

        try:
            yield wait
        finally:
            if starting is not None and starting.exception() is None:
                starting.result().close()


@contextlib.contextmanager
def trainer(job: Job) -> Iterator[Trainer]:
    """Joins the process group and builds the model and its optimizer; the weights are still to be loaded."""
    import torch

    from adapters.megatron import runtime
    from adapters.megatron.optimizer import DataParallelSettings, OptimizerSettings
    from adapters.megatron.parameter_groups import parse_groups
    from adapters.megatron.trainer import Trainer

    s = job.settings
    optimizer = OptimizerSettings(
        learning_rate=s.lr,
        lr_warmup_updates=s.lr_warmup_updates,
        lr_decay_updates=s.lr_decay_updates,
        lr_schedule=s.lr_schedule,  # type: ignore[arg-type]
        lr_wsd_updates=s.lr_wsd_updates,
        min_learning_rate=s.lr_floor,
        groups=parse_groups(s.param_groups),
        frozen=tuple(filter(None, s.freeze.split(","))),
        weight_decay=s.weight_decay,
        max_grad_norm=s.max_grad_norm,
    )
    runtime.initialize(
        runtime.RuntimeSettings(
            tensor_parallel=s.tensor_parallel,
            expert_parallel=s.expert_parallel,
            expert_tensor_parallel=s.expert_tensor_parallel,
            seed=derive_seed(s.seed, "trainer") % 2**32,
            # rank 0's own deadlines must end first, so that its error arrives
            deadline_seconds=(MAX_RESTARTS + 2) * s.deadline_seconds,
        )
    )
    try:
        options: dict[str, Any] = {"router": router_settings(job)} if getattr(job.config, "num_experts", 0) else {}
        if s.sequence_parallel:
            options["sequence_parallel"] = True
        model = job.part("model").build(job.config, dtype=getattr(torch, s.dtype), recompute=s.recompute, **options)
        yield Trainer(
            model,
            optimizer=optimizer,
            grpo=grpo_settings(s),
            tokens_per_microbatch=s.tokens_per_microbatch,
            parallel=DataParallelSettings(
                distributed_optimizer=s.distributed_optimizer,
                overlap_grad_reduce=s.overlap_grad_reduce,
                overlap_param_gather=s.overlap_param_gather,
            ),
        )
    finally:
        runtime.shutdown()


@contextlib.contextmanager
def judge(job: Job) -> Iterator[Judge]:
    """The reward function in processes of its own, which end with this; they start when they are needed."""
    s = job.settings
    log = job.directory.logs / "reward.log"
    with RewardProcesses(s.reward, timeout_seconds=s.reward_timeout_seconds, log_path=log) as processes:
        yield processes


def sinks(job: Job, first_update: int) -> Sinks:
    """Where metrics go beside metrics.jsonl; nowhere on every rank but 0. All ranks together."""
    s, opened = job.settings, []
    path = job.directory.tensorboard if s.tensorboard else None

    def open_them() -> None:
        opened.append(Sinks(tensorboard=path, prometheus_port=s.prometheus_port, first_update=first_update))

    from_rank_zero(open_them)
    return opened[0] if opened else Sinks(tensorboard=None, prometheus_port=0, first_update=first_update)


@contextlib.contextmanager
def reference_policy(job: Job, trainer: Trainer) -> Iterator[Reference | None]:
    """The model that the run began with, when a KL penalty asks for it. All ranks together."""
    from adapters.megatron.reference import ReferencePolicy

    if not job.settings.kl:
        yield None
    elif job.settings.reference_scorer == "trainer":
        yield ReferencePolicy(trainer, job.source)
    else:
        with launch_engine(job, start_reference_engine) as wait_for_engine:
            yield EngineReference(job, wait_for_engine())


def router_settings(job: Job) -> RouterSettings:
    """How the routers of a model with experts are trained, and from which load on an update is refused."""
    from adapters.megatron.routing import RouterSettings

    settings, wire = job.settings, job.tripwires.wires["router"]
    return RouterSettings(
        balance_coefficient=settings.balance_coefficient,
        z_coefficient=settings.router_z_coefficient,
        replay=settings.router_replay,  # type: ignore[arg-type]
        least_effective_experts=0.0 if wire.action == "off" else wire.threshold * job.config.top_k,
    )


def export(job: Job, tensors: Iterator[tuple[str, torch.Tensor]] | None = None) -> None:
    """Writes OUT/hf from the newest checkpoint, as `python -m tether.convert export` does. Rank 0 only.

    Args:
        tensors: the trainer's weights in checkpoint order, for a run without checkpoints.
    """
    from tether.exporting import ExportOptions, export_weights
    from tether.stored import open_weights, passing_weights

    options = ExportOptions(remote_code=job.settings.remote_code)
    if tensors is None:
        weights = open_weights(job.directory.path, source=job.arguments.model)
    else:
        depth, dtype = job.settings.depth, job.settings.dtype
        weights = passing_weights(tensors, where=job.directory.path, source=job.source, depth=depth, dtype=dtype)
    report = export_weights(weights, job.directory.hf, options)
    for line in (report.depth, *report.warnings):
        logger.info("export %s: %s", job.directory.hf, line)
    job.directory.append_event("finished", update=job.arguments.updates)


def failure_report(job: Job, error: Exception) -> str:
    """What went wrong, with the end of the engine's log if the engine is to blame, and where the traceback is."""
    who = "tether" if rank() == 0 else f"tether rank {rank()}"
    log = job.directory.trainer_log(rank())
    lines = [f"{who}: {type(error).__name__}: {error}", f"(traceback in {log}; --resume goes on)"]
    if isinstance(error, EngineError) and "the end of " not in str(error):
        lines[1:1] = [last_lines(each) for each in sorted(job.directory.logs.glob(ENGINE_LOGS))]
    return "\n".join(lines)


def dry_run_report(job: Job) -> str:
    """What a run would do, as text."""
    return "\n".join(
        [
            f"model {job.arguments.model}: {job.source.config['model_type']}, {len(job.source.tensors)} tensors",
            f"data {job.arguments.data}: {len(job.records)} prompts, longest sequence {job.context_tokens} tokens",
            f"out {job.arguments.out}: {'resume' if job.arguments.resume else 'new run'}, "
            f"up to update {job.arguments.updates}",
            "settings:",
            settings_table(job.settings),
            "memory estimate:",
            *(f"  {line}" for line in estimate(job).lines()),
            "dry run: everything checked, nothing started",
        ]
    )
