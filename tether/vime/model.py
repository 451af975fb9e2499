"""The model as the framework's training side wants it: built from its arguments, called with its keywords.

Legend: T tokens of a packed micro-batch with its padding, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch import Tensor

from adapters.megatron.root import RootModule
from providers.registry import provider
from tether.vime.arguments import ModelFacts, check_arguments, facts_of, recompute
from tether.vime.replay import Replay, replay_of

FROM_ARGUMENTS = ("calculate_per_token_loss", "deterministic_mode", "variable_seq_lengths", "barrier_with_L1_time")
"""Fields of the TransformerConfig that say how the framework trains, not what the model computes."""


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> FrameworkModel:
    """For --custom-model-provider-path: this rank's part of the model that --hf-checkpoint names. Weights are NaN.

    Raises:
        ValueError: the arguments disagree with the checkpoint, or ask for what it cannot do; all of it in one message.
    """
    from megatron.training import get_args

    args = get_args()
    facts = facts_of(args)
    check_arguments(args, facts)
    if not (pre_process and post_process) or vp_stage is not None:
        raise ValueError(
            f"model_provider: got a pipeline stage (pre_process={pre_process!r}, post_process={post_process!r}, "
            f"vp_stage={vp_stage!r}), expected --pipeline-model-parallel-size 1"
        )
    return build(args, facts)


def build(args: Any, facts: ModelFacts) -> FrameworkModel:
    """The model of checked arguments."""
    model = provider(facts.model_type, "model").build(
        facts.config,
        dtype=args.params_dtype,
        recompute=recompute(args),
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)),
    )
    for name in FROM_ARGUMENTS:
        if hasattr(args, name):
            setattr(model.config, name, getattr(args, name))
    return FrameworkModel(model, replay_of(args, facts))


class FrameworkModel(RootModule):
    """A provider's model behind the framework's call. It has the model's parts under their own names, and no others."""

    def __init__(self, model: RootModule, replay: Replay) -> None:
        super().__init__(model.config)
        for name, part in model.named_children():
            self.add_module(name, part)
        self._inner = (model,)  # in a tuple: registered, every name would get another prefix
        self.replay, self.vocab_size = replay, model.vocab_size
        for parameter in self.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "output_layer":  # a critic's; it has no use for the output head, which would never get a gradient
            self._modules.pop("lm_head", None)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        loss_mask: Tensor | None = None,
        **side: Tensor,
    ) -> Tensor:
        """
        Args:
            input_ids: [1, T] int64, the packed sequences, the framework's padding as one more at the end.
            position_ids, attention_mask, labels: None. Positions begin anew in each sequence.
            packed_seq_params: boundaries in `cu_seqlens_q`, [S + 1] int.
            loss_mask: [1, T], zero where nothing is trained.
            side: what the rollout recorded; see `replay`.

        Returns:
            Logits [1, T, V / tp], or a critic's values [1, T, 1].

        Raises:
            ValueError: an argument that is not None, boundaries that do not fit, or a record that does not.
        """
        self._refuse(position_ids=position_ids, attention_mask=attention_mask, labels=labels)
        if packed_seq_params is None or input_ids.dim() != 2 or len(input_ids) != 1:
            raise ValueError(
                f"forward: got input_ids of shape {tuple(input_ids.shape)}, expected [1, T] and boundaries"
            )
        boundaries = packed_seq_params.cu_seqlens_q.to("cpu", torch.int64)
        tokens = input_ids[0]
        if int(boundaries[-1]) != len(tokens):
            raise ValueError(
                f"cu_seqlens_q: ends at {int(boundaries[-1])}, expected {len(tokens)}, the tokens there are"
            )
        trace = self.replay.rows(side, tokens=tokens, boundaries=boundaries, loss_mask=loss_mask)
        (model,) = self._inner
        head = self._modules.get("output_layer")
        if head is None:
            return model(tokens, boundaries, trace)[None]
        return self._values(head, model.states(tokens, boundaries, trace))[None]

    def _values(self, head: torch.nn.Module, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, 1]; under sequence parallelism the framework's head gathers what each rank has of the rows."""
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        return head(hidden)[0]

    def _refuse(self, **given: Any) -> None:
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"forward: got {', '.join(wrong)}, expected None: sequences are packed and never masked")
