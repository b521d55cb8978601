"""`hgnp presets`: what comes with hgnp."""

from typing import Annotated

import typer


def presets(name: Annotated[str | None, typer.Argument(help="Print this preset's YAML.")] = None) -> None:
    """List the experiments that come with hgnp, or print one as YAML."""
    from hgnp.cli.table import catalogue
    from hgnp.experiments import presets as known

    if name is not None:
        print(known.text(name), end="")
        return
    listed = {each: known.preset(each).about or "" for each in known.names()}
    catalogue("preset", listed)
