"""Steps of `epoch.py` with two checkouts of the project: is the new one slower, or larger?

    python benchmarks/before_after.py OLD NEW [--repeats 5] [--nets resnet18 vgg16] [--kept 100] [--seconds 0.3]
                                      [--methods plain Taylor SAM …] [--batch 128] [--device cuda] [--out FILE.json]

OLD and NEW are folders with src/ and benchmarks/, git or not. Each repeat measures all rows with OLD and then with NEW, every
time in a fresh process that imports that checkout's own hgnp and epoch.py. After a warm-up, in which CUDA graphs are captured,
steps are timed for some seconds; memory is the peak of these steps, by `torch.cuda.max_memory_reserved` (CUDA graphs have
pools of their own, which `max_memory_allocated` misses). Prints the medians of each row, new / old, and geometric means over
rows. Taylor is, as in epoch.py, a plain epoch with one round; its memory is not measured.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

METHODS = ["plain", "Taylor", "HGNP, default", "HGNP, preset", "HGNP, literal order", "HGNP, paper", "SAM"]
ROUND = 500  # neurons that are cut at once
Row = tuple[str, float, str]
"""Network, percent of its parameters, method."""


def measure(args: argparse.Namespace) -> None:
    """Measures all rows with the checkout that is imported, and prints each as a line of JSON."""
    import torch

    import epoch
    import hgnp
    from epoch_report import Report

    checkout = Path(args.measure).resolve()
    for module in (hgnp, epoch):
        if checkout not in Path(str(module.__file__)).resolve().parents:
            raise SystemExit(f"{module.__name__} must come from {checkout}, got {module.__file__}")
    torch.manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    bench = epoch.Bench(device, args.batch, args.seconds, Report(None, "", {}))
    graphs = "graphs" if "graphs" in inspect.signature(bench.trainer).parameters else "engine"  # its name before

    def row(net: Any, name: str, method: str) -> Iterator[dict[str, Any]]:
        bench.clean()
        held = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        epochs = bench.trainer(net, name, method, **{graphs: True})
        bench.warm(epochs)
        bench.clean()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        one = epoch.steps(epochs, bench.batches, 5).seconds / 5
        count = max(5, min(int(args.seconds / one), bench.epoch_steps))
        seen = epoch.steps(epochs, bench.batches, count)
        step = seen.seconds / count
        memory = torch.cuda.max_memory_reserved(device) - held if device.type == "cuda" else 0
        yield {"method": method, "seconds": step, "memory": memory, "blocks": dict(seen.blocks)}
        if method == "plain" and "Taylor" in args.methods:
            plain = (bench.epoch_steps - epoch.AFTER) * step
            yield {"method": "Taylor", "seconds": (plain + bench._round(epochs)) / bench.epoch_steps, "memory": 0}

    for name in args.nets:
        net = epoch.NETS[name][0]().to(device)
        for kept in sorted(args.kept, reverse=True):
            cut(hgnp, net, next(bench.batches)[0][:2], kept / 100)
            size = sum(p.numel() for p in net.parameters())
            for method in args.methods:
                if method != "Taylor":
                    for found in row(net, name, method):
                        print(json.dumps({"net": name, "kept": kept, "parameters": size} | found), flush=True)


def cut(hgnp: Any, net: Any, x: Any, kept: float) -> None:
    """Removes neurons until at most this fraction of the parameters is left."""
    if kept >= 1:
        return
    full = sum(p.numel() for p in type(net)().parameters())
    neurons = hgnp.Neurons(net, x)
    while sum(p.numel() for p in net.parameters()) > kept * full:
        least = neurons.least(hgnp.sensitivity(net, neurons, [], criterion="l1"), ROUND)
        if not least:
            raise SystemExit(f"--kept must be reachable, got {kept:.0%}, where no more neurons can go")
        neurons.remove(least)


def measured(checkout: Path, arguments: Sequence[str]) -> dict[Row, dict[str, Any]]:
    """The rows of a checkout, from a process of its own."""
    path = os.pathsep.join([str(checkout / "src"), str(checkout / "benchmarks")])
    command = [sys.executable, "-P", __file__, "--measure", str(checkout), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: measuring failed, its messages are above")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(row["net"], row["kept"], row["method"]): row for row in rows}


def compared(old: Sequence[dict[Row, dict[str, Any]]], new: Sequence[dict[Row, dict[str, Any]]]) -> Iterator[str]:
    """A Markdown table of the medians, with new / old and its geometric means."""
    yield "| network | κ | method | ms old | ms new | new / old | spread | MiB old | MiB new | new / old |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    ratios: dict[str, list[float]] = {"seconds": [], "memory": []}
    for key in old[0]:
        net, kept, method = key
        sizes = {each[key]["parameters"] for each in [*old, *new]}
        if len(sizes) > 1:
            raise SystemExit(f"{net} at {kept:g} %: the networks must be the same, got {sorted(sizes)} parameters")
        cells = []
        for what, unit in (("seconds", 1e-3), ("memory", 2**20)):
            before, after = (statistics.median(each[key][what] for each in side) for side in (old, new))
            if before:
                ratios[what].append(after / before)
                cells += [f"{before / unit:,.2f}", f"{after / unit:,.2f}", f"{after / before:.3f}"]
                cells += [spread(each[key][what] for each in old)] if what == "seconds" else []
            else:
                cells += ["–"] * 3
        yield f"| {net} | {kept:g} % | {method} | {' | '.join(cells)} |"
    yield ""
    for what, found in ratios.items():
        if found:
            yield f"{what}: geometric mean {statistics.geometric_mean(found):.3f}, largest {max(found):.3f}"


def spread(values: Iterable[float]) -> str:
    """Largest over smallest."""
    found = list(values)
    return f"{max(found) / min(found):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nets", nargs="+", default=["resnet18", "vgg16"])
    parser.add_argument("--kept", nargs="+", type=float, default=[100.0], metavar="PERCENT")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="all numbers, as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return
    if len(args.checkouts) != 2:
        parser.error(f"two checkouts must be given, OLD and NEW, got {len(args.checkouts)}")
    for checkout in args.checkouts:
        if not (checkout / "benchmarks" / "epoch.py").exists():
            parser.error(f"{checkout} must be a folder with src/ and benchmarks/epoch.py")
    passed = ["--nets", *args.nets, "--kept", *map(str, args.kept), "--methods", *args.methods,
              "--seconds", str(args.seconds), "--batch", str(args.batch), "--device", args.device]  # fmt: skip
    found: tuple[list[Any], list[Any]] = [], []
    for repeat in range(args.repeats):
        for checkout, side in zip(args.checkouts, found, strict=True):
            start = time.perf_counter()
            side.append(measured(checkout.resolve(), passed))
            print(f"{repeat + 1}: {checkout}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps([[list(each.values()) for each in side] for side in found], indent=1))
    print("\n".join(compared(*found)))


if __name__ == "__main__":
    main()
