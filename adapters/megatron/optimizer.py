"""Megatron's DDP, distributed optimizer and schedule around a model, and an Adam where neither TE nor apex is there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.optim.adam import adam

from adapters.megatron.parameter_groups import LrSchedule, ParameterGroup, schedule_problems
from adapters.megatron.root import RootModule
from adapters.megatron.schedule import Schedule, freeze, group_overrides, require_matches


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Adam and its schedule. Nothing depends on the number of updates a run will make."""

    learning_rate: float
    """Peak learning rate."""
    min_learning_rate: float = 0.0
    """Where a decay ends."""
    lr_warmup_updates: int = 0
    """Updates of linear warm-up; the first one already runs at 1 / lr_warmup_updates of the peak."""
    lr_decay_updates: int = 0
    """Update at which a decay reaches min_learning_rate; 0 keeps the peak."""
    lr_schedule: LrSchedule = "cosine"
    """Shape of the decay; wsd stays at the peak until its last lr_wsd_updates, then falls linearly."""
    lr_wsd_updates: int = 0
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with their own learning rate or weight decay."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    weight_decay: float = 0.0
    """Decoupled; not applied to vectors (norms)."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        rules = {
            "learning_rate": (0 < self.learning_rate < math.inf, "> 0"),
            "min_learning_rate": (0 <= self.min_learning_rate <= self.learning_rate, "in [0, learning_rate]"),
            "lr_warmup_updates": (self.lr_warmup_updates >= 0, ">= 0"),
            "weight_decay": (0 <= self.weight_decay < math.inf, ">= 0"),
            "beta1": (0 <= self.beta1 < 1, "in [0, 1)"),
            "beta2": (0 <= self.beta2 < 1, "in [0, 1)"),
            "eps": (0 < self.eps < math.inf, "> 0"),
            "max_grad_norm": (0 <= self.max_grad_norm < math.inf, ">= 0"),
        }
        bad = [f"{n}: got {getattr(self, n)!r}, expected {want}" for n, (ok, want) in rules.items() if not ok]
        bad += schedule_problems(
            schedule=self.lr_schedule,
            warmup=self.lr_warmup_updates,
            decay=self.lr_decay_updates,
            wsd=self.lr_wsd_updates,
        )
        if bad:
            raise ValueError("OptimizerSettings " + "; ".join(bad))


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """How data-parallel ranks share the optimizer's work, and what they do while they compute."""

    distributed_optimizer: bool = True
    """Each data-parallel rank keeps and steps a part of masters and moments; False keeps all of them on every rank."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket during the last micro-batch's backward. An update that fails then ends the
    trainer: reductions of the ranks that went on are still under way."""
    overlap_param_gather: bool = False
    """Gather stepped parameters when they are next needed; needs both of the others."""
    bucket_elements: int | None = None
    """Gradients in one bucket when reductions overlap; None is Megatron's own size."""

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not (self.overlap_grad_reduce and self.distributed_optimizer):
            raise ValueError(
                "DataParallelSettings overlap_param_gather: got True, expected it only with overlap_grad_reduce and "
                "distributed_optimizer: there are no parts to gather otherwise, and Megatron couples the two"
            )
        if self.bucket_elements is not None and self.bucket_elements < 1:
            raise ValueError(f"DataParallelSettings bucket_elements: got {self.bucket_elements!r}, expected >= 1")


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A model ready to train. Its parameters keep their names on `model`; the wrappers' prefixes never leave here."""

    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: Schedule


def wrap(model: RootModule, settings: OptimizerSettings, parallel: DataParallelSettings) -> Wrapped:
    """DDP (around Float16Module for bf16), the optimizer with its state allocated, and the scheduler.

    Gradients are reduced in fp32; the optimizer keeps fp32 masters. After the parameters are set from outside, call
    `optimizer.reload_model_params()`, or the next step overwrites them with the old masters.
    """
    use_adam_with_megatron_layout()
    freeze(model, settings.frozen)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    require_matches(names, [group.pattern for group in settings.groups], what="param_groups")
    config = model.config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=parallel.distributed_optimizer,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            bucket_size=parallel.bucket_elements,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
        ),
        Float16Module(config, model) if config.bf16 else model,
    )
    # While micro-batches but the last one run, nothing is reduced.
    config.no_sync_func = ddp.no_sync if parallel.overlap_grad_reduce else None
    optimizer_config = _optimizer_config(config, settings, parallel)
    overrides = group_overrides(optimizer_config, settings.groups)
    optimizer = get_megatron_optimizer(optimizer_config, [ddp], overrides)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # Moments exist from the start, so a checkpoint before the first update has the same tensors as a later one.
        part.init_state_fn(part.optimizer, part.config)
    return Wrapped(ddp=ddp, optimizer=optimizer, scheduler=_scheduler(optimizer, settings))


class Adam(torch.optim.Optimizer):
    """torch's own Adam over the state layout of apex and TE: `step` in the group, exp_avg and exp_avg_sq per parameter.

    On CUDA it is torch's fused kernel: parameters, gradients and moments are read once, the moments written once.
    Megatron's distributed optimizer cannot load a checkpoint of torch.optim.AdamW, which keeps a step per parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_unused: Any,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = [self._moments(p) for p in params]
        # One count for each parameter: adam counts every one of them up.
        steps = torch.full((len(params),), float(group["step"] - 1), device=params[0].device)
        adam(
            params,
            [p.grad for p in params if p.grad is not None],
            [m["exp_avg"] for m in moments],
            [m["exp_avg_sq"] for m in moments],
            [],
            list(steps.unbind()),
            fused=params[0].is_cuda,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _moments(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state


def use_adam_with_megatron_layout() -> None:
    """Gives Megatron-Core our Adam when neither Transformer Engine nor apex is installed. Idempotent.

    Reason: distrib_optimizer.py (0.16.1: state_dict, load_state_dict) treats torch's Adam in a branch that saves and
    cannot load. With our state layout the branch for apex is the right one. The flags it replaces are checked.
    """
    import megatron.core.optimizer as factory
    import megatron.core.optimizer.distrib_optimizer as distributed

    names = {
        factory: ("Adam", "USING_PYTORCH_OPTIMIZER"),
        distributed: ("Adam", "HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"),
    }
    if missing := [f"{m.__name__}.{n}" for m, each in names.items() for n in each if not hasattr(m, n)]:
        raise ImportError(f"Megatron-Core moved {', '.join(missing)}: use_adam_with_megatron_layout has to follow")
    if factory.USING_PYTORCH_OPTIMIZER:
        factory.Adam, distributed.Adam, factory.USING_PYTORCH_OPTIMIZER = Adam, Adam, False
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def _optimizer_config(config: Any, settings: OptimizerSettings, parallel: DataParallelSettings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def _scheduler(optimizer: MegatronOptimizer, settings: OptimizerSettings) -> Schedule:
    warmup = settings.lr_warmup_updates
    style = settings.lr_schedule if settings.lr_decay_updates else "constant"
    return Schedule(
        optimizer,
        # Megatron counts the first update as step 0 of the ramp: from 0 it would be wasted.
        init_lr=settings.learning_rate / max(warmup, 1),
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=warmup,
        lr_decay_steps=settings.lr_decay_updates or warmup + 1,
        lr_decay_style="WSD" if style == "wsd" else style,
        wsd_decay_steps=settings.lr_wsd_updates,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
