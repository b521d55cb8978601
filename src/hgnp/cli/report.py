"""`hgnp report`: a page of one run or several."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the page goes; into the run's own folder if left out.")
    ] = None,
) -> None:
    """One self-contained HTML page, with figures as PNG, SVG and CSV beside it."""
    from hgnp.reporting.publish import report as write

    page = write(runs, out)
    print(f"{page}  (and {page.parent / 'figures'})")
