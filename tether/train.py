"""The driver: generate, reward, advantages, train, publish, evaluate, save.

    python -m tether.train --model M --data D --out O --updates N [--resume] [--set key=value ...] [--dry-run]
    python -m tether.launch ... --set train_devices=2       the same in several processes, restarted when it fails

Every rank trains; rank 0 also owns the engine, the data and the files of the run. What rank 0 does alone reaches the
others through `from_rank_zero`, its errors included.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adapters.clock import Clock
from adapters.contract import EngineError, derive_seed
from tether import evaluate, saving, start
from tether.diagnose import unreplayed_difference
from tether.guard import train_on
from tether.learn import to_learn
from tether.prepare import Job, prepare
from tether.profiling import Profiler, parse_updates
from tether.progress import Progress, closing_lines, say, stopped_lines
from tether.ranks import from_rank_zero, on_any_rank, rank
from tether.recovery import with_restarts
from tether.settings import parse
from tether.source import RolloutSource
from tether.stopping import StopRequests
from tether.throughput import device_memory, rates, training_flops
from tether.tripwires import TripwireStop, stop_if_asked

if TYPE_CHECKING:
    from adapters.contract import Engine
    from adapters.megatron.trainer import Trainer
    from tether.learn import Reference
    from tether.settings import RunArguments

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """One command line, from its checks to the export.

    Returns:
        The exit code: 0 (also for a run that was asked to stop), 2 for input that cannot be used, 1 for a run that
        failed. A second signal ends the process with 128 + its number.
    """
    arguments = parse(argv)
    with StopRequests(limit_seconds=arguments.settings.stop_after_seconds) as stop:
        return _run(arguments, stop)


def _run(arguments: RunArguments, stop: StopRequests) -> int:
    try:
        job = prepare(arguments, is_main=rank() == 0)
    except ValueError as error:
        say(f"tether: {error}")
        return 2
    if arguments.dry_run:
        say(start.dry_run_report(job))
        return 0
    try:
        train(job, stop)
    except Exception as error:
        logger.exception("the run failed")
        say(start.failure_report(job, error), every_rank=True)
        return 1
    return 0


@dataclass(kw_only=True)
class Run:
    """A run in progress: what is open, and how far it is."""

    job: Job
    trainer: Trainer
    engine: Engine | None
    """None on every rank but 0."""
    rollouts: RolloutSource
    reference: Reference | None
    """What a KL penalty holds on to; None without one."""
    state: saving.State
    saver: saving.Saver


def train(job: Job, stop: StopRequests) -> None:
    """Does the updates that are missing, from the start or from a checkpoint, and exports the result.

    Asked to stop, it ends with a checkpoint after the update it is in; nothing is exported then.
    """
    from adapters.megatron.runtime import freeze_objects

    with contextlib.ExitStack() as stack:
        start.files(job)
        wait_for_engine = stack.enter_context(start.launch_engine(job))
        trainer = stack.enter_context(start.trainer(job))
        state = saving.restore(job, trainer)
        engine = wait_for_engine()
        judge = stack.enter_context(start.judge(job))
        rollouts = stack.enter_context(RolloutSource(job, engine=engine, judge=judge))
        reference = stack.enter_context(start.reference_policy(job, trainer))
        sinks = stack.enter_context(start.sinks(job, state.update + 1))
        profiler = stack.enter_context(Profiler(parse_updates(job.settings.profile), job.directory.logs))
        saver = saving.Saver(job, trainer, resumed=state if job.arguments.resume else None)
        run = Run(
            job=job, trainer=trainer, engine=engine, rollouts=rollouts, reference=reference, state=state, saver=saver
        )

        publish(run)
        saver.save(state)
        freeze_objects()
        with Progress(total=job.arguments.updates, done=state.update) as progress:
            while run.state.update < job.arguments.updates and not on_any_rank(stop.reason() is not None):
                try:
                    with profiler.update(run.state.update + 1):
                        metrics = one_update(run)
                except (EngineError, TripwireStop):
                    saver.save(run.state, is_final=True)
                    raise
                sinks.write(metrics)
                progress.show(metrics)
        saver.save(run.state, is_final=True)
        if run.state.update < job.arguments.updates:
            from_rank_zero(lambda: job.directory.append_event("stopped", update=run.state.update))
            say(stopped_lines(job.arguments, run.state.update, stop.reason()))
            return
        export(run)
    say(closing_lines(job.arguments))


def one_update(run: Run) -> dict[str, Any]:
    """One GRPO update, from prompts to files. Returns its line of metrics.

    Raises:
        EngineError: the engine is lost for good.
        TripwireStop: a tripwire stopped the run; `run.state` is what it was before the update, or after it.
    """
    from adapters.megatron.runtime import require_equal

    job, clock, update = run.job, Clock(), run.state.update + 1
    require_equal("the execution plan", derive_seed(job.depth.plan(update)))

    batch, position, metrics = run.rollouts.take(run.state)
    run.rollouts.make_ahead(update + 1, version=run.state.version, position=position)
    clock.lap("rollout_seconds")
    samples, figures = to_learn(batch, job.settings, run.reference)
    metrics |= figures
    run.rollouts.keep(update, [sample.advantage for sample in samples])
    clock.lap("advantage_seconds")
    if job.settings.diagnose:
        metrics |= unreplayed_difference(run.trainer, samples)
        clock.lap("diagnose_seconds")
    watch, trips = train_on(run.trainer, samples, metrics, wires=job.tripwires, watch=run.state.watch)
    clock.lap("train_seconds")
    metrics |= device_memory()
    metrics["train_model_flops"] = training_flops(job, samples)
    # At once: whatever fails from here on, the trainer's weights are those of this update.
    run.state = replace(
        run.state, update=update, position=position, watch=watch, pending=None, metrics={**metrics, **clock.seconds}
    )
    run.state = replace(run.state, pending=run.rollouts.finish_ahead())
    clock.lap("wait_seconds")
    metrics |= publish(run)
    clock.lap("publish_seconds")
    metrics |= from_rank_zero(lambda: held_out(run, update))
    clock.lap("evaluate_seconds")
    metrics |= rates(metrics | clock.seconds, job.settings)
    run.state = replace(run.state, metrics={**metrics, **clock.seconds, "save_seconds": None})
    stops = any(trip.action == "stop" for trip in trips)
    run.saver.poll()
    if saving.is_due(job, update) or stops:
        run.saver.save(run.state, is_final=stops or update == job.arguments.updates)
    clock.lap("save_seconds")
    metrics |= clock.seconds
    from_rank_zero(lambda: job.directory.append_metrics(metrics))
    stop_if_asked(trips)
    return metrics


def held_out(run: Run, update: int) -> dict[str, Any]:
    """Figures on prompts that are not trained on, when this update is one to evaluate after. Rank 0 only."""
    engine = run.engine
    assert engine is not None
    return with_restarts(engine, lambda: evaluate.held_out(engine, run.job, run.rollouts.judge, update))


def publish(run: Run) -> dict[str, float]:
    """Makes the engine serve the trainer's weights, as this update's version. All ranks gather them together.

    Returns:
        Seconds of whichever phases the engine reports, named as metrics: `publish_write_seconds` and so on. A try that
        failed is not among them.
    """
    tensors = run.trainer.physical_tensors()

    def to_engine() -> dict[str, float]:
        engine = run.engine
        assert engine is not None
        try:
            report = with_restarts(engine, lambda: engine.publish(run.state.version, tensors), again=engine.republish)
        finally:
            exhaust(tensors)
        phases = report.seconds.items()
        return {f"publish_{phase.replace(' ', '_')}_seconds": round(seconds, 6) for phase, seconds in phases}

    if rank() != 0:
        exhaust(tensors)
    return from_rank_zero(to_engine)


def export(run: Run) -> None:
    """Writes OUT/hf, from the last checkpoint or, in a run that writes none, from the trainers' memory."""
    if run.job.settings.save_every:
        return from_rank_zero(lambda: start.export(run.job))
    tensors = run.trainer.physical_tensors()

    def write() -> None:
        try:
            start.export(run.job, tensors)
        finally:
            exhaust(tensors)

    if rank() != 0:
        exhaust(tensors)
    from_rank_zero(write)


def exhaust(tensors: Any) -> None:
    """Takes part in the gathers that are left: a rank that leaves early strands the others until their deadline."""
    for _ in tensors:
        pass


if __name__ == "__main__":
    sys.exit(main())
