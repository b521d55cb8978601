"""What data-parallel training sends: bytes and collectives per step by choice on 1, 2 and 4 processes, beside plain DDP; and on
a GPU what a one-rank nccl group costs, operation by operation and from CUDA graphs.

    python benchmarks/scaling.py > benchmarks/scaling.md
    python benchmarks/scaling.py --gpu >> benchmarks/scaling.md

ResNet-18 for CIFAR on images of 8 × 8, which changes neither: both depend on the network's parameters alone.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.execution.eager import Eager
from hgnp.execution.executor import Executor
from hgnp.execution.graphed import Graphed
from hgnp.execution.process_group import ProcessGroupReducer, initialise
from hgnp.experiments.models import ResNet18
from hgnp.reducer import LOCAL, Reducer

CHOICES: dict[str, dict[str, Any]] = {
    "no penalty": {"mu": 0.0},
    "lagged v, refresh_every=8": {"refresh_every": 8},
    "lagged v, refresh_every=1": {},
    "paper": {"flatness": "paper"},
    "SAM": {},
}
BATCH = 4


class CountingReducer(ProcessGroupReducer):
    """Counts what this rank sends."""

    calls = size = 0

    def _all_reduced(self, flat: Tensor) -> Tensor:
        self.calls, self.size = self.calls + 1, self.size + flat.numel() * flat.element_size()
        return super()._all_reduced(flat)


class ForcedReducer(ProcessGroupReducer):
    """One rank that sums as several do: its sums are its own numbers, but they go through the group."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = 2


def batches(n: int, side: int = 8, batch: int = BATCH, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(n, batch, 3, side, side, generator=draws).to(device)
    return list(zip(x, torch.randint(0, 10, (n, batch), generator=draws).to(device), strict=True))


def made(choice: str, net: nn.Module, reducer: Reducer) -> tuple[Step, State]:
    if choice == "SAM":
        return SAMStep(net, reducer=reducer), State(0.0, 0.0, Direction(net))
    return make_step(net, reducer=reducer, **{"mu": 1e-3, "bound": 0.0} | CHOICES[choice])


def counted(choice: str) -> dict[str, float]:
    """Means over steps after the first, whose v has no predecessor."""
    torch.manual_seed(0)
    reducer = CountingReducer()
    eager = Eager(*made(choice, net := ResNet18(), reducer))
    steps = CHOICES[choice].get("refresh_every", 2)
    refreshes, of_refreshes = 0, 0
    for number, (x, y) in enumerate(batches(steps + 1)):
        before = reducer.calls
        net.zero_grad()
        eager.backward(x, y)
        if number == 0:
            reducer.calls = reducer.size = 0
        elif eager.state.plan.refresh:
            refreshes, of_refreshes = refreshes + 1, of_refreshes + reducer.calls - before
    return {
        "calls": reducer.calls / steps,
        "per refresh": of_refreshes / refreshes if refreshes else 0.0,
        "bytes": reducer.size / steps,
    }


def ddp() -> dict[str, float]:
    found = {"calls": 0.0, "per refresh": 0.0, "bytes": 0.0}

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found["calls"] += 1
        found["bytes"] += bucket.buffer().numel() * bucket.buffer().element_size()
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(ResNet18())
    net.register_comm_hook(None, hook)
    for x, y in batches(3):
        nn.functional.cross_entropy(net(x), y).backward()
    return {name: value / 3 for name, value in found.items()}


def worker() -> None:
    torch.set_num_threads(1)
    initialise()
    rows = {"DDP": ddp()} | {choice: counted(choice) for choice in CHOICES}
    if dist.get_rank() == 0:
        print(json.dumps(rows))


def launch(ranks: int) -> dict[str, dict[str, float]]:
    if ranks == 1:
        return {name: {"calls": 0.0, "per refresh": 0.0, "bytes": 0.0} for name in ("DDP", *CHOICES)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker"], env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in processes]
    found: dict[str, dict[str, float]] = json.loads(texts[0].splitlines()[-1])
    return found


WARM, EACH, REPEATS = 48, 16, 6
"""Steps until all graphs are there; steps that are timed at a time, two refreshes at refresh_every=8; how many times."""


class Timed:
    """Steps of a run on a GPU, with the optimizer's."""

    def __init__(self, choice: str, reducer: Reducer, *, graphs: bool) -> None:
        torch.manual_seed(0)
        net = ResNet18().cuda().to(memory_format=torch.channels_last)
        step, state = made(choice, net, reducer)
        self.executor: Executor = (Graphed if graphs else Eager)(step, state, autocast)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.times: list[float] = []

    def steps(self, data: list[tuple[Tensor, Tensor]]) -> float:
        """Milliseconds per step."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        with self.executor.running():
            for x, y in data:
                self.executor.zero_grad()
                self.executor.backward(x, y)
                self.executor.optimizer_step(self.optimizer)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / len(data)


def autocast() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def overhead() -> str:
    """Milliseconds of a step on a GPU without a group, and with one of one rank, timed alternately."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    head = "| choice | steps | one process, ms | one-rank nccl group, ms | ratio |"
    lines = ["", "## One rank on a GPU", "", COMMAND, "", head, "|---|---|---|---|---|"]
    data = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches(WARM, 32, 128, "cuda")]
    for choice in CHOICES:
        for graphs in (False, True):
            both = [Timed(choice, reducer, graphs=graphs) for reducer in (LOCAL, ForcedReducer())]
            for timed in both:
                timed.steps(data)
            for _ in range(REPEATS):
                for timed in both:
                    timed.times.append(timed.steps(data[:EACH]))
            refused = [timed.executor.refused for timed in both if isinstance(timed.executor, Graphed)]
            assert not any(refused), refused
            alone, ranks = (statistics.median(timed.times) for timed in both)
            how = "CUDA graphs" if graphs else "eager"
            lines.append(f"| {choice} | {how} | {alone:.2f} | {ranks:.2f} | {ranks / alone:.2f} |")
    dist.destroy_process_group()
    return "\n".join([*lines, "", f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}."])


COMMAND = (
    "`python benchmarks/scaling.py --gpu`: ResNet-18, CIFAR-10's shapes, 128 samples, bf16, the optimizer's step included,\n"
    "medians. The group's sums go through nccl, as if there were two ranks."
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker()
        return
    if given.gpu:
        print(overhead())
        return
    print("# Data-parallel training: what is sent\n")
    print(
        f"`python benchmarks/scaling.py > benchmarks/scaling.md`, {date.today()}, torch {torch.__version__}, gloo, ResNet-18"
    )
    print(
        "(11.2 million parameters), all steps between two refreshes. A single process sends nothing. A refresh is counted"
    )
    print("with the sums of the step that it is in: n and w, C and q, gradients.\n")
    print("| choice | processes | collectives per step | per refresh | MB per step and rank | over DDP |")
    print("|---|---|---|---|---|---|")
    for ranks in (1, 2, 4):
        rows = launch(ranks)
        for name, row in rows.items():
            beside = f"{row['bytes'] / rows['DDP']['bytes'] - 1:+.1%}" if ranks > 1 else "–"
            each = f"{row['per refresh']:.0f}" if row["per refresh"] else "–"
            print(
                f"| {name} | {ranks} | {row['calls']:.1f} | {each} | {row['bytes'] / 1e6:.2f} | {beside} |", flush=True
            )


if __name__ == "__main__":
    main()
