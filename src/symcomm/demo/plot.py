"""The demo's curves: in the terminal, made of braille dots, and as a picture if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symcomm.bench.pictures import Bars, Curves, Panel, draw

Curve = Sequence[tuple[float, float]]  # points (x, y)
# A braille character is 2 dots wide and 4 high; these are the bits of its dots, row by row.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BRAILLE = 0x2800


def smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """A running mean that forgets: losses of small batches jump."""
    smoothed: list[float] = []
    mean, known = 0.0, 0.0
    for value in values:
        mean, known = weight * mean + (1 - weight) * value, weight * known + 1 - weight
        smoothed.append(mean / known)
    return smoothed


def text_plot(curves: Mapping[str, Curve], width: int = 60, height: int = 8) -> list[list[tuple[str, str]]]:
    """Lines of (text, curve's name or ""), top to bottom. A cell belongs to the last curve that has a dot in it."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return []
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    tall = (high - low) or 1.0
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for name, curve in curves.items():
        for x, y in curve:
            column = min(2 * width - 1, int(x / right * 2 * width))
            row = min(4 * height - 1, int((high - y) / tall * 4 * height))
            place = (row // 4, column // 2)
            cells[place] = (cells.get(place, (0, ""))[0] | DOTS[row % 4][column % 2], name)
    lines = []
    for row in range(height):
        label = f"{high - row * tall / max(1, height - 1):6.2f} "
        line = [(label, "")]
        for column in range(width):
            dots, name = cells.get((row, column), (0, ""))
            line.append((chr(BRAILLE + dots) if dots else " ", name))
        lines.append(line)
    return [*lines, [(f"{'':7}0 s{f'{right:.0f} s':>{width - 3}}", "")]]


def draw_picture(runs: dict[str, list[dict[str, Any]]], path: Path) -> bool:
    """Loss over time, and the share of communication in a step; False where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    losses = {
        name: list(zip([line["seconds"] for line in lines], smooth([line["loss"] for line in lines]), strict=True))
        for name, lines in runs.items()
    }
    shares = (("", name, 100 * lines[-1]["share"]) for name, lines in runs.items())
    panels: list[Panel] = [
        Curves("loss (running mean) over time", "seconds of training", "loss", losses, logarithmic=False),
        Bars.of("communication", "% of a step", shares),
    ]
    draw(path, "symcomm demo", panels)
    return True
