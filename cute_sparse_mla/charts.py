"""Line charts as plain SVG: no plotting package is needed to draw what a benchmark or a training run measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
WIDTH, HEIGHT = 760, 400  # of a panel
LEFT, TOP, RIGHT, BOTTOM = 64, 44, 240, 44  # margins; the right one holds the legend
COLUMNS = 2  # panels side by side


@dataclass(frozen=True)
class Line:
    """Points `(x, y)` in the units of the axes; `faint` draws them thin and pale, `label` goes to the legend."""

    points: Sequence[tuple[float, float]]
    label: str = ""
    colour: str = PALETTE[0]
    dashed: bool = False
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """A labelled axis, linear or logarithmic; what is not given is chosen. It reaches at least to its outer ticks."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    ticks: Sequence[float] = ()

    def fitted(self, values: Sequence[float]) -> Axis:
        """The axis with its range and ticks filled in from what is drawn."""
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        ticks = self.ticks or (_powers(low, high) if self.log else _round_steps(low, high))
        return Axis(self.label, min(low, *ticks), max(high, *ticks), self.log, ticks)

    def place(self, value: float) -> float:
        """Where a value lies between the ends of a fitted axis, 0 to 1."""
        assert self.low is not None and self.high is not None
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1.0)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten from below to above, with twos and fives where those are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    begin = max((i for i, tick in enumerate(every) if tick <= low), default=0)
    end = min((i for i, tick in enumerate(every) if tick >= high), default=len(every) - 1)
    return every[begin : end + 1]


def _round_steps(low: float, high: float) -> list[float]:
    """About six multiples of 1, 2 or 5 times a power of ten that enclose the range."""
    rough = (high - low or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def panel(title: str, lines: Sequence[Line], x: Axis, y: Axis, corner: tuple[float, float] = (0.0, 0.0)) -> list[str]:
    """The elements of one chart whose upper left corner lies at `corner`; lines without points are left out."""
    head = f'<text x="{LEFT}" y="24" font-size="14">{escape(title)}</text>'
    parts = [f'<g transform="translate({corner[0]:.0f} {corner[1]:.0f})">', head]
    drawn = [line for line in lines if line.points]
    if not drawn:
        return [*parts, f'<text x="{LEFT}" y="{TOP + 20}">nothing measured</text>', "</g>"]
    x = x.fitted([point[0] for line in drawn for point in line.points])
    y = y.fitted([point[1] for line in drawn for point in line.points])
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    bottom = TOP + high

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + wide * x.place(point[0]), bottom - high * min(max(y.place(point[1]), 0.0), 1.0)

    for tick in y.ticks:
        height = bottom - high * y.place(tick)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{LEFT + wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in x.ticks:
        column = LEFT + wide * x.place(tick)
        parts.append(f'<path d="M{column:.1f} {bottom}v4" stroke="#888"/>')
        parts.append(f'<text x="{column:.1f}" y="{bottom + 18}" text-anchor="middle">{_short(tick)}</text>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(f'<text x="{LEFT - 48}" y="{TOP - 8}">{escape(y.label)}</text>')
    labelled = 0
    for line in drawn:
        places = [at(point) for point in line.points]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        style = 'stroke-opacity="0.35"' if line.faint else 'stroke-width="2"'
        style += ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" {style}/>')
        if line.dots:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{line.colour}"/>' for a, b in places]
        if line.label:
            row = TOP + 12 + 18 * labelled
            start = LEFT + wide + 12
            dash = ' stroke-dasharray="5 4"' if line.dashed else ""
            pale = ' stroke-opacity="0.35"' if line.faint else ""
            parts.append(f'<path d="M{start} {row - 4}h16" stroke="{line.colour}" stroke-width="2"{dash}{pale}/>')
            if line.dots:
                parts.append(f'<circle cx="{start + 8}" cy="{row - 4}" r="3" fill="{line.colour}"/>')
            parts.append(f'<text x="{start + 20}" y="{row}" fill="{line.colour}">{escape(line.label)}</text>')
            labelled += 1
    return [*parts, "</g>"]


def _short(value: float) -> str:
    """Token counts as 4k or 128k, other numbers as they are."""
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:.6g}"


def picture(*panels: tuple[str, Sequence[Line], Axis, Axis]) -> str:
    """An SVG of charts, `COLUMNS` in a row, each `(title, lines, x, y)`."""
    columns = min(COLUMNS, len(panels))
    width, height = WIDTH * columns, HEIGHT * -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, (title, lines, x, y) in enumerate(panels):
        row, column = divmod(number, columns)
        parts += panel(title, lines, x, y, (WIDTH * column, HEIGHT * row))
    return "\n".join([*parts, "</svg>\n"])
