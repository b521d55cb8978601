"""Training steps per second of several processes on one GPU, without and with NVIDIA's Multi-Process Service (MPS).

    python benchmarks/sharing.py --processes 4 --seconds 7 --out benchmarks/sharing.md

A step is one of plain VGG-16 training on random images: SGD with momentum, bfloat16, channels last, replayed from a CUDA graph.
Rows: one process alone; all of them without MPS; all of them with it. Each process captures its graph first and waits for the
others. MPS is started for the last row and stopped after it, in a temporary folder; a daemon that is running already is neither
used nor stopped. The last row is left out where nvidia-cuda-mps-control is missing.
"""

import argparse
import contextlib
import datetime
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from hgnp.experiments.models import VGG16
from hgnp.io.atomic import write

CONTROL = "nvidia-cuda-mps-control"
REPLAYS = 50
"""Steps between two looks at the clock."""


def load(batch: int, seconds: float) -> float:
    """Steps per second of this process. It says "ready" and starts with the next line of stdin."""
    net = VGG16(num_classes=10, form="cifar").cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    start, steps = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < seconds:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        steps += REPLAYS
    return steps / now


def together(command: Sequence[str], processes: int, environment: dict[str, str]) -> list[float]:
    """The numbers that so many processes of `command` print, each after it has said "ready" and got a line."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
                )
            )
            for _ in range(processes)
        ]
        for each in started:  # if one of them fails, before the others are waited for
            stack.callback(each.kill)
        for each in started:
            if (said := each.stdout.readline().strip()) != "ready":  # type: ignore[union-attr]
                raise SystemExit(f"a process must say that it is ready, got {said!r}; its error is above")
        for each in started:
            each.stdin.write("\n")  # type: ignore[union-attr]
            each.stdin.flush()  # type: ignore[union-attr]
        return [float(each.stdout.readline()) for each in started]  # type: ignore[union-attr]


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """An MPS daemon, and the environment in which a process uses it."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **own}
        subprocess.run([CONTROL, "-d"], env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            yield own
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, env=environment, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def no_mps() -> Iterator[dict[str, str]]:
    """An environment in which CUDA finds no daemon."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"CUDA_MPS_PIPE_DIRECTORY": folder}


def table(rows: Sequence[tuple[str, Sequence[float]]]) -> list[str]:
    """Rows of steps per second by process; the first is one process alone."""
    alone = sum(rows[0][1])
    lines = ["| processes | steps per second, together | of each | over one alone |", "|---|--:|--:|--:|"]
    for name, each in rows:
        shown = ", ".join(f"{rate:.0f}" for rate in each)
        lines.append(f"| {name} | {sum(each):.0f} | {shown} | {sum(each) / alone:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one of the processes
    given = parser.parse_args()
    if given.one:
        print(load(given.batch, given.seconds), flush=True)
        return
    command = [sys.executable, __file__, "--one", "--seconds", str(given.seconds), "--batch", str(given.batch)]
    with no_mps() as environment:
        rows = [(str(count), together(command, count, environment)) for count in (1, given.processes)]
    if shutil.which(CONTROL):
        with mps() as environment:
            rows.append((f"{given.processes}, MPS", together(command, given.processes, environment)))
    head = (
        f"`{shlex.join(['python', *sys.argv])}`, {datetime.date.today()}, one {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}: plain training steps of VGG-16 on random images, batch {given.batch}, bfloat16, CUDA "
        "graphs."
    )
    text = "\n".join(["# Several processes on one GPU", "", head, "", *table(rows), ""])
    print(text)
    if given.out:
        write(given.out, text)


if __name__ == "__main__":
    main()
