"""Publication: the new version whole, or the old one whole; every bad tensor named before anything changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.contract import PublicationRefused, Version

from .conftest import drawn, make_requests, next_version, run

Tensors = dict[str, torch.Tensor]


def one_of(weights: Tensors) -> str:
    """A tensor in the middle of the model, of the kind that both model families have."""
    return next(name for name in weights if "layers.1." in name and name.endswith("up_proj.weight"))


def test_a_published_version_is_what_a_fresh_engine_would_serve(
    engine: Any, restore: None, weights: Tensors, other_weights: Tensors
) -> None:
    """After publishing B, and then A again, outputs equal those before; every result names its version."""
    before = run(engine, make_requests("a"))
    version = next_version(engine)
    report = engine.publish(version, other_weights)
    assert report.version == engine.weight_version() == version
    assert report.num_bytes == sum(t.nbytes for t in other_weights.values())
    other = run(engine, make_requests("b"))
    assert {r.version for r in other} == {version}
    assert all(x != y for x, y in zip(drawn(before), drawn(other), strict=True))
    engine.publish(next_version(engine), weights)
    assert drawn(run(engine, make_requests("c"))) == drawn(before)


def test_one_changed_element_is_served(engine: Any, restore: None, weights: Tensors) -> None:
    """The smallest update still reaches the engine (a publication that loses one is seen by this)."""
    before = run(engine, make_requests("small-a"))
    changed = {**weights, "lm_head.weight": weights["lm_head.weight"].clone()}
    changed["lm_head.weight"][before[0].token_ids[0], 0] += 0.5
    engine.publish(next_version(engine), changed)
    assert drawn(run(engine, make_requests("small-b"))) != drawn(before)


def with_negative_zero(weights: Tensors) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed[one_of(weights)][3, :7] = -0.0
    return changed


def test_negative_zeros_are_published(engine: Any, restore: None, weights: Tensors) -> None:
    """A weight of -0.0 reads back as 0.0 from packed layouts; that is no digest mismatch."""
    engine.publish(next_version(engine), with_negative_zero(weights))


BAD: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda w: {n: t for n, t in w.items() if n != one_of(w)}, "missing"),
    "extra": (lambda w: {**w, "model.layers.9.mlp.up_proj.weight": torch.ones(1)}, "unknown"),
    "duplicate": (lambda w: [*w.items(), (one_of(w), w[one_of(w)])], "more than once"),
    "misshapen": (lambda w: {**w, one_of(w): w[one_of(w)][:-1]}, "shape"),
    "dtype": (lambda w: {**w, one_of(w): w[one_of(w)].to(torch.bfloat16)}, "dtype"),
    "nan": (lambda w: {**w, one_of(w): torch.full_like(w[one_of(w)], float("nan"))}, "not finite"),
    "infinite": (lambda w: {**w, one_of(w): w[one_of(w)] * float("inf")}, "not finite"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_tensors_are_refused_and_the_old_version_serves(engine: Any, weights: Tensors, kind: str) -> None:
    """Refused before anything changes, naming the tensor; outputs and version stay; a good publication follows."""
    change, message = BAD[kind]
    before, version = run(engine, make_requests(f"{kind}-a", 2)), engine.weight_version()
    with pytest.raises(PublicationRefused, match=message) as error:
        engine.publish(next_version(engine), change(dict(weights)))
    assert "up_proj" in str(error.value)
    assert engine.weight_version() == version and engine.health().state == "serving"
    assert drawn(run(engine, make_requests(f"{kind}-b", 2))) == drawn(before)
    engine.publish(next_version(engine), weights)


def test_all_bad_tensors_are_named_in_one_message(engine: Any, weights: Tensors) -> None:
    """A user repairs a converter once, not tensor by tensor."""
    bad = {**weights, "lm_head.weight": weights["lm_head.weight"][:5], "x": torch.ones(1)}
    del bad["model.norm.weight"]
    with pytest.raises(PublicationRefused) as error:
        engine.publish(next_version(engine), bad)
    assert all(name in str(error.value) for name in ("lm_head.weight", "x: unknown", "model.norm.weight"))


def test_versions_only_grow_and_a_new_incarnation_takes_over(
    engine: Any, restore: None, weights: Tensors, other_weights: Tensors
) -> None:
    """The same version again needs the same content; older ones are refused; a new incarnation is newer."""
    version = next_version(engine)
    engine.publish(version, other_weights)
    assert engine.publish(version, other_weights).version == version
    with pytest.raises(PublicationRefused, match="not newer"):
        engine.publish(version, weights)
    with pytest.raises(PublicationRefused, match="not newer"):
        engine.publish(Version(version.incarnation, version.update - 1), weights)
    engine.publish(Version(version.incarnation + 1, 0), weights)
    assert engine.weight_version() == Version(version.incarnation + 1, 0)


def test_publication_with_requests_in_flight(
    engine: Any, restore: None, weights: Tensors, other_weights: Tensors
) -> None:
    """Draining, running requests finish under the old version; aborting, they end under it. None mixes versions."""
    from adapters.contract import SamplingParams

    for mode in ("drain", "abort"):
        old = engine.weight_version()
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        count = 4 if mode == "drain" else 600  # to abort, far more than a publication lets finish
        stream = engine.generate(make_requests(mode, count, sampling=params) + make_requests(f"{mode}-short", 1))
        results = [next(stream)]
        engine.publish(next_version(engine), other_weights if mode == "drain" else weights, in_flight=mode)
        results += list(stream)
        assert len(results) == count + 1 and {r.version for r in results} == {old}
        lengths = {
            len(r.token_ids) for r in results if r.request_id.startswith(f"{mode}-") and "short" not in r.request_id
        }
        assert lengths == {60} if mode == "drain" else min(lengths) < 60
        assert {"length"} | ({"abort"} if mode == "abort" else set()) == {r.finish_reason for r in results}


def test_shared_memory_holds_the_served_version_and_room_for_the_next(engine: Any, weights: Tensors) -> None:
    """A publication writes over the files of the version before the one that is served; a refused one leaves none."""
    from adapters.vllm_engine.memory.leftovers import memory_directory

    def buckets() -> set[Path]:
        return set(memory_directory().glob(f"tether-weights-{os.getpid()}-*"))

    def publish() -> set[Path]:
        engine.publish(next_version(engine), weights)
        return buckets()

    publish()
    held = publish()
    assert len(held) == 2
    assert publish() == publish() == held
    with pytest.raises(PublicationRefused):
        engine.publish(next_version(engine), {})
    assert buckets() == held
