"""`hgnp sharpness`: the sharpness of a run's solution."""

import json
from pathlib import Path
from typing import Annotated

import typer


def sharpness(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with the dataset, if it has moved.")] = None,
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="Number of validation batches.")] = 1,
    k: Annotated[int, typer.Option(min=1, metavar="N", help="Number of eigenvalues.")] = 1,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, … Default: the run's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Compute the largest eigenvalues of the Hessian. Plain and scale-invariant, on validation data."""
    from dataclasses import asdict
    from itertools import islice

    import torch.nn.functional as F

    import hgnp
    from hgnp.experiments.reload import experiment
    from hgnp.training.data import Batches

    made = experiment(run, data, device)
    net = made.net.to(made.options["device"])
    loader = made.train if made.val is None else made.val
    few = list(islice(Batches(loader, "val", made.options.get("unpack"), next(net.parameters()).device), batches))
    options = {"loss": made.options.get("loss", F.cross_entropy), "output": made.options.get("output"), "k": k}
    results = {
        name: hgnp.sharpness(net, few, scale_invariant=scaled, **options)
        for name, scaled in (("plain", False), ("scale-invariant", True))
    }
    if as_json:
        print(json.dumps({name: asdict(each) for name, each in results.items()}))
        return
    for name, each in results.items():
        values = ", ".join(f"{value:.4g}" for value in each.eigenvalues)
        ended = "" if each.converged else ", NOT converged"
        print(f"{name}: {values}  (±{max(each.residuals):.1g}, {each.steps} Hessian-vector products{ended})")
