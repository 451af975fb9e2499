"""Charts as SVG text, drawn for a box of 340 by 170 that scales with the page. A chart without data is empty text."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 6, 8, 20
COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#975a16", "#0987a0", "#718096", "#c53030")
Point = tuple[float, float]


def lines(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str], *, title: str, log: bool = False) -> str:
    """One line for each figure that some update has; `log` leaves out values <= 0."""
    series = {label: _points(metrics, key, log=log) for key, label in names.items()}
    series = {label: points for label, points in series.items() if points}
    if not series:
        return ""
    every = [y for points in series.values() for _, y in points]
    frame = _Frame(_updates(metrics), (min(every), max(every)), log=log)
    drawn = [frame.path(points, colour) for points, colour in zip(series.values(), COLOURS, strict=False)]
    return _figure(
        frame.axes() + "".join(drawn), title, list(series), newest=[p[-1][1] for p in series.values()], log=log
    )


def stacked(metrics: Sequence[Mapping[str, Any]], key: str, *, title: str) -> str:
    """Shares of a histogram over updates, one colour a class, the first class at the bottom."""
    rows = [(m["update"], m[key]) for m in metrics if m.get(key) and sum(m[key])]
    if not rows:
        return ""
    frame, parts = _Frame([update for update, _ in rows], (0.0, 1.0), columns=True), []
    for update, counts in rows:
        base = 0.0
        for index, count in enumerate(counts):
            share = count / sum(counts)
            parts.append(frame.box(update, base, base + share, COLOURS[index % len(COLOURS)]))
            base += share
    return _figure(frame.axes() + "".join(parts), title, [str(i + 1) for i in range(len(rows[0][1]))])


def bars(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str], *, title: str) -> str:
    """Figures of each update on top of each other."""
    rows = [(m["update"], [m.get(key) or 0.0 for key in names]) for m in metrics]
    if not rows or not names:
        return ""
    highest = max(sum(values) for _, values in rows) or 1.0
    frame, parts = _Frame([update for update, _ in rows], (0.0, highest), columns=True), []
    for update, values in rows:
        base = 0.0
        for index, value in enumerate(values):
            parts.append(frame.box(update, base, base + value, COLOURS[index % len(COLOURS)]))
            base += value
    return _figure(frame.axes() + "".join(parts), title, list(names.values()))


def heat(table: Sequence[Sequence[float]] | None, *, title: str) -> str:
    """A table of numbers >= 0, each row by its own largest: dark is much."""
    if not table:
        return ""
    high, wide = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    down, across = high / len(table), wide / len(table[0])
    cells = []
    for row, values in enumerate(table):
        largest = max(values) or 1
        for column, value in enumerate(values):
            x, y = LEFT + column * across, TOP + row * down
            told = f"layer {row}, expert {column}: {value:g}"
            cells.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{across:.2f}" height="{down:.2f}" fill="#2b6cb0" '
                f'fill-opacity="{value / largest:.3f}"><title>{told}</title></rect>'
            )
    outline = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="#dde2e8"/>'
    labels = f'<text x="{LEFT - 4}" y="{TOP + 9}" text-anchor="end">layer 0</text>'
    labels += f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">expert {len(table[0]) - 1}</text>'
    return _figure(outline + "".join(cells) + labels, title, [])


class _Frame:
    """Axes: updates along x, values along y. `columns` leaves room for a column at each update."""

    def __init__(
        self, updates: Sequence[float], values: tuple[float, float], *, log: bool = False, columns: bool = False
    ) -> None:
        self.log, (low, high) = log, values
        if log:
            low, high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            high = max(high, low + 1)
            step: float = max(1, math.ceil((high - low) / 4))
        else:
            high = high if high > low else low + (abs(low) * 0.1 or 1.0)
            step = _nice((high - low) / 4)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        self.low, self.high = low, high
        self.ticks = [low + step * i for i in range(round((high - low) / step) + 1)]
        self.first, self.last = min(updates), max(updates)
        self.column = (WIDTH - LEFT - RIGHT) / (self.last - self.first + 1) if columns else 0.0

    def x(self, update: float) -> float:
        span = self.last - self.first
        share = 0.5 if not span else (update - self.first) / span
        return LEFT + self.column / 2 + share * (WIDTH - LEFT - RIGHT - self.column)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for tick in self.ticks:
            value = 10**tick if self.log else tick
            y, told = self.y(value), f"1e{int(tick)}" if self.log else number(round(tick, 12))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dde2e8"/>')
            parts.append(f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{told}</text>')
        ends = {self.first: "start" if not self.column else "middle", self.last: "end" if not self.column else "middle"}
        for update, anchor in ends.items():
            parts.append(f'<text x="{self.x(update):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{update:g}</text>')
        return "".join(parts)

    def path(self, points: Sequence[Point], colour: str) -> str:
        places = [(self.x(x), self.y(y)) for x, y in points]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = ""
        if len(places) <= 25:
            dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in places)
        return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dots}'

    def box(self, update: float, low: float, high: float, colour: str) -> str:
        if high <= low:
            return ""
        width = max(1.0, self.column * 0.88)
        x, top, bottom = self.x(update) - width / 2, self.y(high), self.y(low)
        return f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" fill="{colour}"/>'


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 times a power of ten."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def number(value: float) -> str:
    """A figure as short as it can be read."""
    return f"{value:.3g}" if abs(value) < 10_000 else f"{value:.2g}"


def _points(metrics: Sequence[Mapping[str, Any]], key: str, *, log: bool) -> list[Point]:
    points = [(m["update"], float(m[key])) for m in metrics if m.get(key) is not None]
    return [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]


def _updates(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    return [m["update"] for m in metrics]


def _figure(content: str, title: str, labels: Sequence[str], *, newest: Sequence[float] = (), log: bool = False) -> str:
    values = [f" {value:.2g}" if log else f" {number(value)}" for value in newest] or [""] * len(labels)
    keys = "".join(
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{html.escape(label)}{value}</span> '
        for i, (label, value) in enumerate(zip(labels, values, strict=True))
    )
    name = html.escape(title)
    return (
        f'<figure><figcaption><b>{name}</b></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{name}">{content}</svg><figcaption class="keys">{keys}</figcaption></figure>'
    )
