"""lm-evaluation-harness on an export, by transformers and by vLLM, offline: its figures against computed ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import Oracle
from tests.tiny import write_ouro
from tether.convert import main as convert

pytest.importorskip("lm_eval", reason="scripts/setup.sh --evaluate installs it")

LOOPS, NEW = 4, 4
SPELLED = torch.tensor([i for i in range(2, 256) if not str(i).startswith("1")])
"""Tokens that can be written: the tokenizer finds its special token `t1` in the text `t17`, too."""
ROOT = Path(__file__).resolve().parents[2]


def words(tokens: list[int]) -> str:
    """Token i of the tiny tokenizer is the word t<i>."""
    return " ".join(f"t{token}" for token in tokens)


def draw(count: int, generator: torch.Generator) -> list[int]:
    return SPELLED[torch.randint(len(SPELLED), (count,), generator=generator)].tolist()


def greedy(oracle: Oracle, prompt: list[int], depth: int) -> list[int]:
    """What a policy of `fixed:depth` generates: prompt whole, generated tokens at that depth."""
    tokens = list(prompt)
    for n in range(NEW):
        logits, _ = oracle.run(tokens, [LOOPS] * len(prompt) + [depth] * n)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def choose(oracle: Oracle, prompt: list[int], choices: list[list[int]], depth: int) -> int:
    """The choice with the largest summed log-prob, all tokens at one depth; -1 when the two best are too close."""
    sums = []
    for choice in choices:
        tokens = prompt + choice
        sums.append(sum(oracle.logprobs(tokens, [depth] * (len(tokens) - 1), len(prompt), 1.0)))
    ranked = sorted(sums, reverse=True)
    return sums.index(ranked[0]) if all(a - b > 1e-3 for a, b in pairwise(ranked)) else -1


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An export at fixed:2 and problems of which two thirds are answered as at depth 2, the others as at full depth."""
    folder = tmp_path_factory.mktemp("evaluate")
    source = write_ouro(folder / "source", seed=4, std=0.1, num_hidden_layers=1)
    arguments = ["--remote-code", "ours", "--depth", "fixed:2"]
    assert convert(["export", str(source), str(folder / "hf"), *arguments]) == 0
    oracle, generator = Oracle(source), torch.Generator().manual_seed(0)
    records, picked = [], []
    while len(records) < 6:
        prompt = draw(6, generator)
        shallow, deep = greedy(oracle, prompt, 2), greedy(oracle, prompt, LOOPS)
        choices = [draw(2, generator) for _ in range(3)]
        best = [choose(oracle, prompt, choices, depth) for depth in (2, LOOPS)]
        if shallow == deep or min(best) < 0 or best[0] == best[1] or not {0, 1}.isdisjoint({*shallow, *deep}):
            continue
        answer = deep if len(records) % 3 == 0 else shallow
        picked.append(best[0] == len(records) % 3)
        right = words(choices[len(records) % 3])
        records.append(
            {"prompt": words(prompt), "label": words(answer), "choices": [*map(words, choices)], "right": right}
        )
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"folder": folder, "exact": 4 / 6, "accuracy": sum(picked) / 6}


def evaluate(case: dict[str, Any], *arguments: str) -> dict[str, float]:
    """The figures of the table that lm_eval prints, by metric."""
    folder: Path = case["folder"]
    metadata = json.dumps({"data": str(folder / "data.jsonl")})
    command = [sys.executable, "-m", "examples.evaluate", str(folder / "hf"), "--metadata", metadata]
    command += ["--gen_kwargs", f"max_gen_toks={NEW}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-4000:]
    found = re.findall(r"\|(exact_match|acc) *\|[^|]*\| *([0-9.]+)\|", run.stdout)
    assert len(found) == 2, run.stdout
    return {name: float(value) for name, value in found}


def test_transformers(case: dict[str, Any]) -> None:
    """At the depth that config.json names: generated answers and scored choices as an fp64 program gives them."""
    found = evaluate(case)
    assert found["exact_match"] == pytest.approx(case["exact"], abs=1e-4)
    assert found["acc"] == pytest.approx(case["accuracy"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "exact"), [("fixed:2", 4 / 6), ("full", 2 / 6)])
def test_vllm_and_transformers_agree(case: dict[str, Any], depth: str, exact: float) -> None:
    """At a depth of choice, by both loaders."""
    by_vllm, by_transformers = (evaluate(case, "--model", model, "--depth", depth) for model in ("vllm", "hf"))
    assert by_vllm == by_transformers
    assert by_vllm["exact_match"] == pytest.approx(exact, abs=1e-4)
