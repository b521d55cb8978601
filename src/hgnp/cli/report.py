"""`hgnp report`: an HTML page about one or more runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output folder. Default: the run's own; required for several runs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Write a self-contained HTML page about runs. Figures are beside it as PNG, SVG and CSV."""
    from hgnp.io.atomic import as_json as text
    from hgnp.reporting.publish import report as write

    page = write(runs, out)
    figures = page.parent / "figures"
    print(f"{page}  (and {figures})", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(text({"page": str(page), "figures": str(figures)}))
