"""Publication on CUDA: the digest's kernel, and every way to stage, against an engine started on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.contract import PublicationFailed, PublicationRefused
from adapters.hf_convert import digest, digests
from adapters.hf_convert.digest import partial_digest, render_digest, tensor_digest
from adapters.vllm_engine.client.local import LocalEngine
from tests.contracts.engine import faults
from tests.contracts.engine.conftest import drawn, make_requests, next_version, run, settings_for
from tests.tiny import write_ouro

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (4097,), (1500, 1400), (3, 70_001), (5, 7, 60_000)])
def test_the_kernel_is_torchs_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Same value on both devices, whole and in parts; one element exchanged with another changes it."""
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    on_device = tensor.cuda()
    assert tensor_digest(on_device) == tensor_digest(tensor)
    compiled = digest._compiled("cuda")
    assert compiled is not None
    words = digest.words_of(on_device).view(shape[0], -1)
    for first, stride in ((0, 0), (7, 9000), (2**32 - 70_001, 60_000), (2**61 - 5, 2**40 + 1)):
        arguments = {"first": first, "stride": stride}
        assert compiled(words, **arguments) == digest._sum_of_products(words.cpu(), **arguments)
    for dim in range(len(shape)):
        cut = shape[dim] // 3
        parts = [(0, cut), (cut, shape[dim] - cut)]
        pieces = [on_device.narrow(dim, start, length) for start, length in parts]
        sums = [partial_digest(p, shape=shape, dim=dim, offset=s) for p, (s, _) in zip(pieces, parts, strict=True)]
        assert render_digest(sum(sums)) == tensor_digest(tensor)
    if tensor.numel() > 1:
        flat = on_device.view(-1)
        flat[0], flat[1] = 3, 4
        before = tensor_digest(on_device)
        flat[0], flat[1] = 4, 3
        assert tensor_digest(on_device) != before


def test_many_tensors_in_one_launch() -> None:
    """Digests, what is not finite, copies and parts of many tensors at once are those of the CPU, one by one."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((), (1,), (0, 4), (65_537,), (131_072,), (300, 1000), (5, 7, 600))
    given = [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape in shapes for dtype in DTYPES]
    for tensor in given:
        tensor.view(-1)[1::3] = -0.0
    given[12][-1], given[17].view(-1)[0] = float("inf"), float("nan")
    assert given[12].dtype == torch.float32 and given[17].dtype == torch.bfloat16
    on_device = [tensor.cuda() for tensor in given]
    assert digests.finite_digests(on_device) == [digest.finite_digest(tensor) for tensor in given]
    given[17].view(-1)[0] = on_device[17].view(-1)[0] = 1  # adding zero to a NaN may give it other bits
    for targets in ([torch.full_like(tensor, 3) for tensor in on_device], on_device):
        copied = digests.copies_without_negative_zeros(list(zip(on_device, targets, strict=True)))
        on_host = [torch.empty_like(tensor) for tensor in given]
        assert copied == [digest.copy_without_negative_zeros(*pair) for pair in zip(given, on_host, strict=True)]
        assert [tensor_digest(target.cpu()) for target in targets] == copied
    parts = [
        digests.Part(tensor=tensor.narrow(dim, start, length), shape=tuple(tensor.shape), dim=dim, offset=start)
        for tensor in on_device
        for dim, size in enumerate(tensor.shape)
        for start, length in ((0, size // 3), (size // 3, size - size // 3))
    ]
    assert digests.partial_digests(parts) == [
        partial_digest(part.tensor.cpu(), shape=part.shape, dim=part.dim, offset=part.offset)  # type: ignore[union-attr]
        for part in parts
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_ouro(folder / name, dtype=torch.bfloat16, seed=seed) for seed, name in enumerate("AB")}


@pytest.fixture(scope="module")
def weights(models: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """On the device, as a trainer has them."""
    return {name: load_file(path / "model.safetensors", device="cuda") for name, path in models.items()}


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines started on the weights give."""
    answers = {}
    for name, path in models.items():
        with LocalEngine(settings_for(path, tmp_path_factory.mktemp("fresh") / "log", dtype="bfloat16")) as engine:
            answers[name] = drawn(run(engine, make_requests("r")))
    assert answers["A"] != answers["B"]
    return answers


@pytest.fixture(scope="module", params=["host", "shadow", "ipc"])
def engine(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    log = tmp_path_factory.mktemp(request.param) / "log"
    with LocalEngine(settings_for(models["A"], log, dtype="bfloat16", staging=request.param)) as running:
        yield running


def test_a_published_version_is_served_bitwise(engine: LocalEngine, weights: Any, wanted: Any) -> None:
    for name in "BAB":
        engine.publish(next_version(engine), weights[name])
        assert drawn(run(engine, make_requests("r"))) == wanted[name], name
    assert "weights are loaded directly" in engine.settings.log_path.read_text()


def test_a_refused_version_changes_nothing(engine: LocalEngine, weights: Any, wanted: Any) -> None:
    engine.publish(next_version(engine), weights["A"])
    version = engine.weight_version()
    name = next(iter(weights["B"]))
    broken = {**weights["B"], name: weights["B"][name].clone().fill_(float("nan"))}
    with pytest.raises(PublicationRefused, match="not finite"):
        engine.publish(next_version(engine), broken)
    assert engine.weight_version() == version
    assert drawn(run(engine, make_requests("r"))) == wanted["A"]


def test_a_restarted_engine_serves_what_was_committed(engine: LocalEngine, weights: Any, wanted: Any) -> None:
    engine.publish(next_version(engine), weights["B"])
    version = engine.weight_version()
    engine.restart()
    assert engine.weight_version() == version
    assert drawn(run(engine, make_requests("r"))) == wanted["B"]


def test_a_failed_commit_is_rolled_back(
    models: dict[str, Path],
    weights: Any,
    wanted: Any,
    tmp_path: Path,
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault after the weights were replaced: the old version is served again, from where it was staged."""
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "fault"))
    staging = engine.settings.staging
    settings = settings_for(models["A"], tmp_path / "log", dtype="bfloat16", staging=staging)
    with LocalEngine(settings, module=faults.MODULE) as broken:
        broken.publish(next_version(broken), weights["B"])
        faults.order(("verify", "exception"))
        with pytest.raises(PublicationFailed):
            broken.publish(next_version(broken), weights["A"])
        assert drawn(run(broken, make_requests("r"))) == wanted["B"]


def test_publications_do_not_accumulate(engine: LocalEngine, weights: Any) -> None:
    """Device memory, of both processes together, is as before after 20 further publications."""
    for i in range(4):
        engine.publish(next_version(engine), weights["AB"[i % 2]])
    free, _ = torch.cuda.mem_get_info()
    for i in range(20):
        engine.publish(next_version(engine), weights["AB"[i % 2]])
    assert free - torch.cuda.mem_get_info()[0] < 8 << 20  # one version of the tiny model is 0.8 MB
