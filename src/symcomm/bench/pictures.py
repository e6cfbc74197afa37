"""Pictures of figures, drawn with matplotlib: curves and bars, in panels beside each other."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symcomm import errors
from symcomm.preflight import check_output_file

MOST_TICKS = 8  # labels that fit below a panel
ACROSS = 3  # panels in a row
CHARACTERS = 11  # of a heading, per inch
REASON = 32  # characters per line of the reason why a curve ends
PLAIN = "{x:,.10g}"  # 1,000 and 0.01, where matplotlib would write powers of ten


@dataclass(frozen=True)
class Curves:
    """Lines through points (x, y). With ``tick``, which words an x, the x axis doubles from tick to tick. ``ends`` says
    of lines that end before others why they do."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    tick: Callable[[int], str] | None = None
    logarithmic: bool = True
    ends: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.lines)

    def draw(self, axis: Any, colors: Mapping[str, str]) -> None:
        for name, points in self.lines.items():
            label = textwrap.fill(f"{name}: {self.ends[name]}", REASON) if name in self.ends else name
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, color=colors[name])
        if self.tick:
            places = sorted({int(x) for points in self.lines.values() for x, _ in points})
            places = places[:: math.ceil(len(places) / MOST_TICKS)]
            axis.set_xscale("log", base=2)
            axis.set_xticks(places, [self.tick(x) for x in places], rotation=30, ha="right")
            axis.set_xticks([], minor=True)
        axis.set_xlabel(self.x)


@dataclass(frozen=True)
class Bars:
    """Groups of bars: group -> name of a bar -> how high it is."""

    title: str
    y: str
    groups: Mapping[str, Mapping[str, float]]
    logarithmic: bool = False

    @classmethod
    def of(cls, title: str, y: str, bars: Iterable[tuple[str, str, float]], logarithmic: bool = False) -> Bars:
        """From (group, name, how high)."""
        groups: dict[str, dict[str, float]] = {}
        for group, name, high in bars:
            groups.setdefault(group, {})[name] = high
        return cls(title, y, groups, logarithmic)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for bars in self.groups.values() for name in bars))

    def draw(self, axis: Any, colors: Mapping[str, str]) -> None:
        wide = 0.8 / len(self.names)
        for number, name in enumerate(self.names):
            mine = [(place, bars[name]) for place, bars in enumerate(self.groups.values()) if name in bars]
            places = [place + (number - (len(self.names) - 1) / 2) * wide for place, _ in mine]
            axis.bar(places, [high for _, high in mine], wide, label=name, color=colors[name])
        axis.set_xticks(range(len(self.groups)), list(self.groups), rotation=30, ha="right")


Panel = Curves | Bars


def check_picture(call: str, option: str, path: Path) -> None:
    """Refuse, before the work, a picture that could not be drawn after it."""
    if path.suffix not in (".png", ".svg"):
        raise errors.bad_argument(call, option, str(path), "a file that ends in .png or .svg")
    check_output_file(call, option, path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise errors.ResourceError(
            f"{call}: {option} needs matplotlib, which is not installed; run `pip install 'symcomm[plot]'`."
        ) from None


def draw(path: Path, heading: str, panels: Sequence[Panel]) -> None:
    """All panels in one picture with one legend; the same name has the same colour in all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    wide, high = max(7.0, 5.0 * across), 4.0 * down + 0.5  # inches
    figure, axes = pyplot.subplots(down, across, figsize=(wide, high), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    names = dict.fromkeys(name for panel in panels for name in panel.names)
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    shown: dict[str, Any] = {}  # name -> its mark in the legend
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel.draw(axis, colors)
        _finish(axis, panel)
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(4, len(shown)), fontsize=9)
    figure.suptitle(textwrap.fill(heading, int(wide * CHARACTERS)))
    figure.savefig(path)
    pyplot.close(figure)


def _finish(axis: Any, panel: Panel) -> None:
    """Labels, a grid, and numbers that are no powers of ten."""
    from matplotlib.ticker import LogFormatterSciNotation

    class Between(LogFormatterSciNotation):  # it knows which ticks between powers of ten have room
        def __call__(self, x: float, pos: int | None = None) -> str:
            return PLAIN.format(x=x) if super().__call__(x, pos) else ""

    if panel.logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(Between())
    axis.yaxis.set_major_formatter(PLAIN)
    axis.set(title=panel.title, ylabel=panel.y)
    axis.grid(alpha=0.3)
