"""Charts of a report: the numbers of histograms and curves, which templates write as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Bar", "Chart", "histogram", "over_time"]

# No plotting library is used. Our charts have 0.5 to 2 kB each, the page's light or dark colours, and their values as
# text. A bar chart of pygal has 22 kB with a script and a style that the page's policy refuses. Charts of leather, Vega
# and matplotlib have 10 kB, fixed colours and no texts, and Vega's converter has 84 MB. All these libraries would still
# need our bins, which are most of this module.

PLOT_WIDTH = 280
PLOT_HEIGHT = 90
MAX_BINS = 24


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart, in the units of its SVG."""

    x: float
    y: float
    width: float
    height: float
    label: str
    """A description of the bar, for a pointer and for a screen reader."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with bars, a curve or both."""

    title: str
    unit: str
    left: str
    """The label of the left end of the axis."""
    right: str
    """The label of the right end of the axis."""
    top: str
    """The label of the largest value."""
    words: str
    """The chart in words, for readers who cannot see it."""
    bars: tuple[Bar, ...] = ()
    points: str = ""
    """The points of a curve, as SVG writes them."""
    width: int = PLOT_WIDTH
    height: int = PLOT_HEIGHT


def histogram(title: str, values: Sequence[float], *, unit: str) -> Chart:
    """Return a histogram of the finite values, in bins of equal width.

    If all of them are whole numbers in a small range, each number of the range has its own bin.
    """
    data = np.asarray([value for value in values if math.isfinite(value)], float)
    if not len(data):
        return Chart(title, unit, "", "", "", "No finite values.")
    low, high = float(data.min()), float(data.max())
    whole = bool(np.all(data == np.round(data))) and high - low < MAX_BINS
    bins = int(high - low) + 1 if whole else min(MAX_BINS, max(4, int(len(data) ** 0.5)))
    edges = np.linspace(low - 0.5, high + 0.5, bins + 1) if whole else np.linspace(low, high, bins + 1)
    if low == high:
        edges = np.array([low - 0.5, high + 0.5])
    counts, edges = np.histogram(data, edges)
    most, width = int(counts.max()), PLOT_WIDTH / len(counts)
    bars = tuple(
        Bar(
            round(number * width, 1),
            round(PLOT_HEIGHT - PLOT_HEIGHT * int(count) / most, 1),
            round(max(1.0, width - 1), 1),
            round(PLOT_HEIGHT * int(count) / most, 1),
            f"{_bin_name(edges[number], edges[number + 1], whole)}: {int(count)}",
        )
        for number, count in enumerate(counts)
        if count
    )
    median = float(np.median(data))
    words = f"{len(data)} values from {low:.4g} to {high:.4g} {unit}, median {median:.4g}."
    return Chart(title, unit, f"{low:.4g}", f"{high:.4g}", str(most), words, bars)


def _bin_name(low: float, high: float, whole: bool) -> str:
    return f"{(low + high) / 2:.4g}" if whole else f"{low:.4g} to {high:.4g}"


def over_time(title: str, values: Sequence[float | None], *, unit: str, bins: int = 40) -> Chart:
    """Return a chart of the means of `bins` consecutive parts of the values; None and non-finite values are skipped."""
    parts = np.array_split(np.asarray([math.nan if value is None else value for value in values], float), bins)
    means = [float(np.mean(part[np.isfinite(part)])) for part in parts if np.isfinite(part).any()]
    if len(means) < 2:
        return Chart(title, unit, "", "", "", "Too few values.")
    low, high = min(0.0, *means), max(means)
    scale = high - low or 1.0
    points = " ".join(
        f"{PLOT_WIDTH * number / (len(means) - 1):.1f},{PLOT_HEIGHT - PLOT_HEIGHT * (mean - low) / scale:.1f}"
        for number, mean in enumerate(means)
    )
    words = (
        f"From {means[0]:.4g} at the beginning to {means[-1]:.4g} at the end, between {min(means):.4g} and {high:.4g}."
    )
    return Chart(title, unit, "begin", "end", f"{high:.4g}", words, points=points)
