"""What a figure is, the statistics behind it, and how it prints. Pure: no clock, no file, no socket.

A figure is one measured number with its unit, and, where we hold ourselves to one, a target. Comparisons between
systems are made round by round: each round measures every system once, one after another, so what else the machine
does in that moment meets all of them; the figure is the median over the rounds of the difference or the ratio.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "missed", "info", "skipped"]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Target:
    """A bound in the figure's own unit: `Target("<=", 0.25)`."""

    comparison: Literal["<=", ">=", "<", "=="]
    bound: float

    def met_by(self, value: float) -> bool:
        return _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.comparison}{self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the report. `value` is None where it could not be measured; `why` says so in words.

    `rounds` holds the single measurements behind the value, in the same unit, for the JSON output.
    """

    name: str
    unit: str
    value: float | None = None
    target: Target | None = None
    why: str = ""
    rounds: tuple[float, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "skipped"
        if self.target is None:
            return "info"
        return "ok" if self.target.met_by(self.value) else "missed"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, interpolated between neighbours.

    Raises: ValueError when there are no values.
    """
    if not values:
        raise ValueError("percentile of nothing")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def pairwise_ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """ours / theirs, round by round; a round where theirs is 0 is left out."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True) if b)


def pairwise_differences(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """ours - theirs, round by round, in their unit."""
    return tuple(a - b for a, b in zip(ours, theirs, strict=True))


def figure_of_rounds(
    name: str, unit: str, rounds: Sequence[float], target: Target | None = None, why: str = ""
) -> Figure:
    """The median over the rounds, or a skipped figure where no round gave a value."""
    if not rounds:
        return skipped(name, unit, why or "no round completed", target)
    return Figure(name=name, unit=unit, value=median(rounds), target=target, why=why, rounds=tuple(rounds))


def skipped(name: str, unit: str, why: str, target: Target | None = None) -> Figure:
    return Figure(name=name, unit=unit, why=why, target=target)


def number(value: float | None) -> str:
    """Three significant digits below 100, none behind the point above."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def lines(figures: Sequence[Figure]) -> list[str]:
    """`name value unit target verdict [why]`, in aligned columns."""
    rows = [
        (f.name, number(f.value), f.unit, "-" if f.target is None else str(f.target), f.verdict, f.why)
        for f in figures
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    texts = []
    for name, value, unit, target, verdict, why in rows:
        text = f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {target:<{widths[3]}}  "
        texts.append((text + f"{verdict:<{widths[4]}}  {why}").rstrip())
    return texts


def as_json(figures: Sequence[Figure]) -> str:
    """A JSON list with one object per figure."""
    return json.dumps(
        [
            {
                "name": f.name,
                "value": f.value,
                "unit": f.unit,
                "target": None if f.target is None else str(f.target),
                "verdict": f.verdict,
                "why": f.why,
                "rounds": list(f.rounds),
            }
            for f in figures
        ],
        indent=1,
    )
