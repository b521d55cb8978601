"""Figures of a page: each as a plotly.js chart, as an SVG for print, and as a table.

A chart is a div with its traces and layout as JSON, which the page's script draws. `plotly-cartesian.min.js.gz` is plotly.js
with Cartesian charts only. Labels contain folder and layer names from the run, and plotly interprets some HTML in its texts, so
every label is escaped.
"""

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hgnp.io.atomic import as_json
from hgnp.reporting import figures
from hgnp.reporting.charts import Axis, Chart, Figure, Heatmap, MissingChart, ReferenceLine, Series, short_names

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
COLUMNS = 10  # epochs that the table of a heat map shows
INK, GRID = "#1F2933", "#E6E9EC"
_AXIS = {"gridcolor": GRID, "zeroline": False, "linecolor": "#8A949E", "ticks": "outside", "automargin": True}


def figure_view(figure: Figure | MissingChart, prefix: str, caption: str = "") -> dict[str, Any]:
    if isinstance(figure, MissingChart):
        return {"title": figure.title, "reason": figure.reason}
    header, rows = _chart_table(figure) if isinstance(figure, Chart) else _heat_table(figure)
    picture = base64.b64encode(figures.image(figures.draw(figure, titled=False), "svg")).decode()
    return {
        "title": figure.title,
        "alt": figure.alt,
        "caption": caption,
        "plot": plot(figure, f"{prefix}-{figure.key}"),
        "image": f"data:image/svg+xml;base64,{picture}",
        "header": header,
        "rows": rows,
    }


def _chart_table(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """One row for each x, one column for each series."""
    places = list(dict.fromkeys(x for series in chart.series for x in series.x))
    columns = [dict(zip(series.x, series.y, strict=True)) for series in chart.series]
    rows = [[chart.x.show(x), *(chart.y.show(column.get(x)) for column in columns)] for x in places]
    unit = " (%)" if chart.y.percent else ""
    names = [chart.y.heading] if len(chart.series) == 1 else [f"{series.label}{unit}" for series in chart.series]
    return [chart.x.heading, *names], rows


def _heat_table(heat: Heatmap) -> tuple[list[str], list[list[str]]]:
    """One row for each layer, at most COLUMNS epochs, the first and the last among them."""
    last = len(heat.epochs) - 1
    picked = sorted({round(last * n / (COLUMNS - 1)) for n in range(COLUMNS)})
    rows = [[name, *(notes[n] for n in picked)] for name, notes in zip(heat.names, heat.notes, strict=True)]
    return ["layer", *(f"epoch {heat.epochs[n]}" for n in picked)], rows


def library() -> str:
    """plotly.js, gzip in base64: a third of its size, below a megabyte with all the charts of a page."""
    return base64.b64encode(Path(__file__).with_name("plotly-cartesian.min.js.gz").read_bytes()).decode()


def plot(figure: Figure, identifier: str) -> Markup:
    """A div for the page's script to fill, with what it is to draw."""
    layout = _layout(figure)
    if isinstance(figure, Heatmap):
        traces = [_heat(figure)]
    else:
        traces = _traces(figure)
        layout |= _lines(figure)
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtons": [["zoom2d", "resetScale2d", "toImage"]],
        "toImageButtonOptions": {"format": "svg", "filename": figure.key},
    }
    text = as_json({"data": traces, "layout": layout, "config": config}).replace("<", r"\u003c")
    return Markup(
        f'<div class="plot" id="{identifier}" style="height: {layout["height"]}px">'
        f'<script type="application/json">{text}</script></div>'
    )


def _traces(chart: Chart) -> list[dict[str, Any]]:
    traces = []
    for number, series in enumerate(chart.series):
        if series.low is not None and series.high is not None:
            traces.append(_band(series))
        traces.append(_bar(chart, series) if chart.bars else _line(chart, series, number))
    return traces


def _lines(chart: Chart) -> dict[str, Any]:
    """Axes, and a dotted line for each mark."""
    x, y = {**_AXIS, **_axis(chart.x)}, {**_AXIS, **_axis(chart.y)}
    if chart.x.reverse:  # plotly's automatic range leaves room for the labels of reference lines
        low, high = (pick(value for series in chart.series for value in series.x) for pick in (min, max))
        room = 0.02 * (high - low) or 0.02
        x["range"] = [high + room, low - room]
    if chart.bars and isinstance(chart.series[0].x[0], str):
        names = chart.series[0].x
        x |= {**_names(names, 24), "showgrid": False, "tickangle": -90 if sum(map(len, names)) > 120 else "auto"}
    shapes, labels = zip(*(_mark(chart, mark) for mark in chart.marks), strict=True) if chart.marks else ((), ())
    return {"xaxis": x, "yaxis": y, "shapes": shapes, "annotations": labels}


def _mark(chart: Chart, mark: ReferenceLine) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line, and its label above the chart or at its left. On a log axis plotly wants a label's place as a logarithm."""
    line: dict[str, Any] = {"type": "line", "line": {"color": "#8A949E", "width": 1, "dash": "dot"}}
    text: dict[str, Any] = {"text": _safe(mark.label), "showarrow": False, "font": {"size": 11, "color": "#5B6670"}}
    if mark.vertical:
        line |= {"x0": mark.value, "x1": mark.value, "y0": 0, "y1": 1, "yref": "paper"}
        anchor = "right" if _at_the_right(chart, mark.value) else "left"  # where it is not cut off
        text |= {"x": mark.value, "y": 1, "yref": "paper", "xanchor": anchor, "yanchor": "bottom"}
    else:
        place = math.log10(mark.value) if chart.y.log else mark.value
        line |= {"x0": 0, "x1": 1, "xref": "paper", "y0": mark.value, "y1": mark.value}
        text |= {"x": 0, "xref": "paper", "y": place, "xanchor": "left", "yanchor": "bottom"}
    return line, text


def _at_the_right(chart: Chart, value: float) -> bool:
    """Whether a value of x is in the last fifth of the chart."""
    places = [x for series in chart.series for x in series.x]
    first, last = (max(places), min(places)) if chart.x.reverse else (min(places), max(places))
    return first != last and (value - first) / (last - first) > 0.8


def _line(chart: Chart, series: Series, number: int) -> dict[str, Any]:
    many = len(series.x) > 40
    return {
        "type": "scatter",
        "x": series.x,
        "y": series.y,
        "name": _safe(series.label),
        "legendgroup": _safe(series.label),
        "mode": "markers" if not series.line else "lines+markers" if series.markers and not many else "lines",
        "line": {"color": series.css_colour, "width": 2, "dash": "dash" if series.dashed else "solid"},
        "marker": {
            "size": 7 if series.line else 11,
            "symbol": SYMBOLS[number % len(SYMBOLS)],
            "color": series.css_colour,
        },
        "hovertemplate": _hover(chart),
    }


def _band(series: Series) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [*series.x, *reversed(series.x)],
        "y": [*(series.high or ()), *reversed(series.low or ())],
        "legendgroup": _safe(series.label),
        "showlegend": False,
        "hoverinfo": "skip",
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": f"rgba({', '.join(str(int(series.css_colour[i : i + 2], 16)) for i in (1, 3, 5))}, 0.15)",
    }


def _bar(chart: Chart, series: Series) -> dict[str, Any]:
    names = [_safe(x) if isinstance(x, str) else x for x in series.x]
    return {
        "type": "bar",
        "x": names,
        "y": series.y,
        "name": _safe(series.label),
        "marker": {"color": series.css_colour},
        "hovertemplate": _hover(chart),
    }


def _heat(heat: Heatmap) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": heat.epochs,
        "y": [_safe(name) for name in heat.names],
        "z": heat.shares,
        "customdata": [[_safe(note) for note in row] for row in heat.notes],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "colorbar": {"tickformat": ".0%", "thickness": 12, "title": {"text": _safe(heat.label), "side": "right"}},
        "hovertemplate": "%{y}<br>epoch %{x}: %{customdata}<extra></extra>",
    }


def _hover(chart: Chart) -> str:
    x, y = (":.2%" if axis.percent else "" if axis.whole else ":,.4~g" for axis in (chart.x, chart.y))
    across = "%{x}" if chart.bars and isinstance(chart.series[0].x[0], str) else f"{_safe(chart.x.label)} %{{x{x}}}"
    return f"{across}<br>{_safe(chart.y.label)} %{{y{y}}}"


def _axis(axis: Axis) -> dict[str, Any]:
    settings: dict[str, Any] = {"title": {"text": _safe(axis.label), "standoff": 8}}
    if axis.percent:
        settings["tickformat"] = ".0%" if axis.reverse else ".3~p"
    if axis.reverse:
        settings["nticks"] = 8
    if axis.log:
        settings |= {"type": "log", "tickformat": ".4~g"}
    if axis.whole:
        settings |= {"tickformat": "d"}
    return settings


def _names(names: Sequence[str], most: int) -> dict[str, Any]:
    """Short ticks for layers, at most `most` of them; the full name is shown on hover."""
    step = 1 + (len(names) - 1) // most
    ticks = [_safe(name) for name in names[::step]]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [_safe(name) for name in short_names(names)[::step]]}


def _layout(figure: Figure) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 56, "r": 12, "t": 46, "b": 48},
        "height": 380,
        "hovermode": "closest",
        "barmode": "overlay",
        "bargap": 0.15,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "dragmode": False,  # on a phone a finger on a chart scrolls the page; the button switches zooming on
    }
    if isinstance(figure, Heatmap):
        plain = {"showgrid": False, "automargin": True, "ticks": "outside"}
        layout["xaxis"] = {
            **plain,
            "title": {"text": "epoch", "standoff": 8},
            "tickformat": "d",
            "tickangle": 0,
            "nticks": 8,
        }
        layout["yaxis"] = {**plain, "autorange": "reversed", "type": "category", **_names(figure.names, 80)}
        layout["yaxis"]["tickfont"] = {"size": 11}
        layout["height"] = 150 + max(14 * len(figure.names), 120)
    else:
        layout["showlegend"] = len(figure.series) > 1
        layout["height"] += 22 * max(len(figure.series) - 2, 0)  # on a phone the legend has a line for each
    return layout


def _safe(text: str) -> str:
    return html.escape(text, quote=False)
