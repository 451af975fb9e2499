"""The hooks around log-probs, steps and publications: what they arm, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tether.vime
from adapters.megatron.runtime import StepRefused
from tests.contracts.vime import framework
from tests.tiny import write_ouro
from tether.vime import hooks, publication
from tether.vime.names import hf_tensor

pytestmark = pytest.mark.usefixtures("megatron")


class Optimizer:
    """Of the framework's optimizer, what is asked between backward and step."""

    norm = 1.0

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> float:
        return self.norm


@pytest.fixture
def wrapped(arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Our model inside of Megatron's DDP, and what its gradients' finish was asked."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    args = arguments("ouro")
    framework.provide_arguments(monkeypatch, args)
    monkeypatch.setattr(hooks, "_norms", [])
    model = tether.vime.model_provider()
    framework.load(model, Path(args.hf_checkpoint), hf_tensor)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    calls: list[str] = []
    model.config.finalize_model_grads_func = lambda model, num_tokens, **_: calls.append("finish")
    return ddp, calls


def finish(ddp: Any) -> None:
    ddp.module.config.finalize_model_grads_func([ddp], None)


def before_step(ddp: Any, optimizer: Any, **settings: Any) -> None:
    tether.vime.before_train_step(SimpleNamespace(**settings), 3, 1, [ddp], optimizer, None)


def test_gradients_that_are_not_finite(wrapped: tuple[Any, list[str]]) -> None:
    """The framework's own finish runs first; then a broken gradient ends the step, by name. The guard is set once."""
    ddp, calls = wrapped
    for _ in range(2):
        before_step(ddp, Optimizer())
    finish(ddp)
    assert calls == ["finish"] and ddp.module.replay.required
    dict(ddp.module.named_parameters())["model.norm.weight"].main_grad[5] = float("inf")
    with pytest.raises(StepRefused, match="1 gradient.*model.norm.weight"):
        finish(ddp)


def test_a_spike_of_the_norm(wrapped: tuple[Any, list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """Against the median of the steps before: warned of by default, refused where asked, and not before five steps."""
    ddp, _ = wrapped
    optimizer = Optimizer()
    for _ in range(5):
        before_step(ddp, optimizer, tether_trip_grad_norm="stop:3")
        finish(ddp)
    optimizer.norm = 3.5
    before_step(ddp, optimizer, tether_trip_grad_norm="stop:3")
    with pytest.raises(StepRefused, match="rollout 3, step 1: the gradient norm is 3.5, 3 was expected"):
        finish(ddp)
    before_step(ddp, optimizer)
    optimizer.norm = 11.0
    finish(ddp)
    assert "norm is 11" in caplog.text
    with pytest.raises(ValueError, match="trip_grad_norm: got 'never'"):
        before_step(ddp, optimizer, tether_trip_grad_norm="never")


def test_scores_that_are_far_apart(wrapped: tuple[Any, list[str]]) -> None:
    """The mean over trained tokens is judged; what is not there is not."""
    data = {
        "log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
        "rollout_log_probs": [torch.tensor([-1.1, -9.0]), torch.tensor([-3.0])],
        "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])],
    }
    tether.vime.check_scores(SimpleNamespace(), 0, data)  # 0.1 / 2 is not above 0.1
    data["loss_masks"][0][1] = 1
    with pytest.raises(StepRefused, match="differ by 2.37"):
        tether.vime.check_scores(SimpleNamespace(), 0, data)
    tether.vime.check_scores(SimpleNamespace(tether_trip_score_difference="off"), 0, data)
    tether.vime.check_scores(SimpleNamespace(), 0, {"rollout_log_probs": data["rollout_log_probs"]})
    data["log_probs"][0][0] = float("nan")
    with pytest.raises(StepRefused):
        tether.vime.check_scores(SimpleNamespace(), 0, data)


def test_another_model_is_named() -> None:
    with pytest.raises(RuntimeError, match="Linear, expected tether.vime.model_provider's"):
        tether.vime.before_log_prob(None, [torch.nn.Linear(1, 1)], "")


def test_a_publication_is_whole_or_did_not_happen(wrapped: Any, arguments: Callable[..., Any], tmp_path: Path) -> None:
    """Only a directory with exactly the model's tensors becomes the committed one."""
    args = arguments("ouro", save=str(tmp_path / "save"))
    first, second = (write_ouro(tmp_path / f"weight_v00000{n}", seed=n) for n in (1, 2))
    tether.vime.after_publication(args, str(first), [])
    assert publication.committed(tmp_path) == (1, first)
    config = json.loads((second / "config.json").read_text())
    write_ouro(second, num_hidden_layers=2)
    (second / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model.layers.2"):
        tether.vime.after_publication(args, str(second), [])
    assert publication.committed(tmp_path) == (1, first)
    with pytest.raises(ValueError, match="expected weight_v and a number"):
        tether.vime.after_publication(args, str(tmp_path), [])
    write_ouro(second, seed=2)
    tether.vime.after_publication(args, str(second), [])
    assert publication.committed(tmp_path) == (2, second)
    assert max(json.loads((tmp_path / "save" / "tether_versions.json").read_text()).values()) == 2
