"""A checkpoint's own execution policy in an engine that Tether did not start: vLLM's LLM class, or its server.

There nobody loads `TetherWorker` or sends a policy with a request; config.json's policy holds for every request, or
`SamplingParams(extra_args={"execution": ...})` for one. A request for prompt log-probs scores a given sequence: all its
tokens follow the policy. Of any other request, prompt tokens run the whole model.
"""

from __future__ import annotations

from typing import Any

from adapters.vllm_engine.worker.model_interface import TracedModel
from adapters.vllm_engine.worker.patches import expect_parameters
from adapters.vllm_engine.worker.worker import TetherWorker

_MARK = "_tether_patch"
FULL = "full"


class PlainWorker(TetherWorker):
    """The hooks of `TetherWorker`, beside vLLM's worker and not mixed into it. Forgets finished requests."""

    def __init__(self, *, runner: Any, vllm_config: Any) -> None:
        self.model_runner, self.vllm_config = runner, vllm_config
        self.tether_install(None, "host")  # nothing is ever published to it

    def _hook_removed(self, runner: Any) -> None:
        super()._hook_removed(runner)
        close = runner._on_request_state_removed

        def forget(req_id: str, req_state: Any) -> None:
            close(req_id, req_state)
            self.tether_records.take(req_id)

        runner._on_request_state_removed = forget


def follow_recorded_policy() -> None:
    """Makes every vLLM worker run models of ours by the policy that their directory names.

    Reason: vLLM runs a model whole. Wraps `Worker.load_model` (read in 0.32), the last moment before requests.
    """
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.load_model
    if hasattr(original, _MARK):
        return
    expect_parameters(original, ["self"])

    def load_model(self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        model = self.model_runner.get_model()
        is_ours = isinstance(model, TracedModel) and not isinstance(self, TetherWorker)
        if is_ours and model.parse_policy(None) != model.parse_policy(FULL):
            _check_supported(self)
            self._tether_plain = PlainWorker(runner=self.model_runner, vllm_config=self.vllm_config)

    setattr(load_model, _MARK, True)
    Worker.load_model = load_model


def _check_supported(worker: Any) -> None:
    """Raises RuntimeError where the whole model would run although the directory says otherwise."""
    problems = []
    if not hasattr(worker.model_runner, "_model_forward"):
        problems.append("another model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    if worker.device.type != "cpu" and not worker.vllm_config.model_config.enforce_eager:
        problems.append("CUDA graphs, which replay one depth: pass enforce_eager=True")
    if problems:
        raise RuntimeError("config.json names an execution policy that needs other settings: " + "; ".join(problems))
