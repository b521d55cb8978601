"""What a chart says, apart from how it is drawn: `figures` draws it with matplotlib, `page` with plotly.js.

Values are as in the run (κ and accuracy as fractions, seconds); an axis with `percent` shows them in percent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, told apart by colour-blind readers; each series also has a dash and a marker of its own
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
    """A line (with a band from `low` to `high`), or bars. `colour` counts in COLOURS; −1 is pale, for what lies behind."""

    label: str
    x: tuple[Any, ...]
    y: tuple[Number, ...]
    colour: int = 0
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    dashed: bool = False
    markers: bool = True
    line: bool = True
    """Without: points alone, whatever `markers` says."""

    @property
    def paint(self) -> str:
        return PALE if self.colour < 0 else COLOURS[self.colour % len(COLOURS)]


@dataclass(frozen=True)
class ReferenceLine:
    """A thin line across the chart at one value of x (`vertical`) or y."""

    value: float
    label: str
    vertical: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines, or bars that overlay each other. `alt` says in a sentence what is to be seen."""

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
    """Shares between 0 and 1, a row for each name and a column for each epoch; `notes` is what to show at a cell."""

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
    """A chart that a run has no data for, and why."""

    title: str
    reason: str


Figure = Chart | Heatmap


def short(names: Sequence[str], limit: int = 18) -> list[str]:
    """Names for the ticks of an axis: without the parts that all begin with, long ones by their end; distinct if they were.

    A bare number says nothing: `features.0` stays what it is.
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
    """Header and rows with every number of the figure, for a CSV: one row a point of a series, or one a layer and epoch."""
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
