"""Where the time of a run goes: its parts, and the kernels of its training steps by kind, at full width and pruned.

    python benchmarks/cost_profile.py vgg16-cifar10-best --data DIR --device cuda --kept 5 --out benchmarks/cost_profile.md
                                      [--set recipe.finetune_epochs=20] [--steps 40]

A run of the preset in a temporary folder, with timers (which wait for the device) around its training steps, rounds and their
parts, captures of CUDA graphs, validation, checkpoints and measurements (sharpness and latency). Then steps of the preset's
method under PyTorch's profiler, from the executor that a run uses: the full network, cut to `--kept` percent by L1 norms at
any width, and at multiples of 8.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hgnp
from epoch import steps
from hgnp.execution.graphs import CaptureContext
from hgnp.experiments.build import Experiment, prepare
from hgnp.experiments.overrides import resolve_config
from hgnp.io.atomic import write
from hgnp.progress import SilentProgress
from hgnp.training import pruner
from hgnp.training.data import Batches
from hgnp.training.loop import TrainingLoop
from hgnp.training.optimizers import make_optimizer
from hgnp.training.task import Task
from hgnp.training.trainer import Trainer, make_steps

PARTS: dict[str, tuple[Any, str]] = {
    "steps": (Trainer, "train"),
    "rounds": (TrainingLoop, "_prune_round"),
    "scores": (pruner, "compute_scores"),
    "selection": (hgnp.Neurons, "least"),
    "removal": (hgnp.Neurons, "remove"),
    "graph captures": (CaptureContext, "capture"),
    "freed memory": (torch.cuda, "empty_cache"),  # before a capture, where memory is short
    "validation": (TrainingLoop, "_validate"),
    "checkpoints": (TrainingLoop, "_write_checkpoint"),
    "measurements": (TrainingLoop, "_stats"),
    "snapshots": (TrainingLoop, "_take_snapshots"),
    "end": (TrainingLoop, "_finish"),
}
BESIDE = ("rounds", "scores", "selection", "removal", "validation", "checkpoints", "measurements", "end")
"""What is not training."""
KINDS = {  # by what a kernel's or an operator's name contains, the first that fits
    "optimizer": ("multi_tensor", "sgd", "_foreach", "fused_adam"),
    "norms": ("batch_norm", "bn_fw", "bn_bw", "batchnorm", "native_batch", "_tangent_kernel", "_adjoint"),
    "layout": ("nchwtonhwc", "nhwctonchw", "transpose", "pad", "contiguous"),
    "convolutions": ("conv", "dgrad", "wgrad", "fprop", "implicit_gemm", "xmma", "cudnn", "mkldnn"),
    "products": ("gemm", "cutlass", "mm", "linear", "dot"),
    "pooling": ("pool",),
    "reductions": ("reduce", "sum", "mean", "norm", "softmax", "nll", "loss"),
    "copies": ("memcpy", "memset", "copy", "fill", "cat", "index", "gather", "to_copy"),
    "elementwise": ("elementwise", "vectorized", "add", "mul", "relu", "threshold", "div", "sub", "clamp", "where"),
}


class Timers:
    """Seconds by part, of each without the parts inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._open = device, collections.Counter[str](), list[str]()
        self._since = time.perf_counter()

    def _note(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "rest"] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def around(self, part: str) -> Iterator[None]:
        self._note()
        self._open.append(part)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the methods of PARTS are timed."""
        before = {part: getattr(*place) for part, place in PARTS.items()}
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._timed(part, before[part]))
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._note()
            for part, (owner, name) in PARTS.items():
                setattr(owner, name, before[part])

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.around(part):
                return method(*args, **kwargs)

        return timed


def parts(made: Experiment) -> dict[str, float]:
    """Seconds of a whole run by part."""
    timers = Timers(torch.device(made.options["device"]))
    with tempfile.TemporaryDirectory() as folder, timers.installed():
        made.run(out=Path(folder) / "run", resume=False, progress=SilentProgress())
    return dict(timers.seconds)


def kind(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), "other")


def kernels(net: nn.Module, made: Experiment, count: int) -> tuple[dict[str, float], float]:
    """Milliseconds per step by kind of kernel (on a CPU: of operator), and of a whole step without the profiler."""
    device = torch.device(made.options["device"])
    if device.type == "cuda":  # as a run chooses
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train = Batches(made.train, "train", made.options.get("unpack"), device)
    loss = made.options.get("loss", nn.functional.cross_entropy)
    step, _, state = make_steps(net, Task(train, None, loss, None, made.options.get("output")), made.recipe)
    trainer = Trainer(step, state, make_optimizer(net, made.recipe, None), made.recipe, device)
    gpu = device.type == "cuda"
    batches = [batch for batch, _ in zip(train, range(count), strict=False)]
    with trainer.running():
        steps(trainer, batches, len(batches))  # warm: graphs are captured
        whole = steps(trainer, batches, len(batches)).seconds / len(batches)
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
            steps(trainer, batches, len(batches))
            if gpu:
                torch.cuda.synchronize(device)
    found: dict[str, float] = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in seen.key_averages():
        if gpu and event.device_type != DeviceType.CUDA:
            continue
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        found[kind(event.key)] += spent / 1e3 / len(batches)
    return found, 1e3 * whole


def cut(
    net: nn.Module, example: torch.Tensor, percent: float, round_to: int, floor: int | Mapping[str, int] = 1
) -> float:
    """Cuts to this percentage of the parameters by L1 norms, within the recipe's floor; returns what is left of the MACs."""
    neurons = hgnp.Neurons(net, example)
    macs = neurons.macs
    while neurons.kept > percent / 100:
        scores = hgnp.sensitivity(net, neurons, [], criterion="l1")
        least = neurons.least(scores, 200, round_to=round_to, floor=floor)
        if not least:
            raise SystemExit(f"--kept must be reachable, got {percent:g}; {neurons.kept:.1%} is left")
        neurons.remove(least)
    return neurons.macs / macs


def parts_table(found: dict[str, float]) -> list[str]:
    whole = sum(found.values())
    lines = ["## Parts of a run", "", "| part | seconds | share |", "|---|--:|--:|"]
    lines += [
        f"| {part} | {seconds:.1f} | {seconds / whole:.1%} |"
        for part, seconds in sorted(found.items(), key=lambda x: -x[1])
    ]
    beside = sum(found.get(part, 0.0) for part in BESIDE)
    return [
        *lines,
        "",
        f"Rounds, validation, checkpoints and measurements together: {beside / whole:.1%} (target: at most 10 %).",
        "",
    ]


def steps_table(steps_of: dict[str, tuple[dict[str, float], float]]) -> list[str]:
    lines = ["## A training step, ms", "", f"| kind | {' | '.join(steps_of)} |", "|---" + "|--:" * len(steps_of) + "|"]
    lines += [
        f"| {each} | {' | '.join(f'{kinds[each]:.3f}' for kinds, _ in steps_of.values())} |"
        for each in [*KINDS, "other"]
    ]
    lines.append(f"| sum of kernels | {' | '.join(f'{sum(kinds.values()):.3f}' for kinds, _ in steps_of.values())} |")
    lines.append(f"| whole step, not profiled | {' | '.join(f'{step:.3f}' for _, step in steps_of.values())} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of hgnp run")
    parser.add_argument("--kept", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = resolve_config(
        given.preset, data=given.data, method=given.method, settings=given.set, seed=0, device=given.device
    )
    where = (
        torch.cuda.get_device_name() if given.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    )
    command = shlex.join(["python", *sys.argv])
    head = f"`{command}`, {datetime.date.today()}, {where}, torch {torch.__version__}."
    steps_of: dict[str, tuple[dict[str, float], float]] = {}
    found: dict[str, float] = {}

    def keep() -> None:
        """What is known so far."""
        tables = [*(parts_table(found) if found else []), *steps_table(steps_of)]
        text = "\n".join(["# Where the time of a run goes", "", head, "", *tables])
        print(text, flush=True)
        if given.out is not None:
            write(given.out, text)

    for title, round_to in (("full", 0), (f"{given.kept:g} %, any width", 1), (f"{given.kept:g} %, multiples of 8", 8)):
        made = prepare(config)
        net = made.net.to(given.device)
        share = 1.0
        if round_to:
            example = next(iter(made.train))[0][:2].to(given.device)
            share = cut(net, example, given.kept, round_to, made.recipe.floor)
        steps_of[f"{title} ({share:.0%} of the MACs)"] = kernels(net, made, given.steps)
        keep()
    found |= parts(prepare(config))
    keep()


if __name__ == "__main__":
    main()
