"""`hgnp presets`: what comes with hgnp."""

import sys
from typing import Annotated

import typer


def presets(name: Annotated[str | None, typer.Argument(help="Print this preset's YAML.")] = None) -> None:
    """List the experiments that come with hgnp, or print one as YAML."""
    from hgnp.experiments import presets as known

    if name is not None:
        print(known.text(name), end="")
        return
    listed = {each: known.preset(each).about or "" for each in known.names()}
    if not sys.stdout.isatty():
        for each, about in listed.items():
            print(f"{each}\t{about}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "what it is", box=None, padding=(0, 2, 1, 0))
    table.columns[0].no_wrap = True
    for each, about in listed.items():
        table.add_row(each, about)
    Console().print(table)
