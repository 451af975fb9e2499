"""`tether memory`: what can be counted equals a real trainer's tensors, what is kept equals what autograd saves."""

from __future__ import annotations

import json
import weakref
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from providers.registry import provider
from tests import ranks
from tests.tiny import OURO_CONFIG
from tests.unit.tether.memory_ranks import CONFIGS, LAYOUTS
from tether import footprint, memory
from tether.settings import Settings


class Alive(TorchDispatchMode):
    """Bytes of all tensors that operations have made and that still exist."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self.bytes = 0
        self._known = {parameter.untyped_storage()._cdata for parameter in parameters}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known:
                size = tensor.untyped_storage().nbytes()
                self._known.add(key)
                self.bytes += size
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


class Kept(torch.autograd.Function):
    """Attention as far as memory goes: a fused kernel keeps queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.flatten(1).clone()
        ctx.save_for_backward(q, k, v, out)
        return out


def shape_of(model_type: str, **settings: Any) -> footprint.Shape:
    config = provider(model_type, "config").Config.from_hf(CONFIGS[model_type])
    table = provider(model_type, "physical").physical_tensors(config)
    return footprint.Shape(config=config, table=table, settings=Settings(**settings), context_tokens=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.usefixtures("megatron")
def test_a_layer_keeps_what_it_says(model_type: str, dtype: str) -> None:
    """The bytes alive after a forward pass grow with each layer by what `kept_bytes` says, within 2 %; with recompute
    by the layer's input alone, where a token's experts add a few bytes."""
    tokens = 512
    for recompute in (False, True):
        alive = [_alive_after(model_type, dtype, recompute=recompute, layers=n, tokens=tokens) for n in (1, 2)]
        c = shape_of(model_type, dtype=dtype).config
        per_token = (alive[1] - alive[0]) / tokens / c.layer_passes
        element = footprint.BYTES[dtype]
        want = c.hidden_size * element if recompute else sum(c.kept_bytes(element, fused=False))
        experts = 64 * c.top_k if recompute and model_type == "olmoe" else 0
        print(f"{model_type} {dtype} recompute={recompute}: {per_token} bytes, expected {want}")
        assert 0.98 * want <= per_token <= 1.02 * want + experts


def _alive_after(model_type: str, dtype: str, *, recompute: bool, layers: int, tokens: int) -> int:
    config = provider(model_type, "config").Config.from_hf({**CONFIGS[model_type], "num_hidden_layers": layers})
    build = provider(model_type, "model").build
    model = build(config, dtype=getattr(torch, dtype), recompute=recompute, attention=_attend)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    ids = torch.arange(tokens) % config.vocab_size
    with Alive(model.parameters()) as alive:
        scores = model(ids, torch.tensor([0, tokens // 2, tokens]), rows=torch.arange(4), targets=ids[:4])
        assert scores.requires_grad
        return alive.bytes


def _attend(q: Tensor, k: Tensor, v: Tensor, view: Any) -> Tensor:
    return Kept.apply(q, k, v)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    ranks.launch("tests.unit.tether.memory_ranks", list(LAYOUTS), folder=folder, world=2)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_that_of_a_real_trainer(layout: str, held: Path) -> None:
    """Weights, gradients, masters and moments of rank 0 of two, up to the padding of buffers."""
    model_type, settings = LAYOUTS[layout]
    found, want = ranks.findings(held, layout), footprint.state(shape_of(model_type, train_devices=2, **settings))
    print(layout, found, want)
    assert found["weights"] == want["weights"]
    for name in ("gradients", "masters and moments"):
        assert want[name] - 64 <= found[name] <= 1.02 * want[name], name


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs only config.json; what does not fit is said with what to change, and the exit code."""
    (tmp_path / "config.json").write_text(json.dumps({**OURO_CONFIG, "hidden_size": 4096, "head_dim": 1024}))
    large = ["--set", "tokens_per_microbatch=65536", "--set", "kv_cache_bytes=1000000"]
    assert memory.main([str(tmp_path), "--device-gib", "60", *large]) == 1
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said and "recompute=true saves" in said
    assert memory.main([str(tmp_path), "--device-gib", "60", *large, "--set", "recompute=true"]) == 0
    assert "kv_cache_bytes can be up to" in capsys.readouterr().out
    assert memory.main([str(tmp_path / "nowhere")]) == 2
    assert "no config.json here" in capsys.readouterr().err


def test_sizes_that_are_written_twice_are_equal() -> None:
    """The estimate imports neither torch nor an engine, so it has their constants of its own."""
    from adapters.vllm_engine.memory import buckets
    from adapters.vllm_engine.settings import EngineSettings
    from providers.olmoe import model as olmoe
    from providers.ouro import model as ouro

    (step,) = (f.default for f in fields(EngineSettings) if f.name == "max_num_batched_tokens")
    assert (footprint.BUCKET_BYTES, footprint.STEP_TOKENS) == (buckets.BUCKET_BYTES, step)
    for build in (olmoe.build, ouro.build):
        assert signature(build).parameters["logprob_chunk_rows"].default == footprint.CHUNK_ROWS
