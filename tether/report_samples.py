"""The report's table of samples: reward, text, and for a looped model the loops of each token as a colour."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 24
LONGEST_TOKENS = 400
DEPTH_COLOURS = ("#fdf3d8", "#fbd9a0", "#f5b36b", "#e98a4c", "#d9633b", "#c04030", "#9c2a2a", "#7a1d28")
MASKED = "#e2e8f0"


def samples_table(samples: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    """As many samples as fit, the best and the worst rewards among them; with a key to the colours."""
    chosen = _spread(samples)
    rows = "".join(_row(sample, tokenizer) for sample in chosen)
    deepest = max((max(s["exit_depths"]) for s in chosen if s.get("exit_depths")), default=0)
    keys = "".join(
        f'<span><i style="background:{DEPTH_COLOURS[(depth - 1) % len(DEPTH_COLOURS)]}"></i>{depth} loops</span> '
        for depth in range(1, deepest + 1)
    )
    if any(s.get("loss_mask") for s in chosen):
        keys += f'<span><i style="background:{MASKED}"></i>not trained on</span>'
    head = "<tr><th>reward</th><th>advantage</th><th>prompt and response</th><th>label</th></tr>"
    return (
        f'<p>{len(chosen)} of {len(samples)} samples.</p><p class="keys">{keys}</p>'
        f'<table class="samples"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    )


def _spread(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evenly over the samples in order of reward, best first."""
    ordered = sorted(samples, key=lambda sample: -(sample["reward"] if sample["reward"] is not None else -1e30))
    if len(ordered) <= SHOWN:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (SHOWN - 1)] for i in range(SHOWN)]


def _row(sample: Mapping[str, Any], tokenizer: Any) -> str:
    reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
    prompt = html.escape(_text(sample["prompt_token_ids"], tokenizer))
    ids = sample["response_token_ids"]
    depths, mask = sample.get("exit_depths"), sample.get("loss_mask") or [True] * len(ids)
    tokens = "".join(
        _token(_text([token], tokenizer), depths[i] if depths else None, not mask[i])
        for i, token in enumerate(ids[:LONGEST_TOKENS])
    )
    rest = f" ... {len(ids) - LONGEST_TOKENS} more tokens" if len(ids) > LONGEST_TOKENS else ""
    return (
        f'<tr><td class="number" data-name="reward">{reward}</td>'
        f'<td class="number" data-name="advantage">{sample["advantage"]:+.2f}</td>'
        f'<td class="text">{prompt}{tokens}{rest}</td>'
        f'<td data-name="label">{html.escape(str(sample.get("label", "")))}</td></tr>'
    )


def _token(text: str, depth: int | None, masked: bool) -> str:
    shown = html.escape(text)
    if masked:
        return f'<span style="background:{MASKED}" title="not trained on">{shown}</span>'
    if depth is None:
        return f"<span>{shown}</span>"
    colour = DEPTH_COLOURS[(depth - 1) % len(DEPTH_COLOURS)]
    return f'<span style="background:{colour}" title="{depth} loops">{shown}</span>'


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return " ".join(map(str, ids)) + " " if tokenizer is None else tokenizer.decode(list(ids))
