"""The root of a provider's training model: what Megatron's schedule, DDP and checkpoints and our Trainer ask of it.

Every parameter is one physical tensor by its own name, or a stack of several (`stacked.py`). The root knows which, so
that loading, checking and gathering go by the physical table whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from adapters.megatron.logprobs import selected_logprobs
from adapters.megatron.runtime import device, raise_together
from adapters.megatron.stacked import Cut, Stack, gather_whole
from adapters.physical import PhysicalTensor

if TYPE_CHECKING:
    from adapters.hf_convert.directory import HFDirectory
    from adapters.megatron.packing import PackedBatch, TrainSample


@dataclass(frozen=True)
class StackedParameter:
    """A parameter that holds several physical tensors."""

    prefix: str
    """What their names begin with."""
    parameter: Tensor
    stack: Stack


class RootModule(MegatronModule):
    """A provider calls `finish` at the end of its constructor and implements `forward(tokens, cu_seqlens, trace=None,
    rows=None, targets=None, temperature=1.0, with_entropy=False)`.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False
    trace_breakdown: ClassVar[str | None] = None
    """If set, what `classify` sorts scored tokens by ("depth"); the trainer then reports score differences by it."""
    num_classes: int = 0
    """How many classes there are."""

    physical: Mapping[str, PhysicalTensor]
    vocab_size: int

    def finish(self, table: Mapping[str, PhysicalTensor], *, vocab_size: int) -> None:
        """Checks the parameters against the table, freezes what it says, and fills them with NaN until they are loaded.

        Raises:
            RuntimeError: a name or a shape differs; this is a fault of the provider.
        """
        self.physical, self.vocab_size = dict(table), vocab_size
        if not any(parameter.is_meta for parameter in self.parameters()):  # shapes alone, to look at a model too large
            self.to(device())
        self._find_stacks()
        have = {name: tuple(part.shape) for name, part in self.local_parts()}
        elsewhere = self._owner.keys() - have.keys()  # other expert-parallel ranks hold them
        want = {name: self._cut(name).shape(tensor.shape) for name, tensor in table.items() if name not in elsewhere}
        if wrong := sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n)):
            lines = [f"{n}: parameter {have.get(n)}, table {want.get(n)}" for n in wrong[:10]]
            raise RuntimeError(f"{len(wrong)} parameter(s) differ from the physical table: " + "; ".join(lines))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in table or not table[name].frozen)
            parameter.data.fill_(float("nan"))

    def local_parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each physical tensor it holds, as a view: writing into it sets the weight."""
        stacked = {id(each.parameter) for each in self._stacks}
        for name, parameter in self.named_parameters():
            if id(parameter) not in stacked:
                yield name, parameter.detach()
        for each in self._stacks:
            yield from each.stack.views(each.prefix, each.parameter.detach()).items()

    def stored_parts(self, directory: HFDirectory) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, this rank's part as a view, the same part as a Hugging Face directory has it) of each tensor.

        Every rank must iterate to the end.

        Raises:
            ValueError: names or shapes differ from the model's, or a value is not finite; names every offender.
        """
        directory.check({name: tensor.shape for name, tensor in self.physical.items()})
        broken = []
        for name, own in self.local_parts():
            cut = self._cut(name)
            shard = {"dim": cut.dim, "rank": cut.rank, "size": cut.size}
            part = directory.read(name) if cut.dim is None else directory.read_shard(name, **shard)
            if not torch.isfinite(part).all():
                broken.append(name)
            yield name, own, part
        error = ValueError(f"{directory.path}: {len(broken)} tensor(s) hold values that are not finite: {broken[:10]}")
        raise_together(error if broken else None)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on this rank's device) of every physical tensor, in the table's order.

        A tensor that lies whole on this rank is a view of it: copy what is to outlast the next step. Every rank must
        iterate to the end: the gathers are collective. A layer's experts are gathered as one stack.
        """
        parameters = dict(self.named_parameters())
        group = parallel_state.get_tensor_model_parallel_group()
        gathered: dict[str, Tensor] = {}
        for name, tensor in self.physical.items():
            if name in self._owner:
                if name not in gathered:
                    each = self._owner[name]
                    gathered |= each.stack.gather(each.prefix, each.parameter.detach())
                yield name, gathered.pop(name)
            else:
                yield name, gather_whole(parameters[name].detach(), tensor.partition_dim, group)

    def read_out(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        *,
        rows: Tensor | None,
        targets: Tensor | None,
        temperature: Tensor | float,
        chunk_rows: int,
        with_entropy: bool = False,
    ) -> Tensor:
        """The logits [R, V / tp] of the wanted rows of [T, H], or with targets what `selected_logprobs` says."""
        hidden = copy_to_tensor_model_parallel_region(hidden if rows is None else hidden[rows])
        if targets is None:
            return head(hidden)
        return selected_logprobs(
            hidden, head, targets, temperature=temperature, chunk_rows=chunk_rows, with_entropy=with_entropy
        )

    def states(self, tokens: Tensor, cu_seqlens: Tensor, trace: Tensor | None = None) -> Tensor:
        """[T, H] the hidden states that the head reads, whole on every tensor-parallel rank."""
        raise NotImplementedError

    def check_trace(self, trace: Tensor, num_prompt_tokens: int) -> None:
        """Raises ValueError, with the position, if a sample's trace cannot be replayed."""

    def classify(self, trace: Tensor) -> Tensor:
        """Rows of a trace -> the class of each, in 0 .. num_classes - 1."""
        raise NotImplementedError

    def begin_update(
        self,
        samples: Sequence[TrainSample],
        batches: list[PackedBatch],
        run: Callable[[PackedBatch], Any],
        *,
        global_count: int,
    ) -> list[PackedBatch]:
        """Sees a step's samples (all of them) and this rank's micro-batches before the first one; may change these.

        `run` computes a micro-batch without gradients; `global_count` is what the summed loss will be divided by.
        Every rank calls this together.
        """
        return batches

    def side_loss(self) -> Tensor | None:
        """Added to the summed loss of the micro-batch that `forward` has just computed."""
        return None

    def end_update(self) -> dict[str, float]:
        """Metrics of the update, equal on every rank. Collective."""
        return {}

    def set_input_tensor(self, _tensor: Any) -> None:
        """Part of Megatron's pipeline protocol; there is one stage."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return super().sharded_state_dict(prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata))

    def _find_stacks(self) -> None:
        """Modules that stack experts say so in an attribute `stacks`: Stack by parameter name."""
        self._stacks = [
            StackedParameter(f"{owner}.", getattr(module, leaf), stack)
            for owner, module in self.named_modules()
            for leaf, stack in getattr(module, "stacks", {}).items()
        ]
        size = parallel_state.get_expert_model_parallel_world_size()
        self._owner = {
            name: each for each in self._stacks for name in each.stack.names(each.prefix, 0, each.stack.count * size)
        }

    def _cut(self, name: str) -> Cut:
        """This rank's part of a physical tensor."""
        if name in self._owner:
            return self._owner[name].stack.cut
        rank = parallel_state.get_tensor_model_parallel_rank()
        return Cut(self.physical[name].partition_dim, rank, parallel_state.get_tensor_model_parallel_world_size())
