"""What widths in multiples of 8 do to time and accuracy: the same preset and seed, pruned to the same target with and without.

    python benchmarks/widths.py --out benchmarks/widths.md
    python benchmarks/widths.py --nets vgg16-cifar10-short resnet18-cifar10-short --data DIR --device cuda --out FILE

Every run is `hgnp run PRESET --set recipe.round_to=M`, a process of its own. Runs that are there already are not run again, and
one that was interrupted is resumed, so this can be stopped and started again; `--out` is rewritten after each run. The pruned
networks of one seed are timed by hgnp's own bench beside the full one, alternately.
"""

import argparse
import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import hgnp
from epoch import steps as train
from hgnp.curvature.step import make_step
from hgnp.experiments.reload import networks, sample
from hgnp.io import runs
from hgnp.io.atomic import write
from hgnp.reporting.bench import BenchEntry, bench_networks
from hgnp.timing import time_interleaved
from hgnp.training.optimizers import make_optimizer
from hgnp.training.trainer import Trainer

STEP_BATCH, STEPS = 128, 8
STEP = {"per step": 1e-3, "per plain step": 0.0}


@dataclass(frozen=True)
class Row:
    """A pruned network, or the full one (multiple 0), with its times by variant."""

    net: str
    seed: int
    multiple: int
    kept: float
    accuracy: float | None
    macs: float
    """The fraction left."""
    epoch: float
    """Seconds."""
    milliseconds: Mapping[str, float | None]
    widths: Sequence[int]


def pruned(folder: Path, net: str, multiple: int, seed: int, arguments: argparse.Namespace) -> runs.Run:
    command = [sys.executable, "-m", "hgnp", "run", net, "--out", str(folder), "--resume", "--device", arguments.device]
    command += ["--seed", str(seed), "--set", f"recipe.round_to={multiple}"]
    for setting in arguments.set:
        command += ["--set", setting]
    if arguments.data is not None:
        command += ["--data", str(arguments.data)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{folder}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return runs.read(folder)


def row_of(run: runs.Run, net: str, seed: int, multiple: int) -> Row:
    """A run's network, not timed yet; with a multiple of 0, the full one that it began with."""
    last, start = run.rows[-1], run.info["at_start"]
    kept = last["kept"] if multiple else 1
    # the quickest: an epoch that captures graphs anew, or meets other work on the machine, takes longer
    epoch = min((row["seconds"] for row in run.rows if row["kept"] == kept), default=float("nan"))
    if multiple == 0:
        return Row(net, seed, 0, 1.0, None, 1.0, epoch, {}, ())
    widths = tuple(last["widths"].values())
    return Row(net, seed, multiple, last["kept"], last["metric"], last["macs"] / start["macs"], epoch, {}, widths)


def steps(nets: Sequence[nn.Module], picture: Tensor, arguments: argparse.Namespace, *, mu: float) -> list[float]:
    """Milliseconds of a training step as a run makes it, all networks alternately."""
    device = torch.device(arguments.device)
    recipe = hgnp.Recipe(keep=1.0, lr=1e-4)
    calls = []
    for net in nets:
        net = net.to(device, memory_format=torch.channels_last) if device.type == "cuda" else net
        x = torch.randn(STEP_BATCH, *picture.shape, device=device)
        with torch.no_grad():
            batch = x, net.eval()(x).argmax(1)
        step, state = make_step(net, mu=mu, bound=-1.0)
        epochs = Trainer(step, state, make_optimizer(net, recipe, None), recipe, device)
        call = partial(train, epochs, itertools.repeat(batch), STEPS)
        call()  # graphs are captured
        calls.append(call)
    return [timing.median / STEPS for timing in time_interleaved(calls, device=device, repeats=arguments.repeats)]


def rows_of(net: str, seed: int, arguments: argparse.Namespace, save: Callable[[Sequence[Row]], None]) -> list[Row]:
    """The networks of one seed, timed. What is known is saved after each run and after the timing."""
    folders = {m: arguments.runs / f"{net}-{m}-{seed}" for m in arguments.multiples}
    rows: list[Row] = []
    for multiple, folder in folders.items():
        run = pruned(folder, net, multiple, seed, arguments)
        rows += [row_of(run, net, seed, m) for m in ([multiple] if rows else [0, multiple])]
        save(rows)
    first = folders[arguments.multiples[0]]
    entries = [BenchEntry(str(m), networks(folder)[1]) for m, folder in folders.items()]
    bench = bench_networks(
        networks(first)[0], entries, sample(first), batches=arguments.batch, device=arguments.device,
        variants=arguments.variants, repeats=arguments.repeats,
    )  # fmt: skip
    times: dict[str, dict[str, float | None]] = defaultdict(dict)
    for timed in bench.rows:
        times[timed["network"]][timed["variant"]] = timed["median_ms"]
    nets = [networks(first)[0], *(networks(folder)[1] for folder in folders.values())]
    for name, mu in STEP.items():
        for row, ms in zip(rows, steps(nets, sample(first)[0], arguments, mu=mu), strict=True):
            times[str(row.multiple or "full")][name] = ms
    rows = [replace(row, milliseconds=times[str(row.multiple or "full")]) for row in rows]
    save(rows)
    return rows


def line(row: Row, variants: Sequence[str]) -> str:
    cells = [row.net, str(row.seed), str(row.multiple or "full"), f"{row.kept:.2%}"]
    cells += ["" if row.accuracy is None else f"{row.accuracy:.2%}", f"{row.macs:.2%}", f"{row.epoch:.2f}"]
    times = [row.milliseconds.get(variant) for variant in (*STEP, *variants)]
    cells += ["–" if ms is None else f"{ms:.2f}" for ms in times]
    return f"| {' | '.join([*cells, ', '.join(map(str, row.widths))])} |"


def against(rows: Sequence[Row], net: str, multiple: int, base: int, variants: Sequence[str]) -> str | None:
    """What a multiple does, averaged over the seeds that have both."""
    mine, other = ({row.seed: row for row in rows if (row.net, row.multiple) == (net, m)} for m in (multiple, base))
    pairs = [(mine[seed], other[seed]) for seed in mine.keys() & other.keys()]
    if not pairs:
        return None

    def ratio(of: Sequence[tuple[float | None, float | None]]) -> str:
        found = [a / b for a, b in of if a is not None and b is not None]
        return f"{statistics.geometric_mean(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else "–"

    points = [100 * (a.accuracy - b.accuracy) for a, b in pairs if a.accuracy is not None and b.accuracy is not None]
    mean = f"{statistics.mean(points):+.2f} points ({min(points):+.2f} to {max(points):+.2f})" if points else "–"
    parts = [f"accuracy {mean.replace('-', '−')}", f"κ × {ratio([(a.kept, b.kept) for a, b in pairs])}"]
    parts += [f"MACs × {ratio([(a.macs, b.macs) for a, b in pairs])}"]
    parts += [f"seconds per epoch × {ratio([(a.epoch, b.epoch) for a, b in pairs])}"]
    for variant in (*STEP, *variants):
        times = [(a.milliseconds.get(variant), b.milliseconds.get(variant)) for a, b in pairs]
        parts.append(f"ms {variant} × {ratio(times)}")
    return f"- {net}, {multiple} against {base}, mean over {len(pairs)} seeds (range): " + "; ".join(parts) + "."


def report(rows: Sequence[Row], failures: Sequence[str], arguments: argparse.Namespace) -> str:
    where = f"{platform.machine()} with {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if arguments.device.startswith("cuda"):
        where = torch.cuda.get_device_name(arguments.device)
    base, *others = arguments.multiples
    compared = [against(rows, net, multiple, base, arguments.variants) for net in arguments.nets for multiple in others]
    heads = ["network", "seed", "multiple", "κ", "accuracy", "MACs", "s per epoch"]
    heads += [f"ms {variant}" for variant in (*STEP, *arguments.variants)]
    return "\n".join([
        "# Widths in multiples",
        "",
        f"`python {' '.join(sys.argv)}`, {datetime.date.today()}, {where}, torch {torch.__version__}.",
        "",
        f"The same preset, seed and target with `recipe.round_to` {' and '.join(map(str, arguments.multiples))}; until the "
        "first round the runs are the same. *s per epoch*: the fastest of the fine-tuning, for the full network of the "
        f"warm-up; *ms per step*: training on a batch of {STEP_BATCH} with the flatness penalty, and plain; other *ms*: "
        f"inference of a batch of {arguments.batch}; all networks of a seed alternately, medians of {arguments.repeats}.",
        "",
        f"| {' | '.join([*heads, 'widths'])} |",
        "|---|" + "--:|" * (len(heads) - 1) + "---|",
        *(line(row, arguments.variants) for row in rows),
        "",
        *(text for text in compared if text is not None),
        *(f"- Failed: {text}" for text in failures),
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["demo"], metavar="PRESET")
    parser.add_argument(
        "--multiples", nargs="+", type=int, default=[1, 8], help="the first is what others are compared with"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="the data's folder, for presets that need one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="of the inference; 256 on a CPU, 2000 on a GPU if left out")
    parser.add_argument(
        "--variants", nargs="+", help="of the bench; eager and channels_last, on a GPU bf16 too, if left out"
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to hgnp run")
    parser.add_argument("--runs", type=Path, default=Path("runs/widths"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cuda = arguments.device.startswith("cuda")
    arguments.batch = arguments.batch or (2000 if cuda else 256)
    arguments.variants = arguments.variants or ["eager", "channels_last", *(["bf16"] if cuda else [])]
    known: dict[tuple[str, int, int], Row] = {}
    failures: list[str] = []

    def save(rows: Sequence[Row] = ()) -> None:
        known.update({(row.net, row.seed, row.multiple): row for row in rows})
        if arguments.out:
            write(arguments.out, report(list(known.values()), failures, arguments))

    for net in arguments.nets:
        for seed in range(arguments.seeds):
            try:
                found = rows_of(net, seed, arguments, save)
            except (RuntimeError, ValueError, OSError) as error:
                failures.append(f"{net}, seed {seed}: {error}")
                print(failures[-1], file=sys.stderr, flush=True)
            else:
                print(*(line(row, arguments.variants) for row in found), sep="\n", flush=True)
    save()
    print(report(list(known.values()), failures, arguments))


if __name__ == "__main__":
    main()
