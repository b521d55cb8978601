"""Figures for papers and READMEs by matplotlib: any chart as PNG, SVG and CSV, and `outcome`, one figure that summarises a run.

pyplot's global state is not used.
"""

import io
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hgnp.errors import InputError
from hgnp.io.atomic import write, write_csv
from hgnp.io.runs import Run
from hgnp.reporting import charts, run_charts
from hgnp.reporting.charts import Axis, Chart, Figure, Heatmap, MissingChart, ReferenceLine, Series

INK, SOFT = "#1F2933", "#5B6670"
STYLE: Any = {  # Any: matplotlib types the keys as literals
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "figure.facecolor": "white",  # opaque, for dark pages
    "axes.facecolor": "white",
    "savefig.facecolor": "auto",
    "savefig.transparent": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8A949E",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": "#E6E9EC",
    "legend.frameon": False,
    "svg.hashsalt": "hgnp",  # reproducible files
}
MARKERS = "osD^vPX*"
LEGEND_WIDTH = 96
"""Characters that fit beside each other below a chart; an entry's line takes six."""
MARK_LETTER = 5.0
"""Width of a letter in a mark's label, in points, with some room."""


def draw(figure: Figure, *, titled: bool = True) -> Canvas:
    """The figure, 6.4 by 3.8 inches; a chart grows with its legend, a heat map with its layers. `titled=False` where the page
    has a heading."""
    height = 3.8 if isinstance(figure, Chart) else 1.6 + 0.2 * max(len(figure.names), 8)
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(6.4, height), layout="constrained")
        axes = canvas.add_subplot()
        _onto(figure, axes, titled)
        if isinstance(figure, Chart) and _needs_legend(figure):
            _legend_below(canvas, axes)
    return canvas


def _needs_legend(chart: Chart) -> bool:
    return len(chart.series) > 1 or any(not mark.vertical for mark in chart.marks)


def _legend_below(canvas: Canvas, axes: Axes) -> None:
    """Outside the axes, where it covers no curve however long its labels are."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, LEGEND_WIDTH - 6) for label in labels]
    columns = max(1, min(3, LEGEND_WIDTH // (6 + max(len(line) for label in labels for line in label.splitlines()))))
    rows = -(-len(labels) // columns) + sum(label.count("\n") for label in labels)
    canvas.set_figheight(canvas.get_figheight() + 0.18 * rows)
    canvas.legend(handles, labels, fontsize=9, ncols=columns, loc="outside lower left")


def outcome(run: Run) -> Canvas:
    """A run in one figure, 8 by 3.6 inches: sentence, metric and parameters kept per epoch, layer widths before and after."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(8, 3.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        canvas.suptitle(
            "\n".join(textwrap.wrap(_plain(run_charts.sentence(run)), 88)), x=0.015, ha="left", fontsize=10.5
        )
        left, right = canvas.subplots(1, 2)
        for figure, axes in ((run_charts.over_epochs(run), left), (run_charts.widths(run), right)):
            if isinstance(figure, MissingChart):
                axes.set_axis_off()
                axes.set_title(figure.title)
                axes.text(0.5, 0.5, figure.reason, ha="center", va="center", wrap=True, transform=axes.transAxes)
            else:
                _onto(figure, axes)
                if isinstance(figure, Chart) and _needs_legend(figure):
                    axes.legend(fontsize=9)
    return canvas


def image(canvas: Canvas, file_format: Literal["png", "svg"]) -> bytes:
    """The bytes of a "png" or "svg"; text in an SVG stays text."""
    file = io.BytesIO()
    with mpl.rc_context({**STYLE, "svg.fonttype": "none"}):
        canvas.savefig(file, format=file_format, dpi=200, metadata={"Date": None} if file_format == "svg" else None)
    return file.getvalue()


def save(figures: Iterable[Figure], folder: str | os.PathLike[str]) -> list[Path]:
    """Each figure as KEY.png, KEY.svg and KEY.csv."""
    written = []
    for figure in figures:
        canvas = draw(figure)
        formats: tuple[Literal["png", "svg"], ...] = ("png", "svg")
        written += [write(Path(folder, f"{figure.key}.{suffix}"), image(canvas, suffix)) for suffix in formats]
        written.append(write_csv(Path(folder, f"{figure.key}.csv"), *charts.table(figure)))
    return written


def save_outcome(run: Run, file: str | os.PathLike[str]) -> Path:
    """`outcome` as a .png or .svg file."""
    suffix = Path(file).suffix.lstrip(".")
    if suffix not in ("png", "svg"):
        raise InputError(f"file must end in .png or .svg, got {os.fspath(file)!r}")
    return write(file, image(outcome(run), cast(Literal["png", "svg"], suffix)))


def _onto(figure: Figure, axes: Axes, titled: bool = True) -> None:
    axes.set_title(_plain(figure.title) if titled else "", pad=16)  # above the labels of marks
    if isinstance(figure, Heatmap):
        _heat(figure, axes)
    else:
        _chart(figure, axes)


def _chart(chart: Chart, axes: Axes) -> None:
    named = chart.bars and isinstance(chart.series[0].x[0], str)
    for number, series in enumerate(chart.series):
        if chart.bars:
            bars = axes.bar(
                _labels(series.x), _floats(series), color=series.css_colour, label=_plain(series.label), width=0.8
            )
            if named and len(series.x) <= 12:
                axes.bar_label(bars, fmt="%g", fontsize=8, padding=1)
        else:
            _line(series, number, axes)
    _axis(chart.x, axes, "x")
    _axis(chart.y, axes, "y")
    _marks(chart.marks, axes)
    if named:
        axes.grid(visible=False, axis="x")
        crowded = sum(len(name) for name in chart.series[0].x) > 45
        axes.tick_params(
            axis="x", labelrotation=90 if crowded else 0, labelsize=7 if len(chart.series[0].x) > 20 else 8
        )


def _marks(marks: Sequence[ReferenceLine], axes: Axes) -> None:
    """Dotted lines. The label of a vertical one is above the axes, on a side where it fits beside the others; that of a
    horizontal one is in the legend."""
    style: Any = {"color": "#8A949E", "linewidth": 0.9, "linestyle": ":", "zorder": 1}
    for mark in marks:
        if not mark.vertical:
            axes.axhline(mark.value, label=_plain(mark.label), **style)
    (low, high), points = axes.get_xlim(), 72 * axes.bbox.width / axes.figure.dpi
    vertical = [mark for mark in marks if mark.vertical]
    placed = sorted(((mark.value - low) / (high - low), mark.label, mark) for mark in vertical)
    taken = 0.0  # to the left of this, in parts of the axes
    for number, (place, label, mark) in enumerate(placed):
        axes.axvline(mark.value, **style)
        needed = MARK_LETTER * len(label) / points
        end = placed[number + 1][0] if number + 1 < len(placed) else 1.0
        right = place + needed <= end or place - needed < taken
        taken = place + needed if right else place
        axes.annotate(
            _plain(label),
            (mark.value, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2 if right else -2, 2),
            textcoords="offset points",
            ha="left" if right else "right",
            fontsize=8,
            color=SOFT,
        )


def _line(series: Series, number: int, axes: Axes) -> None:
    many, drawn = len(series.x) > 40, series.line and len(series.x) > 1
    axes.plot(
        series.x,
        _floats(series),
        color=series.css_colour,
        label=_plain(series.label),
        linestyle="none" if not series.line else "--" if series.dashed else "-",
        linewidth=1.6,
        marker=MARKERS[number % len(MARKERS)] if not series.line or (series.markers and not many) else None,
        markersize=4 if series.line else 7,
        fillstyle="full" if drawn else "none",  # so that no point hides another
        markeredgewidth=1.0 if drawn else 1.6,
    )
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=series.css_colour, alpha=0.15, linewidth=0)


def _heat(heat: Heatmap, axes: Axes) -> None:
    values = [[float("nan") if share is None else share for share in row] for row in heat.shares]
    first, last = heat.epochs[0], heat.epochs[-1]
    extent = (first - 0.5, last + 0.5, len(heat.names) - 0.5, -0.5)
    axes.grid(visible=False)
    shown = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    step = 1 + (len(heat.names) - 1) // 60
    axes.set_yticks(
        range(0, len(heat.names), step), [_plain(name) for name in charts.short_names(heat.names)[::step]], fontsize=7
    )
    _axis(run_charts.EPOCH, axes, "x")
    bar = axes.figure.colorbar(shown, ax=axes, format=PercentFormatter(1.0), pad=0.02)
    bar.set_label(f"{heat.label} (%)")


def _axis(axis: Axis, axes: Axes, which: Literal["x", "y"]) -> None:
    side = axes.xaxis if which == "x" else axes.yaxis
    side.set_label_text(_plain(axis.heading))
    if axis.percent:
        side.set_major_formatter(PercentFormatter(1.0, symbol=""))
    if axis.whole:
        side.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if axis.log:
        axes.set_yscale("log")
    if axis.reverse:
        axes.invert_xaxis()


def _labels(values: Iterable[Any]) -> list[Any]:
    return [_plain(value) if isinstance(value, str) else value for value in values]


def _floats(series: Series) -> list[float]:
    return [float("nan") if value is None else float(value) for value in series.y]


def _plain(text: str) -> str:
    """Escapes `$`, which matplotlib reads as mathematics."""
    return text.replace("$", r"\$")
