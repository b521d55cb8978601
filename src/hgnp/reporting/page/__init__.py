"""Self-contained HTML pages: charts by plotly.js, embedded compressed; the same charts by matplotlib for print and for browsers
without scripts; tables of the numbers.

Texts from runs are escaped (jinja2's autoescape), and the content security policy forbids network requests.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import hgnp
from hgnp.errors import InputError
from hgnp.io.atomic import write
from hgnp.io.runs import Run
from hgnp.reporting.compare import Comparison
from hgnp.reporting.page import plots
from hgnp.reporting.page.paper_view import paper_view
from hgnp.reporting.page.run_view import run_view
from hgnp.reporting.page.study_view import comparison_view
from hgnp.reporting.paper.report import PaperReport


def write_report(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """A page about one or several runs: outcome, charts, before and after, recipe."""
    if not runs:
        raise InputError("runs must hold at least one run, got none")
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    views = [run_view(run, f"run{number}") for number, run in enumerate(runs, 1)]
    return _write("report.html", {"title": title, "runs": views}, path)


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """A page that compares runs: curves, differences, areas, crossings, the hybrid and its limitations."""
    return _write("comparison.html", comparison_view(comparison), path)


def write_paper(report: PaperReport, path: str | os.PathLike[str]) -> Path:
    """A page with the paper's numbers next to ours, the deviations of the runs, and verdicts."""
    return _write("paper.html", paper_view(report), path)


def _write(template: str, view: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    environment = Environment(
        loader=PackageLoader("hgnp.reporting.page", "."), autoescape=True, undefined=StrictUndefined
    )
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    text = environment.get_template(template).render(
        style=Markup(style), library=Markup(plots.library()), version=hgnp.__version__, **view
    )
    return write(path, text)
