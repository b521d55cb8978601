"""Training steps on a CPU: contiguous or channels last, one thread or two, operation by operation or compiled.

    python benchmarks/cpu.py [--budget 40] [--only digits vgg16-32 …] [--no-compile] [--out benchmarks/cpu.md]

All ways of a network are timed in turns in one process, so that they meet the same conditions; numbers are medians over the
turns. The learning rate is 0: every turn does the same work, on the same penalised block. *Half*: half of the neurons removed at
random, as in the middle of a run, which leaves odd widths. The compiler's caches are off; its seconds are those of a first run.
"""

import argparse
import copy
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.experiments.models import VGG16, DigitsNet, ResNet18
from hgnp.timing import side_by_side

DEVICE = torch.device("cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
CIFAR, DIGITS = (3, 32, 32), (1, 8, 8)
CASES: dict[str, tuple[str, Callable[[], nn.Module], bool, tuple[int, ...], int]] = {
    "digits": ("DigitsNet", DigitsNet, False, DIGITS, 64),
    "digits-half": ("DigitsNet, half", DigitsNet, True, DIGITS, 64),
    "vgg16-32": ("VGG-16-BN", VGG16, False, CIFAR, 32),
    "vgg16-128": ("VGG-16-BN", VGG16, False, CIFAR, 128),
    "vgg16-half": ("VGG-16-BN, half", VGG16, True, CIFAR, 128),
    "resnet18-32": ("ResNet-18", ResNet18, False, CIFAR, 32),
    "resnet18-128": ("ResNet-18", ResNet18, False, CIFAR, 128),
    "resnet18-half": ("ResNet-18, half", ResNet18, True, CIFAR, 128),
}
SHORT = 0.05  # seconds; shorter steps are timed several at a time


def made(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    _, make, half, shape, batch = CASES[case]
    torch.manual_seed(0)
    net = make()
    if half:
        neurons = hgnp.Neurons(net, torch.randn(2, *shape))
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        neurons.remove(neurons.least(scores, neurons.count // 2))
    return net, torch.randn(batch, *shape), torch.randint(0, 10, (batch,))


def trained(net: nn.Module, backward: Callable[[], object]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward()
        optimizer.step()

    return step


def plain(net: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], None]:
    return trained(net, lambda: F.cross_entropy(forward(x), y).backward())


def inference(forward: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            forward(x)

    return call


def medians(calls: dict[str, tuple[int, Callable[[], None]]], budget: float) -> dict[str, tuple[float, float]]:
    """Way → milliseconds of a step and half the width of their middle half; a way is a number of threads and a step."""
    times = {}
    for way, (threads, step) in calls.items():
        torch.set_num_threads(threads)
        step()
        start = time.perf_counter()
        step()
        times[way] = time.perf_counter() - start
    many = max(1, round(SHORT / min(times.values())))

    def timed(threads: int, step: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            torch.set_num_threads(threads)
            for _ in range(many):
                step()

        return call

    found = side_by_side([timed(*call) for call in calls.values()], device=DEVICE, repeats=40, warmup=1, budget=budget)
    return {way: (t.median / many, (t.high - t.low) / 2 / many) for way, t in zip(calls, found, strict=True)}


def formats_and_threads(case: str, budget: float) -> list[str]:
    net, x, y = made(case)
    name, *_, batch = CASES[case]
    rows = []
    for kind, mu in (("plain", 0.0), ("HGNP", 1e-3)):
        calls: dict[str, tuple[int, Callable[[], None]]] = {}
        blocks: set[str | None] = set()
        for label, form in FORMATS.items():
            mine = copy.deepcopy(net).to(memory_format=form)
            data = x.contiguous(memory_format=form)
            flat = hgnp.Flatness(mine, mu=mu)
            step = trained(mine, lambda flat=flat, data=data: flat.backward(data, y))
            for threads in (1, 2):
                calls[f"{label}, {threads}"] = (threads, step)
            step(), step()
            blocks.add(flat.block)
        assert len(blocks) == 1, blocks
        found = medians(calls, budget)
        base = found["contiguous, 2"][0]
        cells = [f"{ms:.1f} ± {spread:.1f} ({base / ms:.2f}×)" for ms, spread in found.values()]
        rows.append(f"| {name} | {batch} | {kind} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def compiled(case: str, budget: float, threads: int = 2) -> list[str]:
    """Seconds of compiling, milliseconds before and after, and after how many calls it has paid."""
    name, *_, batch = CASES[case]
    rows = []
    for label, form in FORMATS.items():
        for kind in ("plain step", "validation batch"):
            net, x, y = made(case)
            net, x = net.to(memory_format=form), x.contiguous(memory_format=form)
            torch.set_num_threads(threads)
            torch._dynamo.reset()
            fast = torch.compile(net)
            if kind == "plain step":
                before, after = plain(net, net, x, y), plain(net, fast, x, y)
            else:
                net.eval()
                before, after = inference(net, x), inference(fast, x)
            start = time.perf_counter()
            after()
            seconds = time.perf_counter() - start
            found = medians({"before": (threads, before), "after": (threads, after)}, budget / 2)
            (slow, _), (quick, _) = found.values()
            saved = slow - quick
            pays = f"{seconds * 1e3 / saved:,.0f}" if saved > 0.02 * slow else "never"
            rows.append(
                f"| {name} | {batch} | {label} | {kind} | {slow:.1f} | {quick:.1f} | {slow / quick:.2f}× | {seconds:.0f} | {pays} |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds a network and kind of step")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "# Steps on a CPU", "",
        f"`python benchmarks/cpu.py {' '.join(sys.argv[1:])}`, {datetime.date.today()}, {os.cpu_count()} cores "
        f"({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}.", "",
        (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n", " "), "",
        "## Memory format and threads", "",
        "Milliseconds of a step with SGD, ± half of the interquartile range, and how many times as fast as contiguous with two "
        "threads.", "",
        "| network | batch | step | contiguous, 1 thread | contiguous, 2 | channels last, 1 | channels last, 2 |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for case in args.only:
        lines += formats_and_threads(case, args.budget)
    if not args.no_compile:
        lines += [
            "", "## torch.compile", "", "Two threads.", "",
            "| network | batch | format | what | as it is, ms | compiled, ms | | seconds to compile | pays after calls |",
            "|---|--:|---|---|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        for case in args.only:
            lines += compiled(case, args.budget)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
