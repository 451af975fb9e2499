"""The trainer: one GRPO update on Megatron-Core, scores of given tokens, and the weights in and out.

Every rank holds a Trainer and makes the same calls with the same arguments; each takes its own part of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from adapters.megatron.grpo import GrpoSettings, policy_loss
from adapters.megatron.losses import global_count
from adapters.megatron.metrics import TokenStatistics, means
from adapters.megatron.optimizer import DataParallelSettings, OptimizerSettings, wrap
from adapters.megatron.packing import (
    PackedBatch,
    TrainSample,
    check_samples,
    pack,
    plan_microbatches,
    samples_digest,
    step_parts,
)
from adapters.megatron.refusals import (
    StepLimits,
    check_global_count,
    counted,
    refuse_grad_norm,
    refuse_non_finite_gradients,
    refuse_score_difference,
)
from adapters.megatron.root import RootModule
from adapters.megatron.runtime import StepRefused, device, raise_together, require_equal

if TYPE_CHECKING:
    from adapters.hf_convert.directory import HFDirectory


class Trainer:
    """Trains a provider's model.

    Args:
        model: this rank's part, as the provider built it.
        optimizer: Adam and its schedule.
        grpo: the loss, and how many steps an update makes.
        tokens_per_microbatch: most input tokens in one forward and backward.
        parallel: how data-parallel ranks share the optimizer's work.

    Attributes:
        num_updates: updates made so far; a checkpoint restores it.
    """

    def __init__(
        self,
        model: RootModule,
        *,
        optimizer: OptimizerSettings,
        grpo: GrpoSettings | None = None,
        tokens_per_microbatch: int,
        parallel: DataParallelSettings | None = None,
    ) -> None:
        if tokens_per_microbatch < 1:
            raise ValueError(f"tokens_per_microbatch: got {tokens_per_microbatch!r}, expected an integer >= 1")
        self.model, self.grpo, self.tokens_per_microbatch = model, grpo or GrpoSettings(), tokens_per_microbatch
        self.parallel = parallel or DataParallelSettings()
        wrapped = wrap(model, optimizer, self.parallel)
        self.ddp, self.optimizer, self.scheduler = wrapped.ddp, wrapped.optimizer, wrapped.scheduler
        self.num_updates = 0
        self._is_gathered = True

    def train(self, samples: Sequence[TrainSample], *, limits: StepLimits | None = None) -> dict[str, Any]:
        """One update on all samples, whatever the number of ranks and micro-batches they are cut into.

        One optimizer step for each mini-batch of each epoch. The learning rate changes between updates only.

        Args:
            samples: the full list, the same on every rank.
            limits: what a step may not exceed, the same on every rank.

        Returns:
            The same metrics on every rank: loss, grad_norm (the largest before clipping), learning_rate,
            logprob_diff_mean and _max (trainer against rollout), what `GrpoSettings.reported` names as means over
            trained tokens, num_tokens (trained), num_input_tokens, num_steps, skipped_steps, and for a traced model the
            differences by class (`num_tokens_depth_3`, ...). None where no step was made.

        Raises:
            ValueError: a sample cannot be trained on; nothing was changed.
            StepRefused: loss or gradients are not finite, or a limit was exceeded; without mini-batches nothing was
                changed.
            RuntimeError: the ranks disagree; nothing was changed.
        """
        limits, parts = limits or StepLimits(), self._parts(samples)
        statistics, norms, refused, routing = self._statistics(), list[float](), list[StepRefused](), []
        learning_rate = max(group["lr"] for group in self.optimizer.param_groups)
        for part in parts:
            try:
                step, norm = self._step(part, limits)
            except StepRefused as error:
                error.steps_made = len(norms)
                if error.kind not in limits.skip:
                    raise
                refused.append(error)
                continue
            statistics.merge(step)
            norms.append(norm)
            routing.append(self.model.end_update())
        self.scheduler.step(1)
        self.num_updates += 1
        return {
            **statistics.reduced(self.model.trace_breakdown or "class"),
            **means(routing),
            "grad_norm": max(norms, default=None),
            "learning_rate": learning_rate,
            "num_input_tokens": sum(sample.num_inputs for sample in samples),
            "num_steps": len(norms),
            **counted(refused),
        }

    def _parts(self, samples: Sequence[TrainSample]) -> list[Sequence[TrainSample]]:
        """The samples of each optimizer step, with old log-probs where the first step cannot find them itself."""
        grpo = self.grpo
        if grpo.kl_coefficient and not all(sample.reference_logprobs for sample in samples):
            raise ValueError("samples have no reference_logprobs, but kl_coefficient is not 0")
        if grpo.old_policy == "trainer" and grpo.mini_batches * grpo.epochs > 1:
            scores = self.score(samples)
            samples = [replace(s, old_logprobs=values) for s, values in zip(samples, scores, strict=True)]
        return step_parts(samples, mini_batches=grpo.mini_batches, epochs=grpo.epochs)

    def _step(self, samples: Sequence[TrainSample], limits: StepLimits) -> tuple[TokenStatistics, float]:
        """One optimizer step: what it says of its tokens, and the norm of its gradients."""
        batches = [pack(batch).to(device()) for batch in self._own_part(samples, for_training=True)]
        self._expected_count = global_count([sample.mask for sample in samples], self.grpo.normalisation)
        batches = self.model.begin_update(
            samples, batches, self._run_without_gradients, global_count=self._expected_count
        )
        statistics = self._statistics()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._forward_backward(batches, statistics)
        refuse_score_difference(statistics, limits)
        refuse_non_finite_gradients(self.model, self.ddp)
        refuse_grad_norm(self.optimizer, limits)
        _, grad_norm, _ = self.optimizer.step()
        self._is_gathered = not self.parallel.overlap_param_gather
        return statistics, float(grad_norm)

    def _statistics(self) -> TokenStatistics:
        return TokenStatistics(names=self.grpo.reported, device=device(), num_classes=self.model.num_classes)

    def score(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Trainer log-probs of every response token, by sample, on every rank: those that `train` would start from.

        Raises:
            ValueError: a sample cannot be packed.
        """
        values = torch.zeros(sum(sample.num_scored for sample in samples), dtype=torch.float64, device=device())
        starts = torch.tensor([0, *(sample.num_scored for sample in samples)]).cumsum(0).tolist()
        error: Exception | None = None
        own_indices = self._plan(samples, for_training=False)
        try:
            with torch.no_grad():
                for indices in own_indices:  # the empty ones too: experts of a micro-batch may live on other ranks
                    scores = self._logprobs(self.ddp, pack([samples[i] for i in indices]).to(device()))
                    for i, part in zip(indices, scores.split([samples[i].num_scored for i in indices]), strict=True):
                        values[starts[i] : starts[i + 1]] = part.double()
        except Exception as caught:
            error = caught
        raise_together(error)
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group())  # the others' parts are zero
        return [values[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]

    def physical_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor, whole, by Hugging Face name, in checkpoint order, in the training dtype.

        It lies on this rank's device, and may be the parameter itself: copy what is to outlast the next step. Every
        rank must iterate to the end: the gathers are collective.
        """
        self.gather_parameters()
        yield from self.model.whole_tensors()

    def gather_parameters(self) -> None:
        """Makes every rank's parameters those of the last step, before they are read outside of a forward pass.

        Collective. Only an overlapped gather leaves something to do.
        """
        if not self._is_gathered:
            self.ddp.start_param_sync(force_sync=True)
            self._is_gathered = True

    def load_hf(self, directory: HFDirectory) -> None:
        """Sets the parameters from a Hugging Face directory, each rank reading only its slices.

        Raises:
            ValueError: names or shapes differ from the model's, or a value is not finite; names every offender.
        """
        self.gather_parameters()
        for _, own, stored in self.model.stored_parts(directory):
            own.copy_(stored)
        self.optimizer.reload_model_params()

    def _own_part(self, samples: Sequence[TrainSample], *, for_training: bool) -> list[list[TrainSample]]:
        return [[samples[i] for i in indices] for indices in self._plan(samples, for_training=for_training)]

    def _plan(self, samples: Sequence[TrainSample], *, for_training: bool) -> list[list[int]]:
        """This rank's micro-batches as sample indices, once all ranks agree that the samples are good and the same."""
        error: Exception | None = None
        plan: list[list[list[int]]] = []
        try:
            check_samples(
                samples,
                vocab_size=self.model.vocab_size,
                check_trace=self.model.check_trace,
                for_training=for_training,
            )
            plan = plan_microbatches(
                [sample.num_inputs for sample in samples],
                max_tokens=self.tokens_per_microbatch,
                num_ranks=parallel_state.get_data_parallel_world_size(),
            )
        except (TypeError, ValueError) as caught:
            error = caught
        raise_together(error)
        require_equal("the samples of this update", samples_digest(samples))
        return plan[parallel_state.get_data_parallel_rank()]

    def _logprobs(self, model: Callable[..., Tensor], batch: PackedBatch, *, with_entropy: bool = False) -> Tensor:
        # By keyword: Float16Module rounds positional fp32 inputs, the temperatures, to bf16.
        return model(
            batch.tokens,
            batch.cu_seqlens,
            trace=batch.trace,
            rows=batch.rows,
            targets=batch.targets,
            temperature=batch.temperatures,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _run_without_gradients(self, batch: PackedBatch) -> Tensor:
        return self._logprobs(self.ddp, batch)

    def _forward_backward(self, batches: list[PackedBatch], statistics: TokenStatistics) -> None:
        """Gradients of the update, reduced over ranks and divided by the global token count."""
        agreed = False

        def finalize(model: Any, num_tokens: Any = None, **groups: Any) -> None:
            nonlocal agreed
            agreed = True
            self._agree_on_loss(statistics)
            check_global_count(num_tokens, self._expected_count)
            finalize_model_grads(model, num_tokens, **groups)

        self.model.config.finalize_model_grads_func = finalize
        try:
            get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, statistics),
                data_iterator=iter(batches),
                model=[self.ddp],
                num_microbatches=len(batches),
                seq_length=1,  # of pipeline messages; there is one stage
                micro_batch_size=1,
                forward_only=False,
            )
        except Exception as error:
            if not agreed:
                raise_together(error)
            raise

    def _agree_on_loss(self, statistics: TokenStatistics) -> None:
        try:
            raise_together(statistics.problem())
        except StepRefused as error:
            if self.parallel.overlap_grad_reduce:
                raise RuntimeError(
                    f"{error}. Gradients are being reduced already: such a step cannot be skipped"
                ) from error
            raise

    def _forward_step(self, statistics: TokenStatistics, batches: Iterator[PackedBatch], model: Any) -> Any:
        batch = next(batches)
        scores = self._logprobs(model, batch, with_entropy=self.grpo.entropy_coefficient > 0)
        return scores, partial(self._loss, statistics, batch)

    def _loss(self, statistics: TokenStatistics, batch: PackedBatch, scores: Tensor) -> Any:
        """(sum, count, nothing to collect): Megatron divides by the global count (calculate_per_token_loss)."""
        loss = policy_loss(scores, batch, self.grpo)
        classes = None
        if batch.trace is not None and self.model.trace_breakdown:
            classes = self.model.classify(batch.trace[batch.rows.cpu()]).to(scores.device)
        statistics.add(loss, classes)
        side = self.model.side_loss()
        total = loss.sum if side is None else loss.sum + side
        return total, loss.count, {}
