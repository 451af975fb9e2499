"""Hooks before the framework's log-prob pass and optimizer step: replay is armed, and a bad step is refused.

A tripwire is an attribute `tether_trip_...` of the arguments (put into the file of --custom-config-path), in the words
of `tether.tripwires`. The framework cannot leave a step out, so what would skip one stops the run here: every training
process raises the same error, and the run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from adapters.megatron.refusals import refuse_non_finite_gradients
from adapters.megatron.runtime import StepRefused, device
from tether.learning_settings import LearningSettings
from tether.tripwires import LEAST_NORMS, WINDOW, Wire
from tether.vime.model import FrameworkModel
from tether.vime.versions import note_rollout

logger = logging.getLogger(__name__)
_norms: list[float] = []
"""Gradient norms of this process's newest steps; equal on every rank."""


def before_log_prob(args: Any, model: Sequence[Any], store_prefix: str) -> None:
    """For --custom-megatron-before-log-prob-hook-path. `store_prefix`: "" for the policy, "ref_", "teacher_"."""
    for chunk in model:
        inner_model(chunk).replay.arm(store_prefix=store_prefix)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """For --custom-megatron-before-train-step-hook-path: arms replay, and the tripwires between backward and step.

    Raises:
        RuntimeError: the framework does not finish gradients through Megatron's own hook any more.
    """
    for chunk in model:
        inner_model(chunk).replay.arm(store_prefix=None)
    note_rollout(rollout_id)
    config = get_model_config(model[0])
    finish = config.finalize_model_grads_func
    if finish is None:
        raise RuntimeError(
            "before_train_step: finalize_model_grads_func is not set, expected Megatron's or the framework's"
        )
    if isinstance(finish, Guard):
        finish = finish.finish
    where = f"rollout {rollout_id}, step {step_id}"
    config.finalize_model_grads_func = Guard(finish, args=args, optimizer=optimizer, where=where)


def check_scores(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """For --rollout-data-postprocess-path: trainer and engine must agree on what was drawn, before it is trained on.

    Does nothing where the framework takes the trainer's log-probs from the training pass itself, or uses the engine's.
    Collective over data-parallel ranks.

    Raises:
        StepRefused: on every rank, if the mean difference of trained tokens is above tether_trip_score_difference.
    """
    wire = wire_of(args, "score_difference")
    if wire.action == "off" or not {"log_probs", "rollout_log_probs"} <= rollout_data.keys():
        return
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    columns = (rollout_data[name] for name in ("log_probs", "rollout_log_probs", "loss_masks"))
    for trainer_logprobs, rollout_logprobs, mask in zip(*columns, strict=True):
        off = (trainer_logprobs - rollout_logprobs).double().abs() * mask
        sums += torch.stack([off.sum(), mask.double().sum()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    mean = float(sums[0] / sums[1].clamp_min(1))
    if not mean <= wire.threshold:
        _trip(
            wire,
            "score_difference",
            f"rollout {rollout_id}: trainer and engine differ by {mean:.3g} in the mean log-prob, expected at most "
            f"{wire.threshold:.3g}: the engine serves other weights, a trace is not replayed, or precision is lost",
        )


class Guard:
    """Finishes gradients as the framework does, then judges them. Every rank calls it, and comes to the same end."""

    def __init__(self, finish: Any, *, args: Any, optimizer: Any, where: str) -> None:
        self.finish, self.optimizer, self.where = finish, optimizer, where
        self.norm_wire = wire_of(args, "grad_norm")

    def __call__(self, model: Sequence[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
        self.finish(model, num_tokens, **groups)
        for chunk in model:
            refuse_non_finite_gradients(inner_model(chunk), chunk)
        if self.norm_wire.action != "off":
            self._judge_norm()

    def _judge_norm(self) -> None:
        self.optimizer.prepare_grads()  # `step` does it again; it only copies
        norm = float(self.optimizer.get_grad_norm())
        usual = float(torch.tensor(_norms).median()) if len(_norms) >= LEAST_NORMS else None
        if usual is not None and norm > self.norm_wire.threshold * usual:
            most = self.norm_wire.threshold * usual
            text = f"{self.where}: the gradient norm is {norm:.4g}, {most:.4g} was expected at most"
            _trip(self.norm_wire, "grad_norm", text)
        _norms[:] = [*_norms, norm][-WINDOW:]


def inner_model(chunk: Any) -> FrameworkModel:
    """The model inside of DDP and Float16Module.

    Raises:
        RuntimeError: it is not one of ours.
    """
    inner = chunk
    while not isinstance(inner, FrameworkModel) and hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, FrameworkModel):
        raise RuntimeError(
            f"hooks: got a model of {type(inner).__name__}, expected tether.vime.model_provider's; pass it with "
            "--custom-model-provider-path"
        )
    return inner


def wire_of(args: Any, name: str) -> Wire:
    """The tripwire that the arguments or the defaults say; what would skip a step stops.

    Raises:
        ValueError: a text that is no action of this wire.
    """
    setting = f"trip_{name}"
    wire = Wire.parse(setting, str(getattr(args, f"tether_{setting}", getattr(LearningSettings, setting))))
    return replace(wire, action="stop") if wire.action == "skip" else wire


def _trip(wire: Wire, kind: str, text: str) -> None:
    if wire.action == "stop":
        raise StepRefused(kind, f"{text}; no step was made")
    logger.warning("%s", text)
