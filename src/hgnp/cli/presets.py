"""`hgnp presets`: the built-in configurations."""

from typing import Annotated

import typer


def presets(
    name: Annotated[str | None, typer.Argument(metavar="PRESET", help="Print this preset's YAML.")] = None,
) -> None:
    """List the built-in presets, or print one as YAML."""
    from hgnp.cli.table import print_catalog
    from hgnp.experiments import presets as built_in

    if name is not None:
        print(built_in.text(name), end="")
        return
    listed = {each: built_in.preset(each).about or "" for each in built_in.names()}
    print_catalog("preset", listed)
