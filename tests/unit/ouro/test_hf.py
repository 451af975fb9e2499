"""The code that exports carry for transformers: equal to the trainer and to plain PyTorch, whole, cached and padded."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from providers.ouro import remote_code
from providers.ouro.policy import DepthPolicy
from tests.oracle import Oracle, rule_violation
from tests.unit.ouro import reference

LOOPS, LAYERS, VOCAB = 4, 3, 256
FP32 = 1e-6  # what two correct programs differ by in fp32 at std 0.02


def with_code(source: Path, target: Path, **entries: Any) -> Path:
    """A copy of a checkpoint that carries our code, with more entries in its config.json."""
    shutil.copytree(source, target)
    for name in remote_code.FILES:
        shutil.copy(remote_code.FOLDER / name, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "auto_map": remote_code.AUTO_MAP, **entries}))
    return target


def load(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, **options)


@pytest.fixture(scope="module")
def directory(tiny_ouro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_code(tiny_ouro, tmp_path_factory.mktemp("hf") / "ouro")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory).eval()


@pytest.fixture(scope="module")
def weights(tiny_ouro: Path) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in load_file(tiny_ouro / "model.safetensors").items()}


@pytest.fixture(scope="module")
def config(tiny_ouro: Path) -> dict[str, Any]:
    return json.loads((tiny_ouro / "config.json").read_text())


def tokens_of(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]


def mixed(length: int, *, prompt: int, seed: int = 3) -> Tensor:
    depth = torch.randint(1, LOOPS + 1, (length,), generator=torch.Generator().manual_seed(seed))
    depth[:prompt] = LOOPS
    return depth


def close(what: str, got: Tensor, want: Tensor, *, bound: float = FP32) -> None:
    off = (got.detach().double() - want.detach().double()).abs().flatten()
    first = [f"{x:.1e}" for x in off[:5].tolist()]
    print(f"{what}: max {float(off.max()):.2e} mean {float(off.mean()):.2e} count {off.numel()}, first {first}")
    assert float(off.max()) <= bound, what


@pytest.mark.parametrize("depth", [1, 2, 3, 4, "mixed"])
@pytest.mark.usefixtures("megatron")
def test_equals_the_trainer(model: Any, tiny_ouro: Path, depth: int | str) -> None:
    """Log-probs of every next token in fp32, at each uniform depth and with mixed depths."""
    from providers.ouro.config import OuroConfig
    from providers.ouro.model import build

    trainer = build(OuroConfig.from_hf(json.loads((tiny_ouro / "config.json").read_text())), dtype=torch.float32)
    stored = load_file(tiny_ouro / "model.safetensors")
    (tokens,) = tokens_of(40)
    trace = mixed(40, prompt=9) if depth == "mixed" else torch.full((40,), int(depth))
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            parameter.copy_(stored[name])
        want = trainer(tokens, torch.tensor([0, 40]), trace, targets=tokens.roll(-1))
        output = model(tokens[None], trace=trace[None]) if depth == "mixed" else model(tokens[None], depth=depth)
    got = output.logits[0].log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0]
    assert output.exit_depths.tolist() == [trace.tolist()]
    close(f"depth {depth}", got, want)
    if depth != LOOPS:
        with torch.no_grad():
            whole = model(tokens[None]).logits[0].log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0]
        assert float((whole - want).abs().max()) > 1e-3, "at another depth the scores must be others"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_plain_pytorch(
    directory: Path, weights: dict[str, Tensor], config: dict[str, Any], checkpointing: bool
) -> None:
    """fp64, mixed depths: loss and every gradient, with and without gradient checkpointing."""
    model = load(directory, dtype=torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    (tokens,) = tokens_of(13)
    trace = mixed(13, prompt=4)
    output = model(tokens[None], labels=tokens[None], trace=trace[None])
    output.loss.backward()
    wanted = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    logits = reference.logits(wanted, config, tokens.tolist(), trace.tolist())
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
    loss.backward()
    close("logits", output.logits[0], logits, bound=1e-12)  # transformers takes the loss itself in fp32
    close("loss", output.loss, loss, bound=1e-6)
    for name, parameter in model.named_parameters():
        if "early_exit_gate" in name:
            assert parameter.grad is None
            continue
        close(name, parameter.grad, wanted[name].grad, bound=1e-6 * float(wanted[name].grad.abs().max()))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(directory: Path, side: str, attention: str) -> None:
    """A padded batch gives each row what it gives alone, whatever stands in the padding; depths there are 0."""
    model = load(directory, attn_implementation=attention).eval()
    rows = tokens_of(11, 4, 7)
    traces = [mixed(len(row), prompt=2, seed=i) for i, row in enumerate(rows)]
    ids, mask, trace = torch.full((3, 11), 5), torch.zeros(3, 11, dtype=torch.long), torch.ones(3, 11, dtype=torch.long)
    places = []
    for i, row in enumerate(rows):
        place = slice(11 - len(row), 11) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place], trace[i, place] = row, 1, traces[i]
        places.append(place)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, trace=trace)
        other = model(torch.where(mask.bool(), ids, 99), attention_mask=mask, trace=trace)
        for i, row in enumerate(rows):
            alone = model(row[None], trace=traces[i][None])
            close(f"row {i}", batch.logits[i, places[i]], alone.logits[0])
            assert torch.equal(batch.logits[i, places[i]], other.logits[i, places[i]])
    assert torch.equal(batch.exit_depths, trace * mask)


def test_cached_decoding_equals_the_whole(model: Any) -> None:
    """Token by token through the cache, each at its own depth: the logits of one pass, in T x N planes."""
    from transformers import DynamicCache, StaticCache

    (tokens,) = tokens_of(16)
    trace = mixed(16, prompt=5)
    with torch.no_grad():
        whole = model(tokens[None], trace=trace[None]).logits[0]
        for cache in (None, DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
            output = model(tokens[None, :5], past_key_values=cache, use_cache=True, num_prompt_tokens=5)
            rows = [output.logits[0]]
            for i in range(5, 16):
                cache = output.past_key_values
                output = model(tokens[None, i : i + 1], past_key_values=cache, trace=trace[None, i : i + 1])
                rows.append(output.logits[0])
            close(type(output.past_key_values).__name__, torch.cat(rows), whole)
            assert len(output.past_key_values.layers) == LOOPS * LAYERS
    with pytest.raises(ValueError, match="got 3 layers, expected 12"):
        used = DynamicCache(config=model.config)
        used.layers[0].update(torch.zeros(1, 4, 2, 32), torch.zeros(1, 4, 2, 32))
        model(tokens[None], past_key_values=used)


def test_decoding_behind_right_padding(model: Any) -> None:
    """A batch cached with padding on the right goes on right: masked columns stay masked, positions skip them."""
    rows = tokens_of(9, 6)
    ids, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 2], mask[i, : len(row) - 2] = row[:-2], 1
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        for step in (-2, -1):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            new = torch.stack([row[step] for row in rows])[:, None]
            output = model(new, attention_mask=mask, past_key_values=cache, depth=2)
        for i, row in enumerate(rows):
            trace = torch.full((len(row),), LOOPS)
            trace[-2:] = 2
            close(f"row {i}", output.logits[i, -1], model(row[None], trace=trace[None]).logits[0, -1])


@pytest.mark.parametrize("depth", ["full", "fixed:2", "early:0.6:1:4", "delayed:0.5:1:3"])
def test_generate(model: Any, tiny_ouro: Path, depth: str) -> None:
    """Greedy, a left-padded batch: tokens as without a cache and as alone; depths by the exit rule, prompts whole."""
    rows = tokens_of(3, 8, 5, seed=2)
    ids, mask = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 8 - len(row) :], mask[i, 8 - len(row) :] = row, 1
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": VOCAB, "pad_token_id": 0, "depth": depth}
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(output.sequences, plain)
    policy, oracle = DepthPolicy.parse(depth, LOOPS), Oracle(tiny_ouro)
    for i, row in enumerate(rows):
        alone = model.generate(row[None], **options)
        assert torch.equal(alone[0], output.sequences[i, 8 - len(row) :])
        loops = output.exit_depths[i, 8 - len(row) :].tolist()
        assert output.exit_depths[i, : 8 - len(row)].eq(0).all() and loops[: len(row)] == [LOOPS] * len(row)
        _, chances = oracle.run(alone[0, :-1].tolist(), loops)
        for place in range(len(row), len(loops)):
            fault = rule_violation(
                chances[place].tolist(), loops[place], threshold=policy.threshold, low=policy.min_loops,
                high=policy.max_loops, delay=policy.delay,
            )  # fmt: skip
            assert fault is None, f"{depth}, position {place}: {fault}"
    if depth == "early:0.6:1:4":
        assert len(output.exit_depths.unique()) > 2, "depths must differ, or nothing is tested"


def test_beams_keep_their_depths(model: Any) -> None:
    """After beam search the recorded depths belong to the beams that survived: replaying them gives its log-probs."""
    (row,) = tokens_of(6)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": VOCAB, "depth": "early:0.6:1:4"}
    output = model.generate(row[None], return_dict_in_generate=True, num_return_sequences=3, **options)
    with torch.no_grad():
        replayed = model(output.sequences[:, :-1], num_prompt_tokens=6, depth="early:0.6:1:4")
    survivors = {tuple(depths) for depths in output.exit_depths.tolist()}
    assert tuple(replayed.exit_depths[0].tolist()) in survivors


def test_generate_refuses_right_padding(model: Any) -> None:
    with pytest.raises(ValueError, match="padded on the right"):
        model.generate(torch.ones(2, 4, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))


@pytest.mark.parametrize(
    ("entries", "default"),
    [
        ({}, "full"),
        ({"depth_policy": "fixed:2"}, "fixed:2"),
        ({"early_exit_threshold": 0.6}, "early:0.6:1:4"),
        ({"early_exit_threshold": 0.6, "depth_policy": "full"}, "full"),
    ],
)
def test_config_names_the_depth(
    tiny_ouro: Path, tmp_path: Path, entries: dict[str, Any], default: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory's policy holds unless a call names another, is logged, and is what the trainer side reads."""
    from providers.ouro.config import OuroConfig

    directory = with_code(tiny_ouro, tmp_path / "hf", **entries)
    with caplog.at_level("INFO"):
        model = load(directory).eval()
    assert f"Ouro: depth {default} of 4 loops by default (config.json)" in caplog.text
    assert OuroConfig.from_hf(json.loads((directory / "config.json").read_text())).default_depth == default
    (tokens,) = tokens_of(12)
    with torch.no_grad():
        assert torch.equal(model(tokens[None]).logits, model(tokens[None], depth=default).logits)
        output = model(tokens[None], depth=3, num_prompt_tokens=5)
    assert output.exit_depths.tolist() == [[4] * 5 + [3] * 7]


@pytest.mark.parametrize(
    "text", ["fixed:5", "fixed:0", "early:0.9:3:2", "early:0:1:4", "early:x:1:4", "deep", "full:1"]
)
def test_both_sides_refuse_the_same_policies(tiny_ouro: Path, tmp_path: Path, text: str) -> None:
    """A policy that does not fit is refused at loading, here and by the provider's own reader of config.json."""
    from providers.ouro.config import OuroConfig

    directory = with_code(tiny_ouro, tmp_path / "hf", depth_policy=text)
    with pytest.raises(Exception, match=f"depth: got '{text}'"):
        load(directory)
    with pytest.raises(ValueError, match=f"depth: got '{text}'"):
        OuroConfig.from_hf(json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("text", ["full", "fixed:3", "early:0.9:2:4", "delayed:0.5:1:3"])
def test_both_sides_read_policies_alike(text: str) -> None:
    from providers.ouro.hf.configuration_ouro import parse_depth

    here, there = DepthPolicy.parse(text, LOOPS), parse_depth(text, LOOPS)
    assert vars(here) == vars(there)


def test_bad_calls(model: Any) -> None:
    (tokens,) = tokens_of(4)
    with pytest.raises(ValueError, match=r"trace: got shape \(1, 3\)"):
        model(tokens[None], trace=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"with values 1\.\.5"):
        model(tokens[None], trace=torch.tensor([[1, 5, 1, 1]]))
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=None)


def test_plain_training_and_saving(directory: Path, tmp_path: Path) -> None:
    """AdamW on one batch learns it; save_pretrained writes the checkpoint's names and the code, and loads again."""
    model = load(directory).train()
    model.gradient_checkpointing_enable()
    ids = torch.stack(tokens_of(12, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids, depth=3).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1, losses
    model.eval().save_pretrained(tmp_path / "trained")
    again = load(tmp_path / "trained").eval()
    stored = load_file(tmp_path / "trained" / "model.safetensors")
    assert stored.keys() == load_file(directory / "model.safetensors").keys()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_code_travels_alone() -> None:
    """Copied files may import nothing of this project."""
    for name in remote_code.FILES:
        tree = ast.parse((remote_code.FOLDER / name).read_text())
        roots = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                roots.add("." if node.level else str(node.module).split(".")[0])
            elif isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
        assert roots <= {".", "__future__", "collections", "copy", "dataclasses", "torch", "transformers", "typing"}
