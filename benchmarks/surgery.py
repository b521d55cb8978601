"""How long finding and removing neurons takes.

    python benchmarks/surgery.py [--out benchmarks/surgery.md] [--profile MODEL]

Three figures: building `Neurons` for ResNet-50 at 224 px, removing half its neurons, and removing 100 neurons from VGG-16
against one training step of batch 128 on CIFAR-size images. The last is a ratio of two times from the same run, so that it
holds on a slow or busy machine too. Then what a round that removes one neuron does on the host beside the passes of its
scores: finding gates, choosing and verifying the cut, removing. `--profile` says where the time goes instead.
"""

import argparse
import copy
import cProfile
import datetime
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hgnp
from hgnp.experiments.models import VGG16, AlexNet, ResNet18
from models import torchvision, vgg16_cifar


@dataclass(frozen=True)
class Time:
    """Wall time and CPU time in seconds: the second hardly depends on what else the machine does."""

    clock: float
    processor: float


def timed(work: Callable[[], object]) -> Time:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return Time(time.perf_counter() - clock, time.process_time() - processor)


def median(times: Sequence[Time]) -> Time:
    return Time(statistics.median(t.clock for t in times), statistics.median(t.processor for t in times))


def half(neurons: hgnp.Neurons) -> hgnp.Selection:
    return neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, neurons.count // 2)


def resnet50(repeats: int) -> tuple[Time, Time]:
    """Median seconds to build `Neurons` and to remove half."""
    x = torch.randn(1, 3, 224, 224)
    build, remove = [], []
    whole = torchvision.models.resnet50()
    for _ in range(repeats):
        net = copy.deepcopy(whole)
        build.append(timed(lambda net=net: hgnp.Neurons(net, x)))
        neurons = hgnp.Neurons(net, x)
        selection = half(neurons)
        remove.append(timed(lambda neurons=neurons, selection=selection: neurons.remove(selection)))
    return median(build), median(remove)


def vgg16(repeats: int) -> tuple[Time, Time]:
    """Median seconds of one training step of batch 128 and of removing 100 neurons, measured alternately."""
    net = vgg16_cifar()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    neurons = hgnp.Neurons(net, x[:2])
    steps, removals = [], []

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def remove() -> None:
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        neurons.remove(neurons.least(scores, 100), optimizer)

    step()
    for _ in range(repeats):
        steps.append(timed(step))
        removals.append(timed(remove))
    return median(steps), median(removals)


def rounds(net: nn.Module, x: torch.Tensor, repeats: int) -> dict[str, Time]:
    """Median seconds, by part, of removing one neuron of a linear or convolutional layer at a time."""
    neurons = hgnp.Neurons(net, x)
    parts: dict[str, list[Time]] = {"gates": [], "selection": [], "removal": []}
    for number in range(repeats + 2):
        scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
        found: list[hgnp.Selection] = []
        times = {
            "gates": timed(neurons.gates),
            "selection": timed(lambda scores=scores, found=found: found.append(neurons.least(scores, 1))),
            "removal": timed(lambda found=found: neurons.remove(found[0])),
        }
        if number > 1:  # the first rounds find what the others look up
            for part, time_ in times.items():
                parts[part].append(time_)
    return {part: median(values) for part, values in parts.items()}


def profile(net: nn.Module, x: torch.Tensor) -> None:
    """Print where building and removing spend their time."""
    for title in ("Neurons(…)", "remove(half)"):
        profiler = cProfile.Profile()
        if title == "Neurons(…)":
            neurons = profiler.runcall(hgnp.Neurons, net, x)
        else:
            profiler.runcall(neurons.remove, half(neurons))
        print(f"\n{type(net).__name__}: {title}")
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(r"hgnp|unique|tree_map|_dispatch_impl", 28)


def report(build: Time, remove: Time, step: Time, removal: Time, by_net: dict[str, dict[str, Time]]) -> str:
    rows = [
        ("`Neurons` for ResNet-50 at 224 px", build, "6 s"),
        ("removing half of its neurons, after `least` has tried the cut", remove, "1 s"),
        ("one training step of VGG-16 (32 px), batch 128", step, ""),
        ("removing 100 neurons from it, selection included", removal, "one step"),
    ]
    lines = [f"| {what} | {time.clock:.2f} s | {time.processor:.2f} s | {wanted} |" for what, time, wanted in rows]
    return (
        "# Surgery: how long it takes\n\n"
        f"Measured {datetime.date.today()} with `python benchmarks/surgery.py --out benchmarks/surgery.md`, "
        f"{torch.get_num_threads()} threads "
        f"of a two-core machine, Python {platform.python_version()}, torch {torch.__version__}; "
        "medians.\n\n| what | wall time | CPU time | target |\n|---|--:|--:|--:|\n"
        + "\n".join(lines)
        + f"\n\nRemoving / training step, in the same run: {removal.clock / step.clock:.2f} in wall time.\n\n"
        "## A round that removes one neuron, beside the passes of its scores\n\n"
        "CPU time, one thread. Removal copies the weights, which takes most of it in AlexNet's linear layers.\n\n"
        "| network | gates | selection, verified | removal |\n|---|--:|--:|--:|\n"
        + "".join(
            f"| {name} | {' | '.join(f'{1e3 * time.processor:.1f} ms' for time in parts.values())} |\n"
            for name, parts in by_net.items()
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", metavar="MODEL", help="a torchvision model to profile instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    if arguments.profile:
        profile(torchvision.models.get_model(arguments.profile), torch.randn(1, 3, 224, 224))
        return
    times = *resnet50(arguments.repeats), *vgg16(arguments.repeats)
    torch.set_num_threads(1)  # waiting threads would count as CPU time
    small, large = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 63, 63)
    by_net = {
        type(net).__name__: rounds(net, x, 4 * arguments.repeats)
        for net, x in ((AlexNet(), large), (VGG16(), small), (ResNet18(), small))
    }
    torch.set_num_threads(2)
    text = report(*times, by_net)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
