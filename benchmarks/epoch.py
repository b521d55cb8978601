"""Seconds of a training epoch: plain, Taylor, HGNP with several choices and SAM, on a GPU, at several sizes of the network.

    python benchmarks/epoch.py --out benchmarks/epoch.md [--nets resnet18 vgg16] [--kept 100 50 10 5]
                               [--only epochs memory naive] [--seconds 3] [--batch 128] [--device cuda]

Steps are those of a run (`hgnp.training.trainer`), with its precision, its loader and its flips, on random images of
CIFAR-10's shape and number; the report says how they are counted. It is written anew after every measurement. A CPU runs
steps eagerly.
"""

import argparse
import contextlib
import copy
import datetime
import gc
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hgnp
from epoch_report import Key, Measured, Report, short
from hgnp.curvature.direction import BlockChoice
from hgnp.curvature.factors import find_blocks
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import make_step
from hgnp.errors import first_line
from hgnp.execution.graphed import Graphed
from hgnp.experiments.data.loader import InMemorySource, Loader
from hgnp.experiments.models import VGG16, ResNet18
from hgnp.experiments.presets import preset
from hgnp.reference import penalized_loss
from hgnp.training.optimizers import make_optimizer
from hgnp.training.trainer import EpochStatistics, Trainer

NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18": (ResNet18, "resnet18-cifar10-fast"),
    "vgg16": (VGG16, "vgg16-cifar10-fast"),
}
ACTIVE = {"bound": -1.0, "skip_inactive": False}  # the penalty acts in every step
HGNP: dict[str, dict[str, Any]] = {  # choices beside the preset's; of the first, beside the default's
    "HGNP, default": ACTIVE,
    "HGNP, preset": ACTIVE,
    "HGNP, preset, inactive": {"bound": 1e9},
    "HGNP, preset, first block": ACTIVE,
    "HGNP, literal order": {"direction_from": "this_batch", "refresh_every": 1} | ACTIVE,
    "HGNP, paper": {"flatness": "paper", "curvature": "hessian", "direction_from": "this_batch", "refresh_every": 1}
    | ACTIVE,
}
FIRST = "HGNP, preset, first block"
METHODS = ["plain", "Taylor", *HGNP, "SAM"]
PARTS = ["epochs", "memory", "naive"]
IMAGES = 50_000
TRIAL, FEWEST = 10, 20  # steps that estimate the time of one; the fewest that are timed
ROUND, AFTER = 100, 20  # neurons of Taylor's round; steps after it that are timed with it
NAIVE_STEPS = 4


class Bench:
    def __init__(self, device: torch.device, batch: int, seconds: float, report: Report) -> None:
        self.device, self.batch, self.budget, self.report = device, batch, seconds, report
        self.epoch_steps = -(-IMAGES // batch)
        images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8)
        source = InMemorySource(images, torch.randint(0, 10, (IMAGES,)), device)
        loader = Loader(
            source, batch=batch, mean=(127.5,) * 3, std=(73.9,) * 3, device=device, shuffle=True, flip=True, drop_last=True
        )  # fmt: skip
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self.known: dict[Key, Measured] = {}

    def trainer(self, net: nn.Module, name: str, method: str, *, graphs: bool) -> Trainer:
        """A copy of `net`, trained as a run would."""
        own = copy.deepcopy(net).to(memory_format=torch.channels_last)
        step, state = make_step(own, **options(name, method))
        recipe = hgnp.Recipe(keep=1.0, lr=1e-3, execution="auto" if graphs else "eager")
        step = SAMStep(own) if method == "SAM" else step
        return Trainer(step, state, make_optimizer(own, recipe, None), recipe, self.device)

    def warm(self, epochs: Trainer, *, first: bool = False) -> None:
        steps(epochs, self.batches, 40 if epochs.executor.uses_graphs else 5, first=first)

    def measured(self, net: nn.Module, name: str, kept: float, method: str, *, graphs: bool) -> Measured:
        key = name, kept, method, graphs
        if key not in self.known:
            self.clean()
            plain = self.measured(net, name, kept, "plain", graphs=graphs) if method == "Taylor" else None
            self.known[key] = self._measure(net, name, method, plain, graphs=graphs)
        return self.known[key]

    def _measure(self, net: nn.Module, name: str, method: str, plain: Measured | None, *, graphs: bool) -> Measured:
        epochs = self.trainer(net, name, method, graphs=graphs)
        self.warm(epochs, first=method == FIRST)
        if plain is not None:
            return replace(plain, epoch=plain.epoch - AFTER * plain.step + self._round(epochs))
        first = method == FIRST
        step, count = steps(epochs, self.batches, TRIAL, first=first).seconds / TRIAL, FEWEST
        if graphs:
            count = min(max(FEWEST, int(self.budget / step)), self.epoch_steps)
        summary = steps(epochs, self.batches, count, first=first)
        step = summary.seconds / count
        how, executor = "eager", epochs.executor
        if isinstance(executor, Graphed):
            how = "graphs" if executor.refused is None else f"eager, as {executor.refused}"
        block = [f"{name} {times / count:.0%}" for name, times in summary.blocks.most_common(1)]
        return Measured(step, step * self.epoch_steps, how, block[0] if block else "–")

    def _round(self, epochs: Trainer) -> float:
        """Seconds of a round of pruning and of the steps after it."""
        batch = next(self.batches)
        neurons = hgnp.Neurons(epochs.net, batch[0][:2])
        self.wait()
        start = time.perf_counter()
        scores = hgnp.sensitivity(epochs.net, neurons, [batch])
        neurons.remove(neurons.least(scores, ROUND), epochs.optimizer)
        self.wait()
        return time.perf_counter() - start + steps(epochs, self.batches, AFTER).seconds

    def epochs(self, net: nn.Module, name: str, kept: float) -> None:
        size = f"{sum(p.numel() for p in net.parameters()):,}"
        base = self.measured(net, name, kept, "plain", graphs=True).epoch
        for graphs, method in itertools.product([True, False], METHODS):
            with self.going_on("Epochs", name, f"{kept:g} %", size, method):
                m = self.measured(net, name, kept, method, graphs=graphs)
                numbers = f"{m.step * 1e3:.2f}", f"{m.epoch:.2f}", f"{m.epoch / base:.2f}"
                self.report.add("Epochs", name, f"{kept:g} %", size, method, m.how, *numbers, m.block)

    def memory(self, net: nn.Module, name: str) -> None:
        for graphs in (True, False):
            how, base = "graphs" if graphs else "eager", None
            for method in ("plain", *HGNP):
                with self.going_on("Memory", name, how, method):
                    found = self._peak(net, name, method, graphs=graphs)
                    base = base or found
                    ratios = [f"{mine / plain:.2f}" for mine, plain in zip(found, base, strict=True)]
                    mib = [f"{number / 2**20:,.0f}" for number in found]
                    self.report.add("Memory", name, how, method, mib[0], ratios[0], mib[1], ratios[1])

    def _peak(self, net: nn.Module, name: str, method: str, *, graphs: bool) -> tuple[int, int]:
        self.clean()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        epochs = self.trainer(net, name, method, graphs=graphs)
        self.warm(epochs, first=method == FIRST)
        self.clean()
        torch.cuda.reset_peak_memory_stats()
        steps(epochs, self.batches, AFTER, first=method == FIRST)
        return torch.cuda.max_memory_allocated() - held[0], torch.cuda.max_memory_reserved() - held[1]

    def naive(self, net: nn.Module, name: str, kept: float) -> None:
        ours = {method: self.measured(net, name, kept, method, graphs=True).step for method in HGNP}
        with self.going_on("Naive", name, f"{kept:g} %"):
            naive, block = self._textbook(net)
            self.report.add("Naive", name, f"{kept:g} %", "textbook", f"{naive * 1e3:,.1f}", "", block)
            for method, step in ours.items():
                self.report.add("Naive", name, f"{kept:g} %", method, f"{step * 1e3:.2f}", f"{naive / step:.0f}", "")

    def _textbook(self, net: nn.Module) -> tuple[float, str]:
        """Seconds of a textbook step, and the block it penalised last."""
        self.clean()
        own = copy.deepcopy(net).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
        seconds = []
        with tf32():
            for x, y in itertools.islice(self.batches, 1 + NAIVE_STEPS):
                self.wait()
                start = time.perf_counter()
                optimizer.zero_grad()
                found = penalized_loss(own, x, y)
                found.objective.backward()
                optimizer.step()
                self.wait()
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:]), found.block

    @contextlib.contextmanager
    def going_on(self, title: str, *cells: str) -> Iterator[None]:
        """With the other measurements if one fails, for lack of memory, say."""
        try:
            yield
        except (RuntimeError, ArithmeticError) as error:
            self.report.add(title, *cells, f"failed: {first_line(error)}")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def steps(epochs: Trainer, batches: Iterable[tuple[Any, Any]], count: int, *, first: bool = False) -> EpochStatistics:
    """The next `count` steps of a run's training, with `first` along the first block's v whichever was chosen; `seconds` of
    what is returned are all that they took."""
    mu, direction = epochs.state.mu, epochs.state.direction

    def before_step(_: Any) -> None:
        if first and direction.pairs:
            direction.choice = BlockChoice.known(find_blocks(epochs.net)[0])

    return epochs.train(
        itertools.islice(batches, count), total=count, epoch=0, rate=None, mu=lambda _: mu, before_step=before_step,
        show=lambda *_: None,
    )  # fmt: skip


def options(name: str, method: str) -> dict[str, Any]:
    """Of Flatness."""
    if method not in HGNP:
        return {"mu": 0.0}
    if method == "HGNP, default":
        return HGNP[method]
    recipe = hgnp.Recipe(**preset(NETS[name][1]).recipe)
    bundle, choices = recipe.flatness_choices
    ours = {"refresh_every": recipe.refresh_every, "skip_inactive": recipe.skip_inactive, "flatness": bundle, **choices}
    return {"mu": recipe.mu, "bound": recipe.bound, **ours, **HGNP[method]}


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def cut(net: nn.Module, x: Tensor, kept: list[float]) -> Iterator[tuple[float, nn.Module]]:
    """The network at each of `kept` percent of its parameters, falling."""
    neurons = hgnp.Neurons(net, x)
    for percent in sorted(kept, reverse=True):
        while neurons.kept > percent / 100:
            least = neurons.least(hgnp.sensitivity(net, neurons, [], criterion="l1"), 200)
            if not least:
                raise SystemExit(f"--kept: {percent:g} was given; no less than {neurons.kept:.2%} can be left")
            neurons.remove(least)
        yield percent, net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--kept", nargs="+", type=float, default=[100.0, 50.0, 10.0, 5.0], metavar="PERCENT")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, gpu = torch.device(args.device), args.device.startswith("cuda")
    torch.manual_seed(0)
    if gpu:
        torch.cuda.set_device(torch.device("cuda", device.index or 0))

    machine = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    command = shlex.join(["python", *sys.argv])
    head = f"# Seconds per epoch\n\n`{command}`, {datetime.date.today()}, {machine}, torch {torch.__version__}."
    presets = [
        ", ".join(f"{key}={value}" for key, value in options(name, "HGNP, preset").items()) for name in args.nets
    ]
    facts = {
        "steps": -(-IMAGES // args.batch), "batch": args.batch, "seconds": args.seconds, "round": ROUND, "after": AFTER,
        "naive": NAIVE_STEPS, "precision": "bfloat16" if gpu else "float32", "presets": " and ".join(dict.fromkeys(presets)),
    }  # fmt: skip
    bench = Bench(device, args.batch, args.seconds, Report(args.out, head, facts))
    for name in args.nets:
        net = NETS[name][0]().to(device)
        for kept, smaller in cut(net, next(bench.batches)[0][:2], args.kept):
            if "epochs" in args.only:
                bench.epochs(smaller, name, kept)
            if kept == max(args.kept) and "memory" in args.only and gpu:
                bench.memory(smaller, name)
            if kept == max(args.kept) and "naive" in args.only:
                bench.naive(smaller, name, kept)
    print("\n".join(["", *short(bench.known, METHODS)]))


if __name__ == "__main__":
    main()
