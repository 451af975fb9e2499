"""The trainer: one GRPO update on Megatron-Core, scores of given tokens, and the weights in and out.

Every rank holds a Trainer and makes the same calls with the same arguments; each takes its own part of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from adapters.megatron.grpo import GrpoSettings, policy_loss
from adapters.megatron.metrics import TokenStatistics
from adapters.megatron.optimizer import OptimizerSettings, wrap
from adapters.megatron.packing import PackedBatch, TrainSample, check_samples, pack, plan_microbatches, samples_digest
from adapters.megatron.root import RootModule
from adapters.megatron.runtime import device, raise_together, require_equal

if TYPE_CHECKING:
    from adapters.hf_convert.directory import HFDirectory


class Trainer:
    """Trains a provider's model.

    Args:
        model: this rank's part, as the provider built it.
        optimizer: Adam and its schedule.
        grpo: the clip range.
        tokens_per_microbatch: most input tokens in one forward and backward.

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
    ) -> None:
        if tokens_per_microbatch < 1:
            raise ValueError(f"tokens_per_microbatch: got {tokens_per_microbatch!r}, expected an integer >= 1")
        self.model, self.grpo, self.tokens_per_microbatch = model, grpo or GrpoSettings(), tokens_per_microbatch
        wrapped = wrap(model, optimizer)
        self.ddp, self.optimizer, self.scheduler = wrapped.ddp, wrapped.optimizer, wrapped.scheduler
        self.num_updates = 0

    def train(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One update on all samples, whatever the number of ranks and micro-batches they are cut into.

        The loss is summed over response tokens and divided by their global number.

        Args:
            samples: the full list, the same on every rank.

        Returns:
            The same metrics on every rank: loss, grad_norm (before clipping), learning_rate, logprob_diff_mean and _max
            (trainer against rollout), ratio_mean, clip_fraction, num_tokens (response), num_input_tokens, and for a
            traced model the differences by class (`num_tokens_depth_3`, ...).

        Raises:
            ValueError: a sample cannot be trained on; nothing was changed.
            RuntimeError: the ranks disagree, or loss or gradients are not finite; nothing was changed.
        """
        batches = [pack(batch).to(device()) for batch in self._own_part(samples, for_training=True)]
        batches = self.model.begin_update(samples, batches, self._run_without_gradients)
        statistics = TokenStatistics(device=device(), num_classes=self.model.num_classes)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._forward_backward(batches, statistics)
        self._refuse_non_finite_gradients()
        learning_rate = max(group["lr"] for group in self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        self.num_updates += 1
        return {
            **statistics.reduced(self.model.trace_breakdown or "class"),
            **self.model.end_update(),
            "grad_norm": float(grad_norm),
            "learning_rate": learning_rate,
            "num_input_tokens": sum(sample.num_inputs for sample in samples),
        }

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
        """Every stored tensor, whole, by Hugging Face name, in checkpoint order: a CPU copy in the training dtype.

        Every rank must iterate to the end: the gathers are collective.
        """
        return self.model.whole_tensors()

    def load_hf(self, directory: HFDirectory) -> None:
        """Sets the parameters from a Hugging Face directory, each rank reading only its slices.

        Raises:
            ValueError: names or shapes differ from the model's, or a value is not finite; names every offender.
        """
        directory.check({name: tensor.shape for name, tensor in self.model.physical.items()})
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        broken = []
        for name, own in self.model.local_parts():
            dim = self.model.physical[name].partition_dim
            part = directory.read(name) if dim is None else directory.read_shard(name, dim=dim, rank=rank, size=size)
            own.copy_(part)
            if not torch.isfinite(own).all():
                broken.append(name)
        error = ValueError(f"{directory.path}: {len(broken)} tensor(s) hold values that are not finite: {broken[:10]}")
        raise_together(error if broken else None)
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

    def _logprobs(self, model: Callable[..., Tensor], batch: PackedBatch) -> Tensor:
        # By keyword: Float16Module rounds positional fp32 inputs, the temperatures, to bf16.
        return model(
            batch.tokens,
            batch.cu_seqlens,
            trace=batch.trace,
            rows=batch.rows,
            targets=batch.targets,
            temperature=batch.temperatures,
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
            raise_together(statistics.problem())
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

    def _forward_step(self, statistics: TokenStatistics, batches: Iterator[PackedBatch], model: Any) -> Any:
        batch = next(batches)
        return self._logprobs(model, batch), partial(self._loss, statistics, batch)

    def _loss(self, statistics: TokenStatistics, batch: PackedBatch, logprobs: Tensor) -> Any:
        """(sum, tokens, nothing to collect): Megatron divides by the global token count (calculate_per_token_loss)."""
        loss = policy_loss(logprobs, batch.rollout_logprobs, batch.advantages, self.grpo)
        classes = None
        if batch.trace is not None and self.model.trace_breakdown:
            classes = self.model.classify(batch.trace[batch.rows.cpu()]).to(logprobs.device)
        statistics.add(loss, classes)
        side = self.model.side_loss()
        total = loss.sum if side is None else loss.sum + side
        return total, torch.tensor(len(logprobs), dtype=torch.int, device=logprobs.device), {}

    def _refuse_non_finite_gradients(self) -> None:
        """Raises on every rank, naming parameters, before anything is stepped."""
        buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        error = None
        if not all(torch.isfinite(torch.stack(torch.aminmax(buffer.grad_data))).all() for buffer in buffers):
            trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            broken = [name for name, parameter in trained if not torch.isfinite(parameter.main_grad).all()]
            error = RuntimeError(
                f"{len(broken)} gradient(s) are not finite: {broken[:10]}; nothing was changed. Look at the rollouts "
                "of this update"
            )
        raise_together(error)
