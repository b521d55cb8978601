"""A chart as the template needs it: interactive, as a picture for print, and as a table."""

import base64
from typing import Any

from hgnp.reporting import figures
from hgnp.reporting.charts import Absent, Chart, Figure, Heat
from hgnp.reporting.page import plots

COLUMNS = 10  # epochs that a heat map's table shows


def figure_view(figure: Figure | Absent, prefix: str, caption: str = "") -> dict[str, Any]:
    if isinstance(figure, Absent):
        return {"title": figure.title, "reason": figure.reason}
    header, rows = _chart_table(figure) if isinstance(figure, Chart) else _heat_table(figure)
    picture = base64.b64encode(figures.image(figures.draw(figure, titled=False), "svg")).decode()
    return {
        "title": figure.title,
        "alt": figure.alt,
        "caption": caption,
        "plot": plots.plot(figure, f"{prefix}-{figure.key}"),
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


def _heat_table(heat: Heat) -> tuple[list[str], list[list[str]]]:
    """One row for each layer, at most COLUMNS epochs, the first and the last among them."""
    last = len(heat.epochs) - 1
    picked = sorted({round(last * n / (COLUMNS - 1)) for n in range(COLUMNS)})
    rows = [[name, *(notes[n] for n in picked)] for name, notes in zip(heat.names, heat.notes, strict=True)]
    return ["layer", *(f"epoch {heat.epochs[n]}" for n in picked)], rows
