"""The trainer's update under the tripwires."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tether.tripwires import Trip, Tripwires, TripwireStop, Watch, stop_if_asked

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample
    from adapters.megatron.trainer import Trainer

logger = logging.getLogger(__name__)


def train_on(
    trainer: Trainer, samples: list[TrainSample], metrics: dict[str, Any], *, wires: Tripwires, watch: Watch
) -> tuple[Watch, list[Trip]]:
    """One update of the trainer; adds its figures to the metrics. All ranks together, with the same arguments.

    Returns:
        What the wires remember from now on, and those that were touched.

    Raises:
        TripwireStop: a wire stops the run before anything was changed.
        StepRefused: a wire stops it between two steps of the update: the weights belong to no update.
    """
    from adapters.megatron.refusals import StepLimits
    from adapters.megatron.runtime import StepRefused

    watch, trips = wires.before_training(metrics, watch)
    stop_if_asked(trips)
    if any(trip.action == "skip" for trip in trips):
        samples = [replace(sample, loss_mask=[False] * sample.num_scored) for sample in samples]
    try:
        metrics |= trainer.train(samples, limits=StepLimits(**wires.step_limits(metrics, watch)))
    except StepRefused as error:
        if error.steps_made:
            raise
        raise TripwireStop(f"trip_{error.kind}: {error}") from error
    watch, more = wires.after_training(metrics, watch)
    metrics["tripped"] = [trip.text for trip in trips + more]
    for text in metrics["tripped"]:
        logger.warning("update %d: %s", metrics["update"], text)
    return watch, trips + more
