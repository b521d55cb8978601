"""The content of charts, independent of how they are drawn: `figures` draws it with matplotlib, `page` with plotly.js.

Values are as in the run (κ and accuracy as fractions, seconds); an axis with `percent` shows them in percent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's palette for colour-blind readers; series also differ in dash and marker
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A6A00", "#444444")
PALE = "#C9D3DC"
Number = float | None


@dataclass(frozen=True)
class Axis:
    label: str
    percent: bool = False
    reverse: bool = False
    log: bool = False
    whole: bool = False
    """Whole numbers only: epochs."""

    @property
    def heading(self) -> str:
        return f"{self.label} (%)" if self.percent else self.label

    def show(self, value: Any) -> str:
        """A value as a reader sees it in a table."""
        if value is None:
            return "–"
        if not isinstance(value, int | float):
            return str(value)
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


@dataclass(frozen=True)
class Series:
    """A line (with a band from `low` to `high`), or bars. `colour` indexes COLOURS; −1 is pale, for the background."""

    label: str
    x: tuple[Any, ...]
    y: tuple[Number, ...]
    colour: int = 0
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    dashed: bool = False
    markers: bool = True
    line: bool = True
    """False: markers only, whatever `markers` says."""

    @property
    def css_colour(self) -> str:
        return PALE if self.colour < 0 else COLOURS[self.colour % len(COLOURS)]


@dataclass(frozen=True)
class ReferenceLine:
    """A thin labelled line across the chart at one value of x (`vertical`) or y."""

    value: float
    label: str
    vertical: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines, or bars that overlay each other. `alt` describes the chart in a sentence."""

    key: str
    title: str
    alt: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[ReferenceLine, ...] = ()
    bars: bool = False


@dataclass(frozen=True)
class Heatmap:
    """Fractions between 0 and 1, one row per name and one column per epoch; `notes` are the cells' hover texts."""

    key: str
    title: str
    alt: str
    names: tuple[str, ...]
    epochs: tuple[int, ...]
    shares: tuple[tuple[Number, ...], ...]
    notes: tuple[tuple[str, ...], ...]
    label: str


@dataclass(frozen=True)
class MissingChart:
    """A chart without data, and the reason."""

    title: str
    reason: str


Figure = Chart | Heatmap


def short_names(names: Sequence[str], limit: int = 18) -> list[str]:
    """Tick labels: names without their common prefix, long ones cut at the front; distinct names stay distinct.

    A bare number is not a label: `features.0` stays as it is.
    """
    parts = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    if shared and any(one[shared].isdecimal() for one in parts):
        shared -= 1
    ends = [".".join(one[shared:]) for one in parts]
    cut = [end if len(end) <= limit else "…" + end[1 - limit :] for end in ends]
    return cut if len(set(cut)) == len(set(names)) else ends


def table(figure: Figure) -> tuple[list[str], Iterable[list[Any]]]:
    """Header and rows with every number of the figure, for a CSV: one row per point of a series, or per layer and epoch."""
    if isinstance(figure, Heatmap):
        cells = (
            [name, epoch, share]
            for name, shares in zip(figure.names, figure.shares, strict=True)
            for epoch, share in zip(figure.epochs, shares, strict=True)
        )
        return ["layer", "epoch", figure.label], cells
    banded = any(series.low for series in figure.series)
    header = ["series", figure.x.label, figure.y.label, *(["low", "high"] if banded else [])]
    return header, (row for series in figure.series for row in _points(series, banded))


def _points(series: Series, banded: bool) -> Iterable[list[Any]]:
    for number, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        band = [series.low[number], series.high[number]] if series.low and series.high else [None, None]
        yield [series.label, x, y, *(band if banded else [])]
