"""The dotted paths that flags name, loaded as the framework loads them, in a process that knows nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tether.vime

SIGNATURES = {
    "model_provider": ["pre_process", "post_process", "vp_stage"],
    "init": ["args"],
    "before_log_prob": ["args", "model", "store_prefix"],
    "before_train_step": ["args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"],
    "check_scores": ["args", "rollout_id", "rollout_data"],
    "generate": ["args", "sample", "sampling_params", "evaluation"],
    "convert_samples": ["args", "samples"],
    "after_publication": ["args", "version_dir", "engines"],
}
LOAD = """
import importlib, sys
def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
for name in sys.argv[2:]:
    assert callable(load_function("tether.vime." + name)), name
loaded = [package for package in ("megatron.core", "vllm") if package in sys.modules]
assert loaded == [each for each in sys.argv[1].split(",") if each], loaded
"""
TRAINING = ["model_provider", "init", "before_log_prob", "before_train_step", "check_scores", "after_publication"]


def test_signatures() -> None:
    """Every function takes what the framework gives it, by these names."""
    found = {name: list(inspect.signature(getattr(tether.vime, name)).parameters) for name in tether.vime.__all__}
    assert found == SIGNATURES
    assert inspect.iscoroutinefunction(tether.vime.generate)
    with pytest.raises(AttributeError, match="expected one of after_publication, before_log_prob"):
        tether.vime.generat  # noqa: B018


@pytest.mark.parametrize(
    ("names", "loads"), [(["generate"], ""), (TRAINING, "megatron.core")], ids=["rollout", "training"]
)
def test_a_bare_process_loads_them(names: list[str], loads: str) -> None:
    """By dotted path alone; a rollout process without Megatron, a training process without vLLM."""
    done = subprocess.run([sys.executable, "-c", LOAD, loads, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
