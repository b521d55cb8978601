"""`hgnp weights`: convert published weights to safetensors."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def weights(
    file: Annotated[Path, typer.Argument(metavar="FILE.pth", help="State dict saved by torch.save.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT.safetensors", help="Output file, for --set weights=OUT.safetensors.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Convert published PyTorch weights to safetensors. Their pickle is not executed."""
    from hgnp.experiments.models.pth import convert
    from hgnp.io.atomic import as_json as text

    made = convert(file, out)
    named = ", matches its file name" if made.as_named else ""
    print(
        f"{made.path}: {made.tensors} tensors, {made.bytes:,} bytes, from {made.source} (SHA-256 {made.sha256}{named})",
        file=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        print(text({**vars(made), "path": str(made.path), "as_named": made.as_named}))
