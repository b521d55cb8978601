"""Charts drawn with plotly, as pieces of a page; plotly.js itself stands in the page once.

Labels come from folders and layers of whoever made the run, and plotly reads a little HTML in its texts: every one is escaped.
"""

import html
import math
from collections.abc import Sequence
from typing import Any

from hgnp.experiments.charts import Axis, Chart, Figure, Heat, Mark, Series, short

try:
    import plotly.graph_objects as go
    import plotly.io as pio
    from plotly.offline import get_plotlyjs
except ImportError:  # a machine without plotly can still train, compare and draw with matplotlib
    go = pio = get_plotlyjs = None

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
INK, GRID = "#1F2933", "#E6E9EC"


def library() -> str:
    """The source of plotly.js. ImportError, with the remedy, if plotly is not there."""
    if get_plotlyjs is None:
        raise ImportError("a page needs plotly, which is not installed; pip install plotly")
    source: str = get_plotlyjs()
    return source


def plot(figure: Figure, identifier: str) -> str:
    """A div and the script that fills it."""
    made = go.Figure(layout=_layout(figure))
    if isinstance(figure, Heat):
        made.add_trace(_heat(figure))
        made.update_layout(height=150 + max(14 * len(figure.names), 120))
    else:
        _chart(figure, made)
    return str(
        pio.to_html(
            made,
            full_html=False,
            include_plotlyjs=False,
            include_mathjax=False,
            div_id=identifier,
            default_width="100%",
            default_height=f"{made.layout.height}px",
            config={
                "responsive": True,
                "displaylogo": False,
                "modeBarButtons": [["zoom2d", "resetScale2d", "toImage"]],
                "toImageButtonOptions": {"format": "svg", "filename": figure.key},
            },
        )
    )


def _chart(chart: Chart, made: Any) -> None:
    for number, series in enumerate(chart.series):
        if series.low is not None and series.high is not None:
            made.add_trace(_band(series))
        made.add_trace(_bar(chart, series) if chart.bars else _line(chart, series, number))
    made.update_xaxes(**_axis(chart.x))
    made.update_yaxes(**_axis(chart.y))
    if chart.bars and isinstance(chart.series[0].x[0], str):
        names = chart.series[0].x
        made.update_xaxes(**_names(names, 24), tickangle=-90 if sum(map(len, names)) > 120 else 0)
    for mark in chart.marks:
        _mark(chart, mark, made)


def _mark(chart: Chart, mark: Mark, made: Any) -> None:
    """A dotted line with its label at the top or at the left. On a log axis plotly wants a label's place as a logarithm."""
    line = {"color": "#8A949E", "width": 1, "dash": "dot"}
    text = {"text": _safe(mark.label), "showarrow": False, "font": {"size": 11, "color": "#5B6670"}}
    if mark.vertical:
        made.add_vline(x=mark.value, line=line)
        made.add_annotation(x=mark.value, y=1, yref="paper", xanchor="left", yanchor="top", **text)
    else:
        place = math.log10(mark.value) if chart.y.log else mark.value
        made.add_hline(y=mark.value, line=line)
        made.add_annotation(x=0, xref="paper", y=place, xanchor="left", yanchor="bottom", **text)


def _line(chart: Chart, series: Series, number: int) -> Any:
    many = len(series.x) > 40
    return go.Scatter(
        x=series.x,
        y=series.y,
        name=_safe(series.label),
        legendgroup=_safe(series.label),
        mode="lines+markers" if series.markers and not many else "lines",
        line={"color": series.paint, "width": 2, "dash": "dash" if series.dashed else "solid"},
        marker={"size": 7, "symbol": SYMBOLS[number % len(SYMBOLS)]},
        hovertemplate=_hover(chart),
    )


def _band(series: Series) -> Any:
    return go.Scatter(
        x=[*series.x, *reversed(series.x)],
        y=[*(series.high or ()), *reversed(series.low or ())],
        legendgroup=_safe(series.label),
        showlegend=False,
        hoverinfo="skip",
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=f"rgba({', '.join(str(int(series.paint[i : i + 2], 16)) for i in (1, 3, 5))}, 0.15)",
    )


def _bar(chart: Chart, series: Series) -> Any:
    names = [_safe(x) if isinstance(x, str) else x for x in series.x]
    return go.Bar(x=names, y=series.y, name=_safe(series.label), marker_color=series.paint, hovertemplate=_hover(chart))


def _heat(heat: Heat) -> Any:
    return go.Heatmap(
        x=heat.epochs,
        y=[_safe(name) for name in heat.names],
        z=heat.shares,
        customdata=[[_safe(note) for note in row] for row in heat.notes],
        zmin=0,
        zmax=1,
        colorscale="Cividis",
        colorbar={"tickformat": ".0%", "thickness": 12, "title": {"text": _safe(heat.label), "side": "right"}},
        hovertemplate="%{y}<br>epoch %{x}: %{customdata}<extra></extra>",
    )


def _hover(chart: Chart) -> str:
    x, y = (":.2%" if axis.percent else "" if axis.whole else ":,.4~g" for axis in (chart.x, chart.y))
    across = "%{x}" if chart.bars and isinstance(chart.series[0].x[0], str) else f"{_safe(chart.x.label)} %{{x{x}}}"
    return f"{across}<br>{_safe(chart.y.label)} %{{y{y}}}"


def _axis(axis: Axis) -> dict[str, Any]:
    settings: dict[str, Any] = {"title": {"text": _safe(axis.label), "standoff": 8}}
    if axis.percent:
        settings["tickformat"] = ".0%" if axis.reverse else ".3~p"
    if axis.reverse:
        settings |= {"autorange": "reversed", "nticks": 8}
    if axis.log:
        settings |= {"type": "log", "exponentformat": "power"}
    if axis.whole:
        settings |= {"tickformat": "d"}
    return settings


def _names(names: Sequence[str], most: int) -> dict[str, Any]:
    """Ticks for layers, short, and at most so many; the whole name is shown at the mouse."""
    step = 1 + (len(names) - 1) // most
    ticks = [_safe(name) for name in names[::step]]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [_safe(name) for name in short(names)[::step]]}


def _layout(figure: Figure) -> dict[str, Any]:
    lines = {"gridcolor": GRID, "zeroline": False, "linecolor": "#8A949E", "ticks": "outside", "automargin": True}
    layout: dict[str, Any] = {
        "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 56, "r": 12, "t": 36, "b": 48},
        "height": 380,
        "hovermode": "closest",
        "barmode": "overlay",
        "bargap": 0.15,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "dragmode": False,  # on a phone a finger on a chart scrolls the page; the button switches zooming on
        "xaxis": lines,
        "yaxis": dict(lines),
    }
    if isinstance(figure, Heat):
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
    else:
        layout["showlegend"] = len(figure.series) > 1
    return layout


def _safe(text: str) -> str:
    return html.escape(text, quote=False)
