"""The worker's side: gives the model its step, keeps traces and scores, and changes weights as a transaction.

Loaded by vLLM as `worker_extension_cls`; its methods are called through `collective_rpc` on every worker.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import get_forward_context

from adapters.vllm_engine.memory.staging import Staging
from adapters.vllm_engine.worker import patches
from adapters.vllm_engine.worker.model_interface import Policy, TracedModel, TraceLayout
from adapters.vllm_engine.worker.records import CacheRows, Record, Records, ScoreOrder
from adapters.vllm_engine.worker.step import Step
from adapters.vllm_engine.worker.weights import LiveWeights

SCORE_ROWS = 1024  # rows of logits alive at once while scoring


class TetherWorker:
    """Mixed into vLLM's worker. Every public name starts with `tether_`, so that it cannot meet one of vLLM's."""

    model_runner: Any

    def tether_install(self, default_policy: str | None, staging: Staging) -> TraceLayout:
        """Hooks the model runner. Called once, before the first request. Returns what the model's trace holds."""
        runner, model = self.model_runner, self.model_runner.get_model()
        if not isinstance(model, TracedModel):
            raise RuntimeError(f"{type(model).__name__} is not Tether's model for vLLM: the plugin did not register it")
        self._tether_default = model.parse_policy(default_policy)
        self._tether_policies: dict[str, Policy] = {}
        layout = model.trace_layout
        shape, unknown = layout.row_shape, layout.unknown
        self.tether_records = Records(policy_width=model.policy_width, row_shape=shape, unknown=unknown)
        self._tether_cache_rows: CacheRows | None = None
        if layout.prompt_value is None:  # what a prompt runs is only seen by running it
            cache = runner.kv_cache_config
            num_slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
            self._tether_cache_rows = CacheRows(num_slots=num_slots, row_shape=shape, unknown=unknown)
        config = self.vllm_config  # type: ignore[attr-defined]
        self.tether_weights = LiveWeights(runner=runner, vllm_config=config, staging=staging)
        self._hook_forward(runner, model)
        self._hook_removed(runner)
        patches.rewind_discarded_draws(runner)
        return layout

    def tether_check_policy(self, text: str) -> str | None:
        """None if the text is a policy of this model, else what is wrong with it."""
        try:
            self._policy(text)
        except ValueError as error:
            return str(error)
        return None

    def tether_take(self, request_ids: Sequence[str]) -> list[Record | None]:
        """The records of finished requests, each once."""
        return [self.tether_records.take(r) for r in request_ids]

    def tether_counters(self) -> dict[str, int]:
        """Layer executions, tokens in them, and records held, since the start."""
        model = self.model_runner.get_model()
        return {
            "layer_calls": model.layer_calls,
            "layer_tokens": model.layer_tokens,
            "records": len(self.tether_records),
        }

    def tether_release(self, prefill_ids: Sequence[str]) -> None:
        """Lets go of prompts that were computed for others."""
        get_kv_transfer_group().connector_worker.release(prefill_ids)

    def tether_forget_peer(self, engine_id: str) -> None:
        """Drops what the connector knows of an engine that has ended."""
        get_kv_transfer_group().connector_worker.forget(engine_id)

    def tether_weights_call(self, method: str, *args: Any) -> Any:
        """Calls a step of the weight transaction on this worker."""
        return getattr(self.tether_weights, method)(*args)

    def _policy(self, text: str | None) -> Policy:
        if text is None:
            return self._tether_default
        if text not in self._tether_policies:
            self._tether_policies[text] = self.model_runner.get_model().parse_policy(text)
        return self._tether_policies[text]

    def _hook_forward(self, runner: Any, model: TracedModel) -> None:
        original = runner._model_forward
        patches.expect_parameters(original, ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"])

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not get_forward_context().attn_metadata:  # a dummy run has no requests
                return original(*args, **kwargs)
            handed_over = self._open_records(runner, model)
            model.step = step = Step(runner, self.tether_records, self._tether_cache_rows)
            step.place_handed_over(handed_over)
            try:
                hidden = original(*args, **kwargs)
            finally:
                model.step = None
            self._score(step, hidden, model)
            return hidden

        runner._model_forward = forward

    def _open_records(self, runner: Any, model: TracedModel) -> list[int]:
        """-> the indices of requests whose prompt was handed over with what its tokens ran."""
        batch, handed_over = runner.input_batch, []
        for i, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
            if request_id in self.tether_records:
                continue
            state = runner.requests[request_id]
            extra = state.sampling_params.extra_args or {}
            prompt = len(state.prompt_token_ids)
            policy = self._policy(extra.get("execution"))
            layout, given = model.trace_layout, extra.get("prompt_rows")
            if given is None and "trace" in extra:
                given = base64.b64decode(extra["trace"])
            known = np.frombuffer(given or b"", np.uint8).reshape(-1, *layout.row_shape)
            is_scored = state.sampling_params.prompt_logprobs is not None  # by vLLM's own scoring: see `plain`
            if layout.prompt_value is not None and not is_scored and len(known) < prompt:
                rest = np.full((prompt - len(known), *layout.row_shape), layout.prompt_value, np.uint8)
                known = np.concatenate([known, rest])
            order, reach = None, policy.reach
            if given is not None:  # a token may read what ran less than it: of a continued response, or while scoring
                reach = max(int(known.max()), 0 if "targets" in extra else policy.reach)
            if "targets" in extra:
                targets = np.asarray(extra["targets"], np.int64)
                order = ScoreOrder(first=extra["first"], targets=targets, temperature=extra["temperature"])
            self.tether_records.open(
                request_id,
                known=known,
                capacity=prompt + state.sampling_params.max_tokens,
                reach=reach,
                policy=policy.vector,
                order=order,
            )
            if "prompt_rows" in extra:
                handed_over.append(i)
        return handed_over

    def _hook_removed(self, runner: Any) -> None:
        """vLLM's own hook for what belongs to a request: called once it has finished or was aborted."""
        original = runner._on_request_state_removed
        patches.expect_parameters(original, ["req_id", "req_state"])

        def removed(req_id: str, req_state: Any) -> None:
            original(req_id, req_state)
            self.tether_records.close(req_id)

        runner._on_request_state_removed = removed

    def _score(self, step: Step, hidden: torch.Tensor, model: Any) -> None:
        """Selected log-probs of the score requests in this step, by the sampler's own arithmetic."""
        for i, slot in enumerate(step.request_slots):
            if (order := self.tether_records.order(slot)) is None:
                continue
            rows = np.arange(step.bounds[i], step.bounds[i + 1])
            wanted = step.position[rows] - order.first
            rows = rows[(wanted >= 0) & (wanted < len(order.targets))]
            for chunk in np.split(rows, range(SCORE_ROWS, len(rows), SCORE_ROWS)):
                if not len(chunk):
                    continue
                first = int(step.position[chunk[0]] - order.first)
                logits = model.compute_logits(hidden[step.index(chunk)]).to(torch.float32)
                temperature = torch.tensor(order.temperature, dtype=torch.float32, device=logits.device)
                logprobs = logits.div_(temperature).log_softmax(-1, dtype=torch.float32)
                targets = step.index(order.targets[first : first + len(chunk)])
                selected = logprobs.gather(1, targets[:, None])[:, 0]
                self.tether_records.write_scores(slot, first, selected.cpu().numpy())
