"""What the fork server imports once, so that each child starts its engine in seconds. Sets vLLM's environment first."""

import os

from adapters.vllm_engine.process import environment

os.environ.update(environment({"VLLM_LOGGING_LEVEL": "CRITICAL", **os.environ}, cuda=False))

import vllm.entrypoints.llm  # noqa: E402, F401
import vllm.v1.engine.llm_engine  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import adapters.vllm_engine.core  # noqa: E402, F401
