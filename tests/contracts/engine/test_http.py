"""What only an engine over HTTP can meet: a server started wrongly, one that ends, and clients that come and go."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.contract import EngineDead, EngineStartFailed, EngineTimeout, Manifest, PublicationRefused, Version
from adapters.hf_convert.manifest import manifest_of
from adapters.vllm_engine.http.engine import HttpEngine
from adapters.vllm_engine.http.settings import HttpSettings, server_command
from tests.ports import free_port
from tests.tiny import write_ouro

from .conftest import drawn, make_requests, next_version, run, settings_for
from .http_server import RunningServer, ServedEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("http")
    return {name: write_ouro(folder / name, seed=seed) for seed, name in enumerate("AB")}


@pytest.fixture(scope="module")
def engine(model: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """Weights go through a directory."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights").mkdir()
    with ServedEngine(settings_for(model["A"], folder / "log"), directory=folder / "weights") as running:
        yield running
    assert not list((folder / "weights").iterdir())


@pytest.fixture(scope="module")
def weights(model: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(path / "model.safetensors") for name, path in model.items()}


def test_a_later_client_finds_the_version_and_goes_on(engine: ServedEngine, weights: Any) -> None:
    """It may not publish what is older; the same version with the same weights is accepted as done."""
    version = next_version(engine)
    engine.publish(version, weights["B"])
    before = drawn(run(engine, make_requests("r")))
    with HttpEngine(engine.settings) as later:
        assert later.weight_version() == version
        assert drawn(run(later, make_requests("r"))) == before
        later.publish(version, weights["B"])
        with pytest.raises(PublicationRefused, match="not newer"):
            later.publish(version, weights["A"])


def test_a_commit_whose_client_went_away_is_taken_back(engine: ServedEngine, weights: Any) -> None:
    """Between commit and settle nobody knows whether it counted: the next client finds the version before it."""
    engine.publish(next_version(engine), weights["A"])
    version, before = engine.weight_version(), drawn(run(engine, make_requests("r")))
    pairs = list(weights["B"].items())
    manifest: Manifest = manifest_of(pairs)
    buckets = [bucket for bucket, _ in engine._store.write(pairs)]
    for bucket in buckets:
        engine._server.weight_step("stage", bucket)
    engine._server.weight_step("prepare", manifest)
    engine._server.weight_step("commit", Version(version.incarnation, version.update + 1))
    assert drawn(run(engine, make_requests("r"))) != before, "the other weights should be live now"
    engine._store.remove(buckets)
    with HttpEngine(engine.settings) as later:
        assert later.weight_version() == version
        later._drop_caches()
        assert drawn(run(later, make_requests("r"))) == before


def test_what_a_client_leaves_unread_is_ended(engine: ServedEngine) -> None:
    stream = engine.generate(make_requests("unread"))
    next(stream)
    stream.close()
    assert engine.health().num_running == 0


def test_a_server_that_ends_is_an_error_and_restart_republishes(engine: ServedEngine, weights: Any) -> None:
    engine.publish(next_version(engine), weights["B"])
    version, before = engine.weight_version(), drawn(run(engine, make_requests("r")))
    engine.server.stop(signal.SIGKILL)
    with pytest.raises(EngineDead):
        run(engine, make_requests("dead"))
    with pytest.raises(EngineDead):
        engine.health()
    engine.start_server_again()
    engine.restart()
    assert engine.weight_version() == version
    assert drawn(run(engine, make_requests("r"))) == before


def test_a_server_without_what_the_contract_needs_is_refused(
    model: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it in one message, with the options that mend it. And nobody at the address is a timeout."""
    settings, port = settings_for(model["A"], tmp_path / "log"), free_port()
    address = HttpSettings(url=f"http://127.0.0.1:{port}", start_seconds=1)
    with pytest.raises(EngineTimeout, match="not healthy within"):
        HttpEngine(address)
    command, environment = server_command(settings, host="127.0.0.1", port=port)
    without = [word for word in command if word != "--enforce-eager"]
    without[without.index("processed_logprobs")] = "raw_logprobs"
    monkeypatch.setattr("tests.contracts.engine.http_server.server_command", lambda *_, **__: (without, environment))
    server = RunningServer(settings, port)
    try:
        with pytest.raises(EngineStartFailed) as refused:
            HttpEngine(dataclasses.replace(address, start_seconds=600))
    finally:
        server.stop()
    for option in ("--logprobs-mode processed_logprobs", "--enforce-eager"):
        assert option in str(refused.value)
