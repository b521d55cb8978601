"""`hgnp export`: the pruned network as ONNX or torch.export."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Output file: *.onnx for ONNX, *.pt2 for torch.export.")],
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Fix the batch size. Default: any batch size.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Export the pruned network to ONNX or torch.export. The outputs are checked."""
    import torch

    import hgnp
    from hgnp.experiments.reload import networks, sample
    from hgnp.io.atomic import as_json as text

    example = tuple(torch.stack([x] * (batch or 2)) for x in sample(run))
    made = hgnp.export(networks(run)[1], file, example, dynamic_batch=batch is None)
    opset = "" if made.opset is None else f", opset {made.opset}"
    print(
        f"{made.path}  ({made.kind}{opset}, {made.bytes / 1024:.0f} KiB, max. relative error {made.error:.1g})",
        file=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        print(text({**vars(made), "path": str(made.path)}))
