"""Training steps on a CPU: contiguous or channels last, one thread or two, operation by operation or compiled.

    python benchmarks/cpu.py [--budget 12] [--only digits-64 vgg16-32-half …] [--part formats threads compile] [--out FILE]

All variants of a network are timed alternately in one process, under the same conditions; numbers are medians over the
turns. The learning rate is 0: every turn does the same work, on the same penalised block. *Left* is the fraction of the neurons
that are left after a removal at random, as amid a run: it leaves odd widths. The compiler's caches are off, as in a first run.
"""

import argparse
import copy
import datetime
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.experiments.models import VGG16, DigitsNet, ResNet18
from hgnp.timing import time_interleaved

Step = Callable[[], object]

DEVICE = torch.device("cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
NETS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": ("DigitsNet", DigitsNet, (1, 8, 8)),
    "vgg16": ("VGG-16-BN", VGG16, (3, 32, 32)),
    "resnet18": ("ResNet-18", ResNet18, (3, 32, 32)),
}
LEFT = {"": 1.0, "half": 0.5, "fifth": 0.2}
CASES = [
    f"{net}-{batch}{'-' * bool(left)}{left}"
    for net, batches in {"digits": (64,), "vgg16": (32, 128), "resnet18": (32, 128)}.items()
    for batch in batches
    for left in LEFT
]
SHORT = 0.05  # seconds; shorter steps are timed several at a time


def made(case: str) -> tuple[nn.Module, Tensor, Tensor]:
    net_name, batch, left, *_ = [*case.split("-"), ""]
    _, make, shape = NETS[net_name]
    torch.manual_seed(0)
    net = make()
    if left:
        neurons = hgnp.Neurons(net, torch.randn(2, *shape))
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        neurons.remove(neurons.least(scores, round(neurons.count * (1 - LEFT[left]))))
    return net, torch.randn(int(batch), *shape), torch.randint(0, 10, (int(batch),))


def head(case: str) -> str:
    net, batch, left, *_ = [*case.split("-"), ""]
    return f"| {NETS[net][0]} | {batch} | {LEFT[left]:g} |"


def trained(net: nn.Module, backward: Step) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward()
        optimizer.step()

    return step


def backward(forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    F.cross_entropy(forward(x), y).backward()


def in_both_formats(case: str, mu: float) -> dict[str, Step]:
    net, x, y = made(case)
    steps: dict[str, Step] = {}
    blocks = set()
    for label, form in FORMATS.items():
        mine = copy.deepcopy(net).to(memory_format=form)  # type: ignore[call-overload]
        flat = hgnp.Flatness(mine, mu=mu)
        data = x.contiguous(memory_format=form)
        steps[label] = trained(mine, partial(flat.backward, data, y))
        steps[label](), steps[label]()
        blocks.add(flat.block)
    assert len(blocks) == 1, blocks
    return steps


def medians(steps: list[Step], budget: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Milliseconds of a step of each kind."""
    start = time.perf_counter()
    steps[0]()
    many = max(1, round(SHORT / (time.perf_counter() - start)))

    def repeated(step: Step) -> Step:
        return lambda: [step() for _ in range(many)]

    found = time_interleaved(
        [repeated(step) for step in steps], device=DEVICE, repeats=60, warmup=1, budget=budget, clock=clock
    )
    return [timing.median / many for timing in found]


def formats(case: str, budget: float) -> list[str]:
    torch.set_num_threads(1)
    rows = []
    for kind, mu in (("plain", 0.0), ("HGNP", 1e-3)):
        one, other = medians(list(in_both_formats(case, mu).values()), budget, time.process_time)
        rows.append(f"{head(case)} {kind} | {one:.1f} | {other:.1f} | {one / other:.2f}× |")
    return rows


def threads(case: str, budget: float) -> list[str]:
    def with_threads(number: int, step: Step) -> Step:
        def call() -> None:
            torch.set_num_threads(number)
            step()

        return call

    rows = []
    for kind, mu in (("plain", 0.0), ("HGNP", 1e-3)):
        steps = [with_threads(n, step) for step in in_both_formats(case, mu).values() for n in (1, 2)]
        a, b, c, d = medians(steps, budget)
        rows.append(f"{head(case)} {kind} | {a:.1f} | {b:.1f} | {a / b:.2f}× | {c:.1f} | {d:.1f} | {c / d:.2f}× |")
    return rows


def compiled(case: str, budget: float) -> list[str]:
    """Seconds of compiling, milliseconds before and after, and after how many calls it has paid."""
    torch.set_num_threads(1)
    torch.compile(lambda x: x + 1)(torch.zeros(8))  # what is built once a process is no part of it
    rows = []
    for label, form in FORMATS.items():
        for kind in ("plain step", "validation"):
            net, x, y = made(case)
            net, x = net.to(memory_format=form), x.contiguous(memory_format=form)  # type: ignore[call-overload]
            torch._dynamo.reset()
            plain = kind == "plain step"
            net.train(plain)
            steps = [
                trained(net, partial(backward, forward, x, y)) if plain else partial(torch.no_grad()(forward), x)
                for forward in (net, torch.compile(net))
            ]
            start = time.perf_counter()
            steps[1]()
            seconds = time.perf_counter() - start
            slow, quick = medians(steps, budget, time.process_time)
            calls = f"{seconds * 1e3 / (slow - quick):,.0f}" if slow > 1.02 * quick else "–"
            rows.append(
                f"{head(case)} {label} | {kind} | {slow:.1f} | {quick:.1f} | {slow / quick:.2f}× | {seconds:.0f} | {calls} |"
            )
    return rows


PARTS: dict[str, tuple[Callable[[str, float], list[str]], list[str]]] = {
    "formats": (formats, [
        "## Memory format", "", "One thread, milliseconds of CPU time, as the machine was shared.", "",
        "| network | batch | left | step | contiguous | channels last | gain |", "|---|--:|--:|---|--:|--:|--:|",
    ]),
    "threads": (threads, [
        "## Threads", "", "Milliseconds of wall time.", "",
        "| network | batch | left | step | contiguous, 1 thread | 2 | gain | channels last, 1 | 2 | gain |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]),
    "compile": (compiled, [
        "## torch.compile", "", "One thread, CPU time; *to compile* in wall time.", "",
        "| network | batch | left | format | what | as it is | compiled | gain | s to compile | pays after |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|--:|",
    ]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=12.0, help="seconds for what is timed alternately")
    parser.add_argument("--only", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "# Steps on a CPU", "",
        f"`python benchmarks/cpu.py`, {datetime.date.today()}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}.", "",
        " ".join((__doc__ or "").split("\n\n")[-1].split()),
    ]  # fmt: skip
    for part in args.part:
        measure, opening = PARTS[part]
        lines += ["", *opening]
        print("\n".join(opening), flush=True)
        for case in args.only:
            lines += (rows := measure(case, args.budget))
            print("\n".join(rows), flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
