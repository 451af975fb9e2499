"""What `benchmarks.rollout` measures: policies, numbers of requests and lengths of responses, by model and engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from providers.registry import provider

PROMPT, RESPONSE, SHORT = 128, 256, 128
WARM_UP = (32, 8)
"""Tokens of each response in the run before an engine's first case, and before its others: graphs are captured then."""
EARLY = "early:0.8:2:4"
"""Random weights leave at every depth from 2 to 4 with it; real ones have thresholds of their own."""
PROFILE = "profile"
Case = tuple[str, int, int]
"""Policy, requests, tokens of each response."""

OURO: dict[str, list[Case]] = {
    "graphs": [
        *((policy, 256, RESPONSE) for policy in ("fixed:4", "fixed:3", "fixed:2", EARLY)),
        *((policy, count, SHORT) for count in (32, 1) for policy in ("fixed:4", EARLY)),
        *(("fixed:4", count, SHORT) for count in (128, 8)),
    ],
    "peer": [("fixed:4", 256, RESPONSE), ("fixed:4", 32, SHORT), ("fixed:4", 1, SHORT)],
    "eager": [("fixed:4", 256, 32), (EARLY, 256, 32), ("fixed:4", 1, 32)],
    PROFILE: [("fixed:4", 256, RESPONSE), (EARLY, 256, RESPONSE), ("fixed:4", 1, RESPONSE)],
    "synchronous": [("fixed:4", 256, 128), ("fixed:4", 1, 128)],
}
OLMOE: dict[str, list[Case]] = {
    "graphs": [("full", count, RESPONSE) for count in (256, 32, 1)],
    "peer": [("full", count, RESPONSE) for count in (256, 32, 1)],
    "eager": [("full", count, 32) for count in (256, 1)],
    PROFILE: [("full", count, RESPONSE) for count in (256, 1)],
    "synchronous": [("full", count, 128) for count in (256, 1)],
}
CASES = {"ouro-1.4b": OURO, "olmoe-1b-7b": OLMOE}
DEFAULT = {"ouro-1.4b": ("graphs", "peer", "eager", PROFILE), "olmoe-1b-7b": ("graphs", "peer", PROFILE)}
"""Engines, the most telling first: a run may be cut off."""
TINY = {"ouro-1.4b": "tiny-ouro", "olmoe-1b-7b": "tiny-olmoe"}


def cases_of(model: str, engine: str, *, tiny: bool) -> list[Case]:
    """Tiny: the same policies, a few requests, and tokens enough to step through half of them and some more."""
    tokens = 64 if engine == PROFILE else 8
    cases = CASES[model][engine]
    return [(policy, min(count, 8), min(response, tokens)) for policy, count, response in cases] if tiny else cases


def config_of(model: Path) -> Any:
    """The provider's config of a model's directory."""
    hf = json.loads((model / "config.json").read_text())
    return provider(hf["model_type"], "config").Config.from_hf(hf)


def prompts(model: Path, count: int) -> Iterator[tuple[int, ...]]:
    """Random tokens, the same ones at every call."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(4, config_of(model).vocab_size, (count, PROMPT), generator=generator)
    return (tuple(row) for row in tokens.tolist())
