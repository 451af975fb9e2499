"""Each loss, normalisation, correction and estimator against hand-written fp64, however the batch is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.megatron.grpo import GrpoSettings, policy_loss
from adapters.megatron.losses import global_count
from adapters.megatron.mismatch import MismatchSettings
from adapters.megatron.packing import TrainSample, pack, plan_microbatches
from tests.unit.megatron_side.plain_loss import whole_loss

NONE = MismatchSettings(correction="none")
SETTINGS = {
    "default": GrpoSettings(),
    "grpo": GrpoSettings(normalisation="sequence", kl_coefficient=0.04, mismatch=NONE),
    "dapo": GrpoSettings(clip_high=0.28),
    "dr_grpo": GrpoSettings(normalisation="constant", constant_tokens=11, mismatch=NONE),
    "gspo": GrpoSettings(loss="gspo", normalisation="sequence", clip_low=0.05, clip_high=0.06),
    "cispo": GrpoSettings(loss="cispo", clip_low=1.0, clip_high=0.1),
    "dual clip": GrpoSettings(dual_clip=1.3, clip_high=0.1),
    "rollout is old": GrpoSettings(old_policy="rollout", mismatch=NONE),
    "k2": GrpoSettings(kl_coefficient=0.3, kl_estimator="k2"),
    "entropy": GrpoSettings(entropy_coefficient=0.2),
    "sequence truncation": GrpoSettings(mismatch=MismatchSettings(correction="sequence_truncate", high=1.2)),
    "icepop": GrpoSettings(mismatch=MismatchSettings(correction="token_mask", low=0.8, high=1.2)),
    "sequence mask": GrpoSettings(mismatch=MismatchSettings(correction="sequence_mask", low=0.7, high=1.4)),
}


def random_samples(count: int, *, seed: int = 5, with_old: bool = True) -> list[TrainSample]:
    """Samples of odd sizes with masks (one all masked), whose log-probs differ enough for every clip to bind."""
    rng = random.Random(seed)

    def near(values: Sequence[float], spread: float) -> list[float]:
        return [value + rng.gauss(0, spread) for value in values]

    samples = []
    for index in range(count):
        size = rng.randint(1, 9)
        rollout = near([-2.0] * size, 0.5)
        samples.append(
            TrainSample(
                prompt_token_ids=[1] * rng.randint(1, 4),
                response_token_ids=[2] * size,
                rollout_logprobs=rollout,
                old_logprobs=near(rollout, 0.3) if with_old else (),
                reference_logprobs=near(rollout, 0.4),
                advantage=rng.gauss(0, 1),
                loss_mask=[] if index % 3 == 0 else [index != 1 and rng.random() < 0.7 for _ in range(size)],
            )
        )
    return samples


def scores_of(samples: Sequence[TrainSample], *, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The trainer's log-probs and entropies of each sample, leaves of the graph."""
    generator = torch.Generator().manual_seed(11)

    def made(base: Sequence[float]) -> torch.Tensor:
        noise = 0.3 * torch.randn(len(base), generator=generator, dtype=torch.float64)
        return (torch.tensor(base, dtype=torch.float64) + noise).to(dtype).requires_grad_()

    return [made(s.rollout_logprobs) for s in samples], [made([1.5] * s.num_scored) for s in samples]


def cut(samples: Sequence[TrainSample], *, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """The micro-batches of all ranks, as sample indices."""
    plan = plan_microbatches([s.num_inputs for s in samples], max_tokens=max_tokens, num_ranks=num_ranks)
    return [batch for rank in plan for batch in rank]


def project_loss(
    samples: Sequence[TrainSample], scores: Any, entropies: Any, settings: GrpoSettings, batches: Any
) -> Any:
    """The project's loss over micro-batches: their sums added, divided by their counts added."""
    total, count = torch.zeros(()), 0
    for indices in batches:
        batch = pack([samples[i] for i in indices])
        empty = scores[0].new_zeros(0)
        rows = torch.cat([empty, *(scores[i] for i in indices)])
        if settings.entropy_coefficient:
            rows = torch.stack([rows, torch.cat([empty, *(entropies[i] for i in indices)])])
        part = policy_loss(rows, batch, settings)
        assert part.reported.keys() == set(settings.reported)
        total, count = total + part.sum, count + int(part.count)
    assert count == global_count([s.mask for s in samples], settings.normalisation)
    return total / count


@pytest.mark.parametrize("with_old", [True, False], ids=["old given", "first step"])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_equals_hand_written_and_does_not_depend_on_the_cut(name: str, with_old: bool) -> None:
    """Value and gradients, in one micro-batch and in many, on one rank and on three (one without work)."""
    settings, samples = SETTINGS[name], random_samples(9, with_old=with_old)
    wanted_scores, wanted_entropies = scores_of(samples, dtype=torch.float64)
    want = whole_loss(samples, [list(x) for x in wanted_scores], settings, [list(x) for x in wanted_entropies])
    want.backward()
    for max_tokens, num_ranks in ((1000, 1), (14, 1), (14, 3), (1000, 10)):
        scores, entropies = scores_of(samples, dtype=torch.float32)
        batches = cut(samples, max_tokens=max_tokens, num_ranks=num_ranks)
        got = project_loss(samples, scores, entropies, settings, batches)
        got.backward()
        pairs = list(zip(scores + entropies, wanted_scores + wanted_entropies, strict=True))
        apart = [float((a.grad.double() - b.grad).abs().max()) for a, b in pairs if b.grad is not None and len(b)]
        off = abs(float(got.detach() - want.detach()))
        print(f"{name}, {len(batches)} micro-batches: loss {float(got.detach()):.8f} off {off:.1e}, "
              f"gradients off {max(apart):.1e}")  # fmt: skip
        assert off < 1e-6 and max(apart) < 1e-6


def test_the_random_batch_exercises_what_it_tests() -> None:
    """Clips, truncations and masks bind on some tokens and not on others; otherwise the test above proves little."""
    samples = random_samples(9)
    scores, entropies = scores_of(samples, dtype=torch.float32)
    batch = pack(samples)
    for name, settings in SETTINGS.items():
        rows = torch.cat(scores)
        part = policy_loss(torch.stack([rows, torch.cat(entropies)]) if settings.entropy_coefficient else rows,
                           batch, settings)  # fmt: skip
        clipped = part.reported["clip_fraction"][batch.loss_mask].float().mean()
        bound = part.reported["mismatch_bound_fraction"][batch.loss_mask].float().mean()
        print(f"{name}: clipped {clipped:.2f}, bound {bound:.2f}")
        assert 0 < clipped < 1
        assert bound > 0 or settings.mismatch.correction in ("none", "token_truncate")


@pytest.mark.parametrize("name", [n for n in SETTINGS if n != "cispo"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Of the project's own code in fp64. CISPO has no such function: its weight is a constant by definition."""
    samples = random_samples(5, seed=8)
    scores, entropies = scores_of(samples, dtype=torch.float64)
    batches = cut(samples, max_tokens=1000, num_ranks=1)
    number = len(samples)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return project_loss(samples, leaves[:number], leaves[number:], SETTINGS[name], batches)

    # Batches hold fp32, which rounds the function and not its gradient: steps of 1e-4 stay far above that.
    assert torch.autograd.gradcheck(loss, (*scores, *entropies), eps=1e-4, atol=2e-6, rtol=1e-4)


def test_cispo_gradient_is_the_bounded_weight_times_the_advantage() -> None:
    """Also where the ratio is outside the bounds: such tokens keep their gradient."""
    samples = [replace(s, loss_mask=[]) for s in random_samples(5)]
    scores, entropies = scores_of(samples, dtype=torch.float64)
    settings = replace(SETTINGS["cispo"], mismatch=NONE)
    project_loss(samples, scores, entropies, settings, [list(range(5))]).backward()
    count = sum(s.num_scored for s in samples)
    for sample, own in zip(samples, scores, strict=True):
        ratio = (own.detach() - torch.tensor(sample.old_logprobs, dtype=torch.float64)).exp()
        want = -ratio.clamp(0, 1.1) * sample.advantage / count
        assert own.grad is not None and torch.allclose(own.grad, want, atol=1e-7)


def test_masked_rows_cannot_spoil_a_loss() -> None:
    """A row that is not trained may hold anything: its loss and its gradient are exactly 0."""
    sample = replace(random_samples(1)[0], loss_mask=[True, False], response_token_ids=[2, 2],
                     rollout_logprobs=[-1.0, -900.0], old_logprobs=[], reference_logprobs=[])  # fmt: skip
    scores = torch.tensor([-1.0, -2.0], requires_grad=True)
    for loss in ("clip", "gspo", "cispo"):
        settings = GrpoSettings(loss=loss, normalisation="sequence")  # type: ignore[arg-type]
        part = policy_loss(scores, pack([sample]), settings)
        (gradient,) = torch.autograd.grad(part.sum, scores)
        assert torch.isfinite(part.sum) and gradient[1] == 0 and gradient[0] != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 0}, "clip_low: got 0, expected in (0, 1]"),
        ({"loss": "ppo"}, "loss: got 'ppo', expected one of clip, gspo, cispo"),
        ({"normalisation": "batch"}, "normalisation: got 'batch'"),
        ({"normalisation": "constant"}, "constant_tokens: got 0, expected >= 1"),
        ({"loss": "gspo"}, "normalisation: got 'token', expected sequence, because gspo's ratio"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip: got 3.0, expected 0: cispo"),
        ({"dual_clip": 0.5}, "expected 0 (off) or > 1"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "k2 or k3 in the loss: the gradient of k1 has the mean 0"),
        ({"old_policy": "rollout"}, "old_policy: got 'rollout', expected trainer with a mismatch correction"),
        ({"mini_batches": 0}, "mini_batches: got 0"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """Each says what it got and what was expected."""
    with pytest.raises(ValueError) as refused:
        GrpoSettings(**options)
    assert message in str(refused.value)
    with pytest.raises(ValueError, match="high: got 0.5, expected >= 1"):
        MismatchSettings(high=0.5)
