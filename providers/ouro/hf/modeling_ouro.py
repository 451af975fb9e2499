"""Ouro for transformers 5: the same layers run up to T times over each token, and a gate may let a token leave early.

Depth. A token that leaves after loop e keeps its state, and in every deeper loop the others see its keys and values of
loop e. How deep a token goes is said by, in this order: `trace` (loops of each given token), `num_prompt_tokens`
(tokens before it run all loops), `depth` (a policy, see `configuration_ouro.parse_depth`), config.json. `generate`
runs the prompt at full depth and generated tokens by the policy; a sequence given whole, without `num_prompt_tokens`,
runs by the policy throughout.

Cache. One layer of keys and values per (loop, layer), loop by loop: T x N planes in any of transformers' caches.

Legend: B batch, S given tokens, L cached and given tokens, H hidden width, D head width, T loops, N layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import ModelOutput, logging

from .configuration_ouro import DepthPolicy, OuroConfig, parse_depth

logger = logging.get_logger(__name__)


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """What the body returns; hidden_states holds the embeddings and the normed state after each loop that ran."""

    exit_depths: torch.LongTensor | None = None
    """[B, S] loops that each given token ran, 0 for padding."""


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """What the whole model returns; hidden_states as in `OuroModelOutput`."""

    exit_depths: torch.LongTensor | None = None
    """[B, S] loops that each given token ran, 0 for padding."""


class OuroCache(DynamicCache):
    """Grows by a token at a time, and knows how deep each cached token went: `exit_depths` [B, L], 0 for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_depths: Tensor | None = None

    def remember(self, depths: Tensor) -> None:
        """Adds the depths [B, S] of the tokens that were just cached."""
        self.exit_depths = depths if self.exit_depths is None else torch.cat([self.exit_depths, depths], 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.batch_depths(lambda depths: depths.index_select(0, beam_idx.to(depths.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.batch_depths(lambda depths: depths.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.batch_depths(lambda depths: depths[indices])

    def crop(self, max_length: int) -> None:
        super().crop(max_length)
        self.batch_depths(lambda depths: depths[:, : self.get_seq_length()])

    def batch_depths(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.exit_depths is not None:
            self.exit_depths = change(self.exit_depths)


class OuroRMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 at the least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary(position_ids: Tensor, config: OuroConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, S, D] of the positions [B, S]. Not a buffer: casting the model must not round frequencies."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=wide) / config.head_dim
    angles = position_ids.to(wide)[..., None] * (1.0 / config.rope_parameters["rope_theta"] ** exponents)
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the split halves of each head [B, heads, S, D] by their angles."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention written out, in the interface of transformers' attention functions."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = F.dropout(scores.softmax(-1, dtype=wide).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class OuroAttention(nn.Module):
    """Grouped-query attention without biases. The layer decides which keys and values it sees."""

    is_causal = True

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config, self.scaling = config, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> rotated queries and keys, and values, each [B, heads, S, D]."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for part in parts)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """The output [B, S, H] of queries [B, heads, S, D] over keys and values [B, kv heads, L, D]."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        out, _ = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2))


class OuroMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OuroDecoderLayer(GradientCheckpointingLayer):
    """One physical layer: norms before and after attention and feed-forward."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = OuroAttention(config), OuroMLP(config)
        self.input_layernorm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_2 = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        left_k: Tensor | None,
        left_v: Tensor | None,
        active: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        past_key_values: Cache | None = None,
        plane: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The state [B, S, H] after this layer, and the keys and values [B, kv heads, S, D] that this loop shows.

        Args:
            left_k, left_v: what the tokens showed in the loop before; those that have left keep showing it.
            active: [B, S] bool, tokens that have not left; None when none has.
            plane: where this loop and layer live in the cache.
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        if active is not None:
            k, v = (torch.where(active[:, None, :, None], new, old) for new, old in ((k, left_k), (v, left_v)))
        seen = (k, v) if past_key_values is None else past_key_values.update(k, v, plane)
        x = x + self.input_layernorm_2(self.self_attn(q, *seen, mask, **kwargs))
        x = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return x, k, v


class OuroPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of every Ouro class."""

    config_class = OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class Depths:
    """Which tokens run the next loop, and who leaves after it.

    Args:
        depth: [B, S] int64, loops of each token, 0 where the gate decides.
        policy: what the gate's decision means.
        real: [B, S] bool, False for padding; None when there is none.
    """

    def __init__(self, depth: Tensor, policy: DepthPolicy, real: Tensor | None) -> None:
        self.depth, self.policy = depth, policy
        self.real = torch.ones_like(depth, dtype=torch.bool) if real is None else real
        self.active = torch.ones_like(depth, dtype=torch.bool)
        self.survival = torch.ones(depth.shape, dtype=torch.float32, device=depth.device)
        self.mass = torch.zeros_like(self.survival)

    def someone(self, who: Tensor) -> bool:
        """True if a token that is not padding is among them."""
        return bool((who & self.real).any())

    @property
    def need_gate(self) -> bool:
        return not self.policy.is_fixed and self.someone(self.active & (self.depth == 0))

    def leave(self, loop: int, chance: Tensor | None) -> None:
        """Ends a loop. `chance`: [B, S] fp32 chance to leave now, given that the token has not left before."""
        if chance is not None:
            self.mass, self.survival = self.mass + self.survival * chance, self.survival * (1 - chance)
            undecided = self.depth == 0
            fired = undecided & (self.mass >= self.policy.threshold)
            decided = min(max(loop, self.policy.min_loops) + self.policy.delay, self.policy.max_loops)
            self.depth = torch.where(fired, decided, self.depth)
            if self.policy.max_loops <= loop:
                self.depth = torch.where(undecided & ~fired, loop, self.depth)
        self.active = self.active & ((self.depth == 0) | (self.depth > loop))


class OuroModel(OuroPreTrainedModel):
    """Embedding, the looped layers, the norm that ends every loop, and the gate."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        depth: str | int | None = None,
        num_prompt_tokens: int | None = None,
        trace: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> OuroModelOutput:
        """Runs each token to its own depth.

        Args:
            attention_mask: [B, L], 0 for padding on either side.
            position_ids: [B, S]; by default tokens count from 0 in each row, padding left out.
            depth: the policy of this call instead of config.json's.
            num_prompt_tokens: the first so many columns (cached ones included) are a prompt and run all loops.
            trace: [B, S] loops that each given token runs, whatever the policy.

        Raises:
            ValueError: a depth, trace or cache that does not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        real = _real_tokens(attention_mask, hidden.shape[1])
        if position_ids is None:
            position_ids = _positions(hidden, attention_mask, past)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        policy = parse_depth(self.config.default_depth if depth is None else depth, self.config.total_ut_steps)
        columns = past + torch.arange(hidden.shape[1], device=hidden.device)
        depths = Depths(self._wanted(columns, hidden, policy, num_prompt_tokens, trace), policy, real)
        cos_sin = rotary(position_ids, self.config, hidden.dtype)
        hidden, states = self._run(hidden, depths, cos_sin, mask, cache, kwargs)
        exit_depths = depths.depth * depths.real
        if isinstance(cache, OuroCache):
            cache.remember(exit_depths)
        return OuroModelOutput(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=states if self._asked(output_hidden_states, "output_hidden_states") else None,
            exit_depths=exit_depths,
        )

    def _asked(self, given: bool | None, name: str) -> bool:
        return bool(getattr(self.config, name, False) if given is None else given)

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache of this call, with a layer for every plane."""
        if cache is None and not self._asked(use_cache, "use_cache"):
            return None
        if self.gradient_checkpointing and self.training:
            logger.warning_once("Ouro: no cache under gradient checkpointing")
            return None
        if cache is None:
            return OuroCache()
        planes = self.config.total_ut_steps * self.config.num_hidden_layers
        if cache.layer_class_to_replicate is None and len(cache.layers) < planes:
            if cache.get_seq_length():
                raise ValueError(f"past_key_values: got {len(cache.layers)} layers, expected {planes} (loops x layers)")
            cache.layers.extend(copy.deepcopy(cache.layers[0]) for _ in range(planes - len(cache.layers)))
        return cache

    def _wanted(
        self, columns: Tensor, hidden: Tensor, policy: DepthPolicy, num_prompt_tokens: int | None, trace: Tensor | None
    ) -> Tensor:
        """[B, S] loops of each token, 0 where the gate decides."""
        loops = self.config.total_ut_steps
        if trace is not None:
            if trace.shape != hidden.shape[:2] or int(trace.min()) < 1 or int(trace.max()) > loops:
                raise ValueError(
                    f"trace: got shape {tuple(trace.shape)} with values {int(trace.min())}..{int(trace.max())}, "
                    f"expected {tuple(hidden.shape[:2])} with values 1..{loops}"
                )
            return trace.to(hidden.device)
        is_prompt = columns < (num_prompt_tokens or 0)
        return torch.where(is_prompt, loops, policy.max_loops if policy.is_fixed else 0).expand(hidden.shape[:2])

    def _run(
        self,
        hidden: Tensor,
        depths: Depths,
        cos_sin: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states [B, S, H] after each token's last loop, and those after every loop."""
        shown: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.layers)
        states = (hidden,)
        for loop in range(1, self.config.total_ut_steps + 1):
            active = depths.active if depths.someone(~depths.active) else None
            x = hidden
            for i, layer in enumerate(self.layers):
                plane = (loop - 1) * len(self.layers) + i
                x, *shown[i] = layer(x, *shown[i], active, *cos_sin, mask, past_key_values=cache, plane=plane, **kwargs)
            x = self.norm(x)
            hidden = x if active is None else torch.where(active[..., None], x, hidden)
            states += (hidden,)
            depths.leave(loop, self._exit_chance(hidden) if depths.need_gate else None)
            if not depths.someone(depths.active):
                break
        if cache is not None:
            for plane in range(loop * len(self.layers), self.config.total_ut_steps * len(self.layers)):
                cache.update(*shown[plane % len(self.layers)], plane)
        return hidden, states

    @torch.no_grad()
    def _exit_chance(self, hidden: Tensor) -> Tensor:
        gate = self.early_exit_gate
        return torch.sigmoid(F.linear(hidden.float(), gate.weight.float(), gate.bias.float())[..., 0])


def _real_tokens(attention_mask: Tensor | None, size: int) -> Tensor | None:
    """[B, S] bool: the given tokens that are not padding; None if nothing says so."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -size:].bool()


def _positions(hidden: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """[B or 1, S] positions of the given tokens, padding not counted."""
    if attention_mask is None or attention_mask.ndim != 2:
        return (past + torch.arange(hidden.shape[1], device=hidden.device))[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -hidden.shape[1] :].to(hidden.device)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    """The body and its untied output head."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        say = logger.info if config.default_depth == "full" else logger.warning
        say(f"Ouro: depth {config.default_depth} of {config.total_ut_steps} loops by default (config.json)")

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        depth: str | int | None = None,
        num_prompt_tokens: int | None = None,
        trace: torch.LongTensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> OuroCausalLMOutput | tuple[Any, ...]:
        """Logits after each token's last loop; with `labels` also their mean cross-entropy. See `OuroModel.forward`."""
        body = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            depth=depth,
            num_prompt_tokens=num_prompt_tokens,
            trace=trace,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(body.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.vocab_size, num_items_in_batch=num_items_in_batch
            )
        output = OuroCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=body.past_key_values,
            hidden_states=body.hidden_states,
            exit_depths=body.exit_depths,
        )
        return output if return_dict is not False else output.to_tuple()

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """transformers' `generate`, with `depth` as one more argument; the prompt runs all loops.

        With return_dict_in_generate and a cache, the result has `exit_depths`: loops of every token that was an input.

        Raises:
            ValueError: the prompts are padded on the right.
        """
        mask, given = kwargs.get("attention_mask"), inputs
        for name in ("input_ids", "inputs_embeds"):
            given = kwargs.get(name) if given is None else given
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask: the prompts are padded on the right; pad on the left to generate")
        widths = [x.shape[1] for x in (mask, given) if x is not None]
        kwargs.setdefault("num_prompt_tokens", max(widths, default=1))
        output = super().generate(inputs, **kwargs)
        if isinstance(output, ModelOutput) and isinstance(output.get("past_key_values"), OuroCache):
            output["exit_depths"] = output["past_key_values"].exit_depths
        return output

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        is_default = generation_config.cache_implementation in (None, "dynamic") and generation_config.use_cache
        if is_default and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = OuroCache()
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)


__all__ = ["OuroCache", "OuroForCausalLM", "OuroModel", "OuroPreTrainedModel"]
