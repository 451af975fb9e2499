"""The order in which prompts are used: shuffled, epoch after epoch, from several files by their weights.

Everything follows from (seed, position), so a run resumes in the middle of an epoch exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapters.contract import derive_seed
from tether.data import PromptOrder


class PromptMix:
    """Draws records of several sources, numbered one source after another.

    Of every stretch of draws each source has its share, as nearly as whole numbers allow: the next draw is of the
    source that is furthest behind its share, the earlier one of two.

    Args:
        sizes: records of each source.
        weights: of each source, > 0.
        seed: of the run.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int) -> None:
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._shares = [weight / sum(weights) for weight in weights]
        seeds = [seed if i == 0 else derive_seed(seed, "data file", i) for i in range(len(sizes))]
        self._orders = [PromptOrder(size, seed=each) for size, each in zip(sizes, seeds, strict=True)]
        self._position, self._drawn = 0, [0] * len(sizes)

    def take(self, position: int, count: int) -> list[int]:
        """Record indices of the prompts number position .. position + count - 1 since the start of the run."""
        if position < self._position:
            self._position, self._drawn = 0, [0] * len(self._drawn)
        while self._position < position:
            self._draw()
        return [self._draw() for _ in range(count)]

    def _draw(self) -> int:
        self._position += 1
        behind = [share * self._position - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        source = behind.index(max(behind))
        (index,) = self._orders[source].take(self._drawn[source], 1)
        self._drawn[source] += 1
        return self._starts[source] + index


def parse_files(text: str) -> list[tuple[Path, float]]:
    """Reads the setting `more_data`.

    Raises:
        ValueError: not FILE:WEIGHT,FILE:WEIGHT with weights > 0.
    """
    files = []
    for part in filter(None, text.split(",")):
        path, colon, weight = part.rpartition(":")
        try:
            if not path or not 0 < float(weight) < float("inf"):
                raise ValueError
        except ValueError:
            raise ValueError(f"more_data: got {part!r}, expected FILE:WEIGHT with a weight > 0") from None
        files.append((Path(path), float(weight)))
    return files
