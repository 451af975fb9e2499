"""The training model against transformers at every parallel layout: logits, losses, gradients, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import findings
from tests.unit.olmoe import reference
from tests.unit.olmoe.ranks import LENGTHS, launch, sequences

TWO = ("data", "experts_alltoall", "experts_allgather", "tensor", "tensor_experts", "cut_experts")
ONE = ("alone", "alone_recompute")
LAYOUTS = (*ONE, *TWO)
FOUR = ("experts_data", "tensor_experts_data", "cut_divided_experts")
"""EP 2 and TP 2 x EP 2 on twice as many ranks as that takes, where experts have copies; and EP 2 x ETP 2."""
BETA1 = 0.9


def report(what: str, got: torch.Tensor, want: torch.Tensor, *, bound: float, why: str, scale: float = 1.0) -> None:
    """Prints the difference over `scale`, and fails above the bound."""
    off = (got.double() - want.detach().double()).abs().flatten() / scale
    first = [f"{x:.1e}" for x in off[:5].tolist()]
    print(f"{what}: max {float(off.max()):.2e} mean {float(off.mean()):.2e} count {off.numel()} first {first}")
    assert float(off.max()) <= bound, f"{what}: {float(off.max()):.2e} > {bound:.0e} ({why})"


def make_samples(oracle: Any) -> list[Any]:
    """Seven samples of odd sizes with the oracle's own routing and log-probs; in every second one a token is sent
    elsewhere than it would go, so that replay matters."""
    from adapters.megatron.packing import TrainSample

    generator = torch.Generator().manual_seed(11)
    samples = []
    for index in range(7):
        prompt, response = (torch.randint(1, high, (1,), generator=generator).item() for high in (8, 14))
        tokens = torch.randint(0, 256, (prompt + response,), generator=generator).tolist()
        trace = reference.routing(oracle, tokens[:-1]) if len(tokens) > 1 else torch.zeros(0, 2, 2, dtype=torch.int64)
        if index % 2:
            trace[-1] = (trace[-1] + 1) % 8
        sample = TrainSample(
            prompt_token_ids=tokens[:prompt],
            response_token_ids=tokens[prompt:],
            advantage=float(torch.randn(1, generator=generator)),
            trace=trace,
            temperature=0.8 if index % 3 == 0 else 1.0,
        )
        with torch.no_grad():
            values = reference.logprobs(reference.run(oracle, tokens[:-1], trace)[0], sample)
        samples.append(type(sample)(**{**vars(sample), "rollout_logprobs": values.tolist()}))
    return samples


@pytest.fixture(scope="module")
def case(tiny_olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything once: the oracle's answers in fp64 and its own fp32 error, and each layout's findings."""
    folder = tmp_path_factory.mktemp("olmoe")
    (folder / "model").symlink_to(tiny_olmoe)
    oracle, rough = (reference.load(tiny_olmoe, dtype) for dtype in (torch.float64, torch.float32))
    samples = make_samples(oracle)
    torch.save(samples, folder / "samples.pt")
    launch(["alone", "alone_recompute", "alone_on"], folder=folder, world=1)
    launch([*TWO, "experts_from_alone"], folder=folder, world=2)
    launch(["alone_from_experts", "alone_from_tensor_experts", "alone_from_cut_experts"], folder=folder, world=1)
    pieces = sequences()[0].split(LENGTHS)
    with torch.no_grad():
        logits = {m: torch.cat([reference.run(m, p.tolist())[0] for p in pieces]) for m in (oracle, rough)}
        parts = {name: float(value) for name, value in reference.losses(oracle, samples).items()}
    return {
        "folder": folder, "samples": samples, "losses": parts, "logits": logits[oracle],
        "gradients": reference.gradients(oracle, samples), "rough_gradients": reference.gradients(rough, samples),
        "rough_logits": float((logits[rough] - logits[oracle]).abs().max()),
    }  # fmt: skip


def moments(case: dict[str, Any], name: str, kind: str = "exp_avg") -> dict[str, torch.Tensor]:
    """Adam's moments by physical name, from a checkpoint."""
    from adapters.megatron.checkpoint_reader import CheckpointReader

    reader = CheckpointReader(case["folder"] / name / "iter_0000001")
    keys = {f"optimizer.state.{kind}.{tensor}": tensor for tensor in case["gradients"]}
    return {keys[key]: value for key, value in reader.read(keys)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks(case: dict[str, Any], layout: str) -> None:
    """All of the checks below where experts are divided and copied: four processes."""
    launch([layout], folder=case["folder"], world=4)
    check_logits_and_scores(case, layout)
    check_router_losses(case, layout)
    check_gradients(case, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_scores(case: dict[str, Any], layout: str) -> None:
    """fp32 logits of four packed sequences at most 2e-6 from transformers in fp64; scores replay the trace."""
    check_logits_and_scores(case, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_losses_do_not_depend_on_the_layout(case: dict[str, Any], layout: str) -> None:
    """Load balancing and z-loss equal the independent computation, however the tokens are cut."""
    check_router_losses(case, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(case: dict[str, Any], layout: str) -> None:
    """Every tensor's gradient of the whole loss, from Adam's first moment: at most 1e-6 off.

    Relative to its largest value: 1e-6, or three times what transformers in fp32 differs from fp64.
    """
    check_gradients(case, layout)


def check_logits_and_scores(case: dict[str, Any], layout: str) -> None:
    found = findings(case["folder"], layout)
    why = f"fp32 rounding; transformers in fp32 is itself {case['rough_logits']:.1e} off"
    report("logits", found["logits"], case["logits"], bound=2e-6, why=why)
    want = torch.tensor([value for sample in case["samples"] for value in sample.rollout_logprobs])
    got = torch.tensor([value for values in found["scores"] for value in values])
    report("scores", got, want, bound=2e-6, why="the same, over a temperature of 0.8 at least")


def check_router_losses(case: dict[str, Any], layout: str) -> None:
    metrics = findings(case["folder"], layout)["metrics"]
    for ours, theirs in (("load_balance_loss", "balance"), ("router_z_loss", "z")):
        print(f"{ours}: {metrics[ours]!r}, independent {case['losses'][theirs]!r}")
        assert metrics[ours] == pytest.approx(case["losses"][theirs], rel=1e-6), "fp32 sums over 150 tokens"
    assert 0.9 < metrics["routing_agreement"] < 1, "three tokens were sent elsewhere"
    others = findings(case["folder"], "alone")["metrics"]
    for name in ("grad_norm", "router_entropy", "routing_agreement", "effective_experts_min", "logprob_diff_mean"):
        assert metrics[name] == pytest.approx(others[name], rel=1e-5, abs=1e-7), name


def check_gradients(case: dict[str, Any], layout: str) -> None:
    worst: dict[str, float] = {}
    for name, moment in moments(case, layout).items():
        want = case["gradients"][name]
        scale = float(want.abs().max())
        if scale == 0:
            assert not moment.any(), name
            continue
        own = float((case["rough_gradients"][name] - want).abs().max()) / scale
        difference = float((moment.double() / (1 - BETA1) - want).abs().max())
        off = difference / scale
        assert difference <= 1e-6, f"{name}: {difference:.2e}"
        kind = ".".join(part for part in name.split(".")[3:] if not part.isdigit()) or name
        worst[kind] = max(worst.get(kind, 0), off)
        assert off <= max(1e-6, 3 * own), f"{name}: {off:.2e}, transformers in fp32 is {own:.1e} off"
    print(json.dumps({kind: f"{value:.1e}" for kind, value in sorted(worst.items())}))


def test_one_sided_routing_would_be_seen(case: dict[str, Any]) -> None:
    """Mutation: with two experts' gradients exchanged, or a loss left out, the comparison fails."""
    got = moments(case, "experts_alltoall")
    one, other = (f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in (1, 6))
    want = case["gradients"]
    assert float((got[one].double() / (1 - BETA1) - want[other]).abs().max()) > 1e-3 * float(want[other].abs().max())
    oracle = reference.load(case["folder"] / "model", torch.float64)
    for left_out in ({"balance": 0.0}, {"z": 0.0}):
        without = reference.gradients(oracle, case["samples"], **left_out)
        gate = "model.layers.0.mlp.gate.weight"
        assert float((without[gate] - want[gate]).abs().max()) > 1e-4 * float(want[gate].abs().max()), left_out


@pytest.mark.parametrize(
    ("stage", "source"),
    [("experts_from_alone", "alone"), ("alone_from_experts", "experts_alltoall"),
     ("alone_from_tensor_experts", "tensor_experts"), ("alone_from_cut_experts", "cut_experts"), ("alone_on", "alone")],
)  # fmt: skip
def test_checkpoints_change_layout(case: dict[str, Any], stage: str, source: str) -> None:
    """EP 1 -> 2, 2 -> 1, TP 2 x EP 2 -> 1, TP 2 x ETP 2 -> 1: parameters and Adam's moments bitwise; the next update
    follows."""
    found = findings(case["folder"], stage)
    wanted = findings(case["folder"], source)["weights"]
    assert found["loaded"].keys() == wanted.keys() == case["gradients"].keys()
    assert all(torch.equal(found["loaded"][name], wanted[name]) for name in wanted)
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        before, after = (moments(case, name, kind) for name in (source, f"{source}_again"))
        assert all(torch.equal(before[name], after[name]) for name in before), kind
    straight = findings(case["folder"], "alone_on")["weights"]
    for name, value in found["weights"].items():
        # Adam divides by the root of the second moment: of a gradient near zero it makes a whole step of rounding
        assert float((value - straight[name]).abs().max()) <= 2.1e-3, name
    mean = sum(float((v - straight[n]).abs().mean()) for n, v in found["weights"].items()) / len(straight)
    print(f"{stage}: mean difference after the next update {mean:.1e}")
    assert mean <= 1e-6, "a thousandth of a step: rounding of two layouts"
