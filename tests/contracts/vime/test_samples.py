"""The conversion hook: every field of the framework's training data, and samples that are aborted, cut or empty."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tether.vime
from tests.contracts.vime.framework import Sample, Status

KEYS = {
    "tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "rollout_ids", "loss_masks",
    "rollout_log_probs", "rollout_mask_sums",
}  # fmt: skip


@pytest.fixture
def make_args(arguments: Callable[..., Any]) -> Callable[..., SimpleNamespace]:
    def make(model: str = "ouro", **overrides: Any) -> SimpleNamespace:
        values = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True}
        values |= {"n_samples_per_prompt": 2, "reward_key": None, "custom_reward_post_process_path": None}
        return arguments(model, **{**values, **overrides})

    return make


def sample(index: int, response: int = 3, *, prompt: int = 2, reward: float | None = 0.0, **fields: Any) -> Sample:
    depths = torch.tensor([4] * prompt + [1 + i % 4 for i in range(response - 1)] + [1] * min(response, 1))
    values = {
        "index": index,
        "group_index": index // 2,
        "tokens": list(range(10, 10 + prompt + response)),
        "response_length": response,
        "reward": reward,
        "rollout_log_probs": [-1.0] * response,
        "status": Status.COMPLETED,
        "multimodal_train_inputs": {"execution_depths": depths} if response else None,
    }
    return Sample(**{**values, **fields})


def test_every_field(make_args: Callable[..., Any]) -> None:
    """Group-normalised rewards, ids and sums of a rollout that gave two samples, and each sample's record."""
    samples = [sample(0, reward=1.0), sample(1, 5), sample(2, reward=0.25), sample(3, reward=0.75)]
    samples[2].rollout_id = samples[3].rollout_id = 7
    samples[1].status, samples[1].loss_mask = Status.TRUNCATED, [1, 0, 0, 1, 1]
    data = tether.vime.convert_samples(make_args(), samples)
    assert data.keys() == KEYS | {"multimodal_train_inputs"}
    assert data["tokens"] == [s.tokens for s in samples] and data["response_lengths"] == [3, 5, 3, 3]
    assert data["raw_reward"] == [1.0, 0.0, 0.25, 0.75] and data["truncated"] == [0, 1, 0, 0]
    scale = 0.5 / statistics.stdev([1.0, 0.0])
    assert data["rewards"] == pytest.approx([scale, -scale, -scale, scale])
    assert data["rollout_ids"] == [0, 1, 7, 7] and data["sample_indices"] == [0, 1, 2, 3]
    assert data["loss_masks"] == [[1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert data["rollout_mask_sums"] == [3, 3, 6, 6]
    for given, side in zip(samples, data["multimodal_train_inputs"], strict=True):
        assert torch.equal(side["execution_depths"], given.multimodal_train_inputs["execution_depths"])
        assert side["execution_lengths"].tolist() == [len(given.tokens)]


@pytest.mark.parametrize(
    ("overrides", "want"),
    [({"grpo_std_normalization": False}, [0.5, -0.5]), ({"rewards_normalization": False}, [1.0, 0.0]),
     ({"advantage_estimator": "reinforce_plus_plus"}, [1.0, 0.0])],
)  # fmt: skip
def test_rewards_as_the_framework_makes_them(
    make_args: Callable[..., Any], overrides: dict[str, Any], want: list[float]
) -> None:
    data = tether.vime.convert_samples(make_args(**overrides), [sample(0, reward=1.0), sample(1)])
    assert data["rewards"] == want


def test_aborted_and_empty_samples(make_args: Callable[..., Any]) -> None:
    """They keep their place, are never trained on and do not move their group's mean; nothing has no tokens."""
    samples = [
        sample(0, reward=1.0), sample(1, reward=0.0), sample(2, reward=None, status=Status.ABORTED),
        sample(3, 0, reward=0.5), sample(4, 0, prompt=1, reward=None, status=Status.ABORTED), sample(5, reward=None),
    ]  # fmt: skip
    for each in samples:
        each.group_index = 0
    data = tether.vime.convert_samples(make_args(), samples)
    scale = 0.5 / statistics.stdev([1.0, 0.0])
    assert data["rewards"] == pytest.approx([scale, -scale, 0, 0, 0, 0])
    assert [sum(mask) for mask in data["loss_masks"]] == [3, 3, 0, 0, 0, 0]
    assert data["response_lengths"] == [3, 3, 3, 1, 1, 3] and [len(t) for t in data["tokens"]] == [5, 5, 5, 3, 2, 5]
    assert data["rollout_log_probs"][3] == [0.0]
    assert [side["execution_depths"].tolist() for side in data["multimodal_train_inputs"]][3:5] == [[4, 4, 1], [4, 1]]


def test_weights_that_do_not_change(make_args: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts drawn by the weights before, though training went on: the framework has published nothing."""
    from tether.vime import samples

    monkeypatch.setattr(samples, "_versions", [])

    def convert(version: str, **overrides: Any) -> None:
        tether.vime.convert_samples(make_args(**overrides), [sample(0, metadata={"tether": {"version": version}})])

    for version in ("1.9", "1.10", "1.11"):
        convert(version)
    with pytest.raises(RuntimeError, match="weights 1.11 have drawn 2 rollouts in a row"):
        convert("1.11")
    convert("1.12", update_weights_interval=2)
    convert("1.12", update_weights_interval=2)
    with pytest.raises(RuntimeError, match="drawn 3 rollouts"):
        convert("1.12", update_weights_interval=2)
    for _ in range(3):
        convert("1.12", debug_rollout_only=True)


def test_experts(make_args: Callable[..., Any]) -> None:
    """Rows of input tokens, as the framework pads them; without its flag they are left out."""
    rows = torch.tensor([[[0, 1], [6, 7]]] * 4, dtype=torch.int32)
    samples = [sample(0, multimodal_train_inputs=None, rollout_routed_experts=rows) for _ in range(2)]
    samples.append(sample(2, 0, multimodal_train_inputs=None))
    data = tether.vime.convert_samples(make_args("olmoe", use_rollout_routing_replay=True), samples)
    assert data.keys() == KEYS | {"rollout_routed_experts"}
    assert [len(r) + 1 for r in data["rollout_routed_experts"]] == [len(t) for t in data["tokens"]]
    assert torch.equal(data["rollout_routed_experts"][1], rows)
    assert tether.vime.convert_samples(make_args("olmoe"), samples).keys() == KEYS
    samples[0].rollout_routed_experts = torch.tensor([[[0, 0], [6, 7]]] * 4)
    samples[1].rollout_routed_experts = rows[:3]
    with pytest.raises(ValueError, match="sample 0.*no one twice.*sample 1.*expected .4, 2, 2."):
        tether.vime.convert_samples(make_args("olmoe", use_rollout_routing_replay=True), samples)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"multimodal_train_inputs": None}, "sample 1: .*no execution_depths"),
        (
            {"multimodal_train_inputs": {"execution_depths": torch.tensor([4, 4, 1, 1])}},
            r"got shape \(4,\), expected \(5,\)",
        ),
        (
            {"multimodal_train_inputs": {"execution_depths": torch.tensor([4, 3, 1, 1, 1])}},
            "position 1 ran 3, expected 4..4",
        ),
        (
            {"multimodal_train_inputs": {"execution_depths": torch.tensor([4, 4, 5, 1, 1])}},
            "position 2 ran 5, expected 1..4",
        ),
        ({"multimodal_train_inputs": {"pixel_values": torch.zeros(1)}}, "pixel_values"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs: got 1, expected 3"),
        ({"rollout_log_probs": None}, "rollout_log_probs: got 0, expected 3"),
        ({"loss_mask": [1, 1]}, "loss_mask: got 2, expected 3"),
        ({"response_length": 5}, "response_length: got 5 of 5 tokens"),
    ],
)
def test_a_record_that_does_not_fit(make_args: Callable[..., Any], fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        tether.vime.convert_samples(make_args(), [sample(0), sample(1, **fields)])
