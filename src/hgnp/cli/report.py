"""`hgnp report`: an HTML page about one or more runs."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder. Default: the run's own folder.")
    ] = None,
) -> None:
    """Write a self-contained HTML page about runs. Figures are beside it as PNG, SVG and CSV."""
    from hgnp.reporting.publish import report as write

    page = write(runs, out)
    print(f"{page}  (and {page.parent / 'figures'})")
