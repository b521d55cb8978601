"""`hgnp bench`: inference latency of full and pruned networks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hgnp.errors import InputError

if TYPE_CHECKING:
    from hgnp.io.runs import Run
    from hgnp.reporting.variants import Variant


def bench(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished run; without model.safetensors, random weights at its widths are timed. Several runs "
            "are timed in one table.",
        ),
    ],
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Batch size; repeatable. Default: the paper's, 128 on a CPU, 2000 on a GPU."
        ),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="cpu, cuda, …; repeatable. Default: all available.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="How networks run: eager, no_tf32, channels_last, compile, bf16, fp16, onnx; repeatable. Default: by device.",
        ),
    ] = None,
    weights: Annotated[
        list[float] | None,
        typer.Option(
            metavar="KEPT",
            help="Fraction of the weights that a weight-pruned network keeps; repeatable. Default: as the pruned network.",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            metavar="KEPT",
            help="Time the run's network at this fraction of the parameters instead of its final one, with random weights. "
            "Below the run's last fraction, its widths are extrapolated.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Timed calls per network.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Time inference of full and pruned networks. Weight-pruned networks are timed beside the neuron-pruned one."""
    import torch
    from rich.console import Console

    from hgnp.experiments.reload import networks_to_time, sample
    from hgnp.io import runs as folders
    from hgnp.io.atomic import as_json as text
    from hgnp.io.atomic import write_json
    from hgnp.reporting.bench import BenchEntry, bench_networks

    for kept in weights or ():
        if not 0 < kept <= 1:
            raise InputError(f"--weights must be a fraction > 0 and ≤ 1, got {kept:g}")
    if keep is not None and not 0 < keep <= 1:
        raise InputError(f"--keep must be a fraction > 0 and ≤ 1, got {keep:g}")
    stream = sys.stderr if as_json else sys.stdout
    full = networks_to_time(runs[0], keep)[0]
    by_name = len({run.name for run in runs if run.name}) == len(runs)
    entries, made_of = [], [_full_network(folders.read(run)) for run in runs]
    for number, run in enumerate(runs):
        if run.resolve() in [each.resolve() for each in runs[:number]]:
            raise InputError(f"runs must differ, got {run} twice; name each run once")
        if made_of[number] != made_of[0]:
            raise InputError(
                f"runs must start from one network, got {run} with another than {runs[0]}; time them separately"
            )
        _, small, note = networks_to_time(run, keep)
        if note == "random weights":
            print(f"{run} has no model.safetensors: timed with random weights at its widths", file=stream)
        elif note:
            print(f"{run}: {note}", file=stream)
        result = folders.read(run).result or {}
        accuracy = (result.get("after") or {}).get("metric") if keep is None else None
        kept = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in full.parameters())
        of = "" if len(runs) == 1 else f", {run.name if by_name else run}"
        if weights is None:
            entries.append(BenchEntry(f"weight-pruned{of}", kept))
        entries.append(BenchEntry(f"neuron-pruned{of}", small, accuracy, note))
    fractions = list(dict.fromkeys(weights or []))
    entries += [BenchEntry(f"weight-pruned, {kept}" if fractions[1:] else "weight-pruned", kept) for kept in fractions]
    devices = device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

    def progress(label: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r\x1b[K{done}/{total} {label}", end="" if done < total else "\r\x1b[K", file=sys.stderr, flush=True
            )

    timings = bench_networks(
        full,
        entries,
        sample(runs[0]),
        batches=batch,
        device=devices,
        variants=cast("list[Variant] | None", variant),  # validated by bench_networks
        repeats=repeats,
        progress=progress,
    )
    try:
        file = write_json(runs[0] / "bench.json", timings.as_dict())
        timings.write_csv(runs[0] / "bench.csv")
    finally:  # shown even if the files cannot be written
        Console(file=stream, width=None if stream.isatty() else 160).print(timings.table())
        if as_json:
            print(text(timings.as_dict()))
    print(f"{file} and bench.csv", file=stream)


def _full_network(run: "Run") -> tuple[Any, ...]:
    """What the latency of the run's full network depends on."""
    return run.info.get("model"), run.info["at_start"], run.info.get("input")
