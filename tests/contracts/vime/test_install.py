"""The start-up hook: conversions registered once, others left alone, and a framework that moved is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tether.vime
from tests.contracts.vime.framework import install
from tether.vime import names, versions

READERS, WRITERS = "backends.megatron_utils.hf_to_megatron", "backends.megatron_utils.megatron_to_hf"


def test_registers_once(monkeypatch: pytest.MonkeyPatch, arguments: Callable[..., Any]) -> None:
    """Readers for our model types and no others; one writer in front, also after a second call."""
    modules, args = install(monkeypatch), arguments("ouro")
    tether.vime.init(args)
    first = modules[WRITERS]._convert_to_hf_core
    tether.vime.init(args)
    assert modules[WRITERS]._convert_to_hf_core is first
    loaders = modules[READERS]._LOADERS
    assert set(loaders) == {"llama", "ouro", "olmoe"} and loaders["ouro"] is loaders["olmoe"] is names.hf_tensor
    weight = torch.zeros(128)
    for called in ("ouro", "OuroConfig", "ouroconfig"):
        assert modules[WRITERS].convert_to_hf(args, called, "module.module.model.norm.weight", weight) == [
            ("model.norm.weight", weight)
        ]
    assert modules[WRITERS].convert_to_hf(args, "llama", "x", weight) == [("llama:x", weight)], "others are delegated"


def moved(**values: Any) -> ModuleType:
    module = ModuleType("moved")
    module.__dict__.update(values)
    return module


@pytest.mark.parametrize(
    ("part", "module", "named"),
    [
        (READERS, moved(load_hf_weights=lambda args, model, path: None), "_LOADERS"),
        (READERS, moved(_LOADERS={}, load_hf_weights=lambda args, model: None), "load_hf_weights"),
        (READERS, moved(_LOADERS={"ouro": 1}, load_hf_weights=lambda args, model, path: None), "'ouro' already"),
        (WRITERS, moved(convert_to_hf=lambda: None), "_convert_to_hf_core"),
        (WRITERS, moved(_convert_to_hf_core=lambda args, name, param: None), "expected .'args', 'model_name'"),
        (
            WRITERS,
            moved(_convert_to_hf_core=lambda args, model_name, name, param: None, convert_to_hf=lambda: None),
            "does not call",
        ),
    ],
)
def test_a_framework_that_moved_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: Callable[..., Any], part: str, module: ModuleType, named: str
) -> None:
    """Whatever we lean on is checked before it is used, and docs/vime.md is pointed to."""
    install(monkeypatch, **{part.replace(".", "__"): module})
    with pytest.raises(RuntimeError, match=f"{named}.*docs/vime.md"):
        tether.vime.init(arguments("ouro"))


def test_no_framework(monkeypatch: pytest.MonkeyPatch, arguments: Callable[..., Any]) -> None:
    with pytest.raises(ImportError, match="hf_to_megatron.*vime or slime"):
        tether.vime.init(arguments("ouro"))


def test_versions_go_on(tmp_path: Path, arguments: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed at rollout 2, the next publication has the number that rollout 2's had; a fresh run starts at 0."""
    monkeypatch.setattr(versions, "_last_rollout", -1)
    args = arguments("ouro", save=str(tmp_path), load=str(tmp_path), update_weight_transport="nccl")
    assert versions.version_to_go_on_from(args) is None
    versions.remember(args, 1)  # before the first update
    for rollout in range(4):
        versions.note_rollout(rollout)
        versions.remember(args, rollout + 2)
    (tmp_path / versions.TRACKER).write_text("2\n")
    assert versions.version_to_go_on_from(args) == 3  # published as 4 before
    versions.set_start_version(args)
    assert args.update_weight_start_version == 3
    versions.note_rollout(2)
    versions.remember(args, 4)
    (tmp_path / versions.TRACKER).write_text("9")
    assert versions.version_to_go_on_from(args) == 4, (
        "what was published after rollout 2 in the life before is forgotten"
    )


def test_the_driver_must_count_too(tmp_path: Path, arguments: Callable[..., Any]) -> None:
    """Through a directory the framework's driver counts versions as well: a number that it was not told is refused."""
    (tmp_path / versions.TRACKER).write_text("2")
    (tmp_path / versions.FILE).write_text('{"-1": 1, "0": 2, "1": 3}')
    args = arguments("ouro", load=str(tmp_path), update_weight_transport="disk")
    with pytest.raises(RuntimeError, match="update_weight_start_version: got 0, expected 3.*custom-config-path"):
        versions.set_start_version(args)
    args.update_weight_start_version = 3
    versions.set_start_version(args)
