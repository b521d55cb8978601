"""`hgnp export`: the pruned network for other runtimes."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="small.onnx, or small.pt2 for torch.export.")],
) -> None:
    """ONNX or torch.export with a free batch size, checked against the network itself."""
    import torch

    import hgnp
    from hgnp.experiments.reload import networks, sample

    example = tuple(torch.stack([x, x]) for x in sample(run))
    made = hgnp.export(networks(run)[1], file, example)
    opset = "" if made.opset is None else f", opset {made.opset}"
    print(
        f"{made.path}  ({made.kind}{opset}, {made.bytes / 1024:.0f} KiB, differs from the network by {made.error:.1g} at most)"
    )
