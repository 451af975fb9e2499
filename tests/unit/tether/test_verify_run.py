"""`tether convert verify` loading and running a directory: transformers, a greedy sample, the trainer's log-probs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import write_ouro
from tether import verify_run
from tether.convert import main as convert
from tether.stored import open_weights


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    """`verify` starts and ends Megatron-Core itself; its CPU stand-ins are taken back here."""
    from adapters.megatron import cpu_runtime

    yield
    cpu_runtime.uninstall()


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def lines(directory: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the table's lines without their names."""
    capsys.readouterr()
    code = convert(["verify", str(directory), *more])
    rows = (re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    return code, {name: rest for name, rest in rows}


@pytest.fixture
def exported(tiny_ouro: Path, tmp_path: Path) -> Path:
    out = tmp_path / "hf"
    assert convert(["export", str(tiny_ouro), str(out), "--remote-code", "ours", "--depth", "early:0.6:1:4"]) == 0
    return out


def test_everything_holds(exported: Path, tiny_ouro: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the directory's code: loads, stops at the end token, log-probs within 1e-6 of the trainer's at both depths."""
    code, found = lines(exported, capsys, "--against", str(tiny_ouro))
    assert code == 0 and not [name for name, rest in found.items() if not rest.startswith("ok ")], found
    assert "OuroForCausalLM by transformers, the directory's code" in found["loads"]
    assert "stops at the end token 0" in found["greedy sample"]
    early, full = re.findall(r"(\S+) at (?:the default|full) depth", found["log-probs"])
    print(found["log-probs"])
    assert float(early) <= 1e-6 and float(full) <= 1e-6, "two correct fp32 programs at std 0.02"


def test_the_bound_follows_what_fp32_rounds(exported: Path) -> None:
    """The last bit of the embeddings moves log-probs about as far as fp32 is from fp64."""
    model, _ = verify_run._load(open_weights(exported))
    tokens, full = verify_run._tokens(model.config.vocab_size), {"depth": "full"}
    with torch.no_grad():
        narrow = verify_run._chosen(model(tokens[None], **full).logits[0], tokens)
        moved = verify_run._rounding(model, tokens, narrow, full)
        wide = verify_run._chosen(model.double()(tokens[None], **full).logits[0], tokens)
    error = float((narrow - wide).abs().max())
    print(f"moved {moved:.1e}, fp32's error {error:.1e}")
    assert error / 4 <= moved <= 4 * error


def test_olmoe(tiny_olmoe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By transformers' own code, from per-expert names."""
    assert convert(["export", str(tiny_olmoe), str(tmp_path / "hf")]) == 0
    code, found = lines(tmp_path / "hf", capsys)
    assert code == 0 and "OlmoeForCausalLM by transformers, its own code" in found["loads"]
    assert float(re.findall(r"at most (\S+);", found["log-probs"])[0]) <= 1e-6


@pytest.mark.parametrize(
    "entries",
    [{"rope_theta": 10000.0}, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}],
    ids=["theta", "heads"],
)
def test_another_computation_is_seen(
    exported: Path, entries: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer follows what was exported: a config that was changed since gives other log-probs."""
    edit(exported / "config.json", **entries)
    code, found = lines(exported, capsys)
    assert code == 1
    assert found["config"].startswith("FAILED") and found["log-probs"].startswith("FAILED")
    assert "from the trainer's, expected at most" in found["log-probs"]


def test_another_computation_is_seen_where_fp32_rounds_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At std 0.2 the bound is far above that of a shallow model's; another epsilon is farther off still."""
    out = tmp_path / "hf"
    assert convert(["export", str(write_ouro(tmp_path / "model", std=0.2)), str(out), "--remote-code", "ours"]) == 0
    _, found = lines(out, capsys)
    assert float(re.findall(r"; (\S+) allowed", found["log-probs"])[0]) > 1e-4
    edit(out / "config.json", rms_norm_eps=1e-5)
    code, found = lines(out, capsys)
    assert code == 1 and found["log-probs"].startswith("FAILED"), found


def test_a_wrong_end_token_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros in the configs: the sample goes on after the tokenizer's real end token."""
    source = write_ouro(tmp_path / "zeros", bos_token_id=0, eos_token_id=0, pad_token_id=0)
    edit(source / "tokenizer_config.json", eos_token="t2")
    code, found = lines(source, capsys)
    assert code == 1
    assert "our code" in found["loads"]
    assert found["greedy sample"] == "FAILED  goes on after the end token 2: eos_token_id is 0 in the configs"


def test_foreign_code_is_not_run(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code that is not ours to the byte runs only when told to; without it the other lines still count."""
    ran = tmp_path / "ran"
    with (exported / "modeling_ouro.py").open("a") as file:
        file.write(f"\nopen({str(ran)!r}, 'w').close()\n")
    code, found = lines(exported, capsys)
    assert code == 1 and found["other files"].startswith("FAILED"), "the export recorded its checksum"
    assert found["loads"] == "-       the directory carries code that is not ours; --trust-remote-code runs it"
    assert not ran.exists() and "log-probs" not in found
    _, found = lines(exported, capsys, "--trust-remote-code")
    assert found["loads"].startswith("ok ") and ran.exists()


def test_a_directory_that_does_not_load(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its users would meet: an error of transformers, in the table."""
    (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "max_new_tokens": -1}))
    code, found = lines(exported, capsys)
    assert code == 1 and found["loads"].startswith("FAILED  ValueError: "), found
