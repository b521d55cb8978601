"""Self-contained HTML pages: charts by plotly.js, embedded compressed; the same charts by matplotlib for print and for browsers
without scripts; tables of the numbers.

Texts from runs are escaped (jinja2's autoescape), and the content security policy forbids network requests.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import hgnp
from hgnp.io.atomic import write
from hgnp.reporting.page import plots


def write_page(template: str, view: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Fill a template of this folder with `view` and write the page."""
    environment = Environment(
        loader=PackageLoader("hgnp.reporting.page", "."), autoescape=True, undefined=StrictUndefined
    )
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    text = environment.get_template(template).render(
        style=Markup(style), library=Markup(plots.library()), version=hgnp.__version__, **view
    )
    return write(path, text)
