"""What a schedule and its exceptions may be, as settings say it. Imports nothing heavy: it is asked early."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

LrSchedule = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained otherwise than the rest."""

    pattern: str
    """Of their names."""
    lr: float = 1.0
    """Times the learning rate of the rest, warm-up, decay and floor included."""
    weight_decay: float = 1.0
    """Times the weight decay of the rest; vectors have none in any case."""

    def __post_init__(self) -> None:
        if not (self.pattern and 0 <= self.lr < math.inf and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"parameter group: got {self!r}, expected a pattern and finite factors >= 0")


def schedule_problems(*, schedule: str, warmup: int, decay: int, wsd: int) -> list[str]:
    """What is wrong with a schedule; all counts are updates."""
    rules = {
        f"lr_schedule: got {schedule!r}, expected one of {', '.join(get_args(LrSchedule))}": schedule
        in get_args(LrSchedule),
        f"lr_decay_updates: got {decay}, expected 0 or > lr_warmup_updates": decay == 0 or decay > warmup,
        f"lr_wsd_updates: got {wsd}, expected 1 .. lr_decay_updates - lr_warmup_updates with wsd, else 0": (
            1 <= wsd <= decay - warmup if schedule == "wsd" and decay else wsd == 0
        ),
    }
    return [text for text, holds in rules.items() if not holds]


def parse_groups(text: str) -> tuple[ParameterGroup, ...]:
    """Reads PATTERN:lr=FACTOR:wd=FACTOR,PATTERN:... (either factor may be left out).

    Raises:
        ValueError: it is written otherwise.
    """
    groups = []
    for part in filter(None, text.split(",")):
        pattern, *factors = part.split(":")
        try:
            values = {name: float(value) for name, _, value in (factor.partition("=") for factor in factors)}
            if not factors or not values.keys() <= {"lr", "wd"}:
                raise ValueError(part)
            groups.append(ParameterGroup(pattern=pattern, lr=values.get("lr", 1.0), weight_decay=values.get("wd", 1.0)))
        except ValueError:
            raise ValueError(
                f"param_groups: got {part!r}, expected PATTERN:lr=FACTOR:wd=FACTOR with factors >= 0"
            ) from None
    return tuple(groups)
