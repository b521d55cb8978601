"""What the processes of `tests/execution/test_processes.py` do, and how they are started.

Run as a script, with the environment that torchrun sets, each process goes through the cases named and writes what it saw.
"""

import contextlib
import copy
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import hgnp
from graphed_cases import Stand, graph_replays, replays, stand_in
from hgnp.errors import HgnpError
from hgnp.execution.graphed import Graphed
from hgnp.training.split import rank_slice

GLOBAL = 12
"""Samples in a global batch, whatever the ranks."""
SAMPLES, HELD_OUT = 17, 13  # the last batch has 5 samples, and 1
TIMEOUT_SECONDS = 8.0


class GhostNorm(nn.BatchNorm2d):
    """BatchNorm of one process that normalises each rank's samples by themselves, and averages the parts' statistics."""

    def __init__(self, width: int, ranks: int) -> None:
        super().__init__(width)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) < self.ranks:
            return super().forward(x)
        parts = [x[rank_slice(len(x), rank, self.ranks)] for rank in range(self.ranks)]
        found = [F.batch_norm(each, None, None, self.weight, self.bias, True, 0.0, self.eps) for each in parts]
        with torch.no_grad():
            mean = sum(each.mean((0, 2, 3)) for each in parts) / self.ranks
            var = sum(each.transpose(0, 1).flatten(1).var(1) for each in parts) / self.ranks
            self.running_mean.mul_(0.9).add_(0.1 * mean)
            self.running_var.mul_(0.9).add_(0.1 * var)
        return torch.cat(found)


class Smooth(nn.Module):
    """Without kinks: rounding never decides. `norm` makes the layers behind convolutions."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 6, 3, padding=1), norm(6)
        self.b, self.nb = nn.Conv2d(6, 8, 3, stride=2), norm(8)
        self.c, self.out = nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.na(self.a(x)))
        x = torch.tanh(self.nb(self.b(x))).mean((2, 3))
        return self.out(torch.tanh(self.c(x)))


def network(ranks: int, *, norm: bool = False) -> Smooth:
    """`ranks`: of which one process is to see the batch norms of."""
    torch.manual_seed(0)
    make = nn.BatchNorm2d if ranks == 1 else partial(GhostNorm, ranks=ranks)
    return Smooth(make if norm else lambda width: nn.Identity()).double()


def data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.double) + y.view(-1, 1, 1, 1) / 2
    return TensorDataset(x, y)


def in_order(outputs: Tensor, targets: Tensor) -> float:
    """A metric that depends on the order of the samples."""
    right = (outputs.softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)).double()
    return float((right * torch.arange(1, len(right) + 1, device=right.device)).sum())


RECIPE: dict[str, Any] = {
    "keep": 0.6, "warmup_epochs": 1, "neurons_per_round": 4, "finetune_epochs": 1, "lr": 0.1, "seed": 0, "measure": "none",
    "mu": 0.1, "bound": 0.0, "refresh_every": 1, "skip_inactive": False, "clip_norm": 2.0,
}  # fmt: skip
WEIGHTED = partial(F.cross_entropy, weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.double), ignore_index=1)
RUNS: dict[str, dict[str, Any]] = {
    "default": {"refresh_every": 2, "skip_inactive": True},
    "paper": {"flatness": "paper", "prune_unit": "steps", "prune_every": 3},
    "sam": {"method": "sam", "rho": 0.1},
    "taylor": {"method": "taylor", "score_batches": 2, "snapshots": (0.9,), "accumulate": 2},
    "norm": {"norm": True, "method": "hybrid", "threshold": 0.8},
}
"""Case → its own settings of RECIPE; `norm` and `accumulate` are not the recipe's."""
NAMES = {2: list(RUNS), 3: [name for name in RUNS if name != "norm"]}
"""Ranks → cases."""


def seen(result: hgnp.Result) -> dict[str, Any]:
    """What a run is compared by."""
    rows = [
        {key: row[key] for key in ("loss", "penalty", "val_loss", "metric", "widths", "lr")} for row in result.history
    ]
    return {
        "rows": rows,
        "weights": {
            name: tensor.clone() for name, tensor in result.model.state_dict().items() if tensor.is_floating_point()
        },
        "snapshots": [[each.metric, each.parameters] for each in result.snapshots],
    }


def run_case(
    name: str,
    ranks: int,
    *,
    batch: int = GLOBAL,
    samples: int = SAMPLES,
    execution: str = "auto",
    wrap: Any = None,
    **given: Any,
) -> dict[str, Any]:
    """A whole run. `ranks`: those that one process stands for."""
    settings = RECIPE | RUNS[name] | {"execution": execution}
    net: nn.Module = network(ranks, norm=settings.pop("norm", False))
    given["accumulate"] = settings.pop("accumulate", 1)
    train = DataLoader(data(samples, 1), batch_size=batch, shuffle=True)
    val = DataLoader(data(HELD_OUT, 2), batch_size=batch)
    result = hgnp.prune(
        net if wrap is None else wrap(net), train, val, recipe=hgnp.Recipe(**settings), metric=in_order,
        verbose=False, **given,
    )  # fmt: skip
    assert result.history[-1]["phase"] == "finetune"
    return seen(result)


def own_loop(batch: int = GLOBAL, group: Any = None) -> dict[str, Any]:
    """The recipe of docs/distributed.md, with labels that are drawn for the global batch, weighted or ignored."""
    torch.manual_seed(0 if group is None else dist.get_rank(group))  # weights are rank 0's
    net = Smooth(lambda width: nn.Identity()).double()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 6, 6, dtype=torch.double))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    flat = hgnp.Flatness(net, mu=0.1, bound=0.0, fisher_type="mc", loss=WEIGHTED, group=group)
    dataset: Any = data(2 * GLOBAL, 3)
    if group is not None:  # contiguous parts: the joint batch has the samples in the order of ranks
        wrapper = nn.parallel.DistributedDataParallel(net, process_group=group)
        wrapper(
            torch.zeros(1, 1, 6, 6, dtype=torch.double)
        )  # its hooks wait for a backward pass, and must not join hgnp's
        own = torch.arange(GLOBAL)[rank_slice(GLOBAL, dist.get_rank(group), dist.get_world_size(group))]
        dataset = Subset(dataset, torch.cat([own, own + GLOBAL]).tolist())
    losses = []
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=batch):
            optimizer.zero_grad()
            losses.append(flat.backward(x, y))
            optimizer.step()
        scores = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat)
        neurons.remove(neurons.least(scores, 3), optimizer)
    drawn = hgnp.sensitivity(net, neurons, [(x, y)], criterion="random", group=group)  # ranks have different generators
    return {"losses": losses, "scores": scores, "weights": dict(net.state_dict()), "random": drawn}


# Cases that processes alone have


def equal_runs(folder: Path) -> dict[str, Any]:
    ranks = dist.get_world_size()
    found: dict[str, Any] = {}
    for name in NAMES[ranks]:
        out = folder / f"{name}-{ranks}" if name == "taylor" else None
        wrap = nn.parallel.DistributedDataParallel if name == "sam" else None
        found[name] = run_case(name, 1, batch=GLOBAL // ranks, out=out, wrap=wrap)
    found["loaded"] = run_case("taylor", 1, batch=GLOBAL // ranks, out=folder / f"taylor-{ranks}", resume=True)
    found["own loop"] = own_loop(GLOBAL // ranks, group=dist.group.WORLD)
    return found


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except HgnpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(folder: Path) -> dict[str, Any]:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from data(4, 1)

    net, dataset, normed = network(1), data(SAMPLES, 1), network(1, norm=True)
    ddp = nn.parallel.DistributedDataParallel(network(1))
    hooked = nn.parallel.DistributedDataParallel(network(1))
    hooked.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type, return-value]
    prune = partial(hgnp.prune, recipe=hgnp.Recipe(**RECIPE), verbose=False)
    good, world = DataLoader(dataset, batch_size=4), dist.group.WORLD
    mine = [next(iter(good)), next(iter(DataLoader(data(4, dist.get_rank()), batch_size=4)))]
    return {
        "no group": said(lambda: hgnp.Flatness(net)),
        "inside DDP": said(lambda: hgnp.Flatness(ddp.module)),
        "DDP": said(lambda: hgnp.Flatness(ddp, group=world)),
        "DataParallel": said(lambda: hgnp.Flatness(nn.DataParallel(copy.deepcopy(net)), group=world)),
        "SyncBatchNorm": said(lambda: hgnp.Flatness(nn.SyncBatchNorm.convert_sync_batchnorm(normed), group=world)),
        "loss": said(lambda: hgnp.Flatness(net, group=world).loss(*next(iter(good)))),
        "nested": said(lambda: prune(nn.Sequential(ddp, nn.Linear(3, 3)), good)),
        "hook": said(lambda: prune(hooked, good)),
        "stream": said(lambda: prune(net, DataLoader(Stream(), batch_size=2))),
        "generator": said(lambda: prune(net, Endless())),
        "padded": said(lambda: prune(net, DataLoader(dataset, 4, sampler=DistributedSampler(dataset)))),
        "lists": said(lambda: prune(net, [mine[1]])),
        "shapes": said(lambda: hgnp.Flatness(nn.Linear(2, 2 + dist.get_rank()), group=world)),
        "few": said(lambda: prune(net, good, DataLoader(data(1, 1)))),
    }  # fmt: skip


class Endless:
    def __iter__(self) -> Any:
        return iter([next(iter(DataLoader(data(8, 1), batch_size=8)))])


def details(folder: Path) -> dict[str, Any]:
    """Dropout, a dropped batch, lists, callbacks, buffers, strides."""
    rank, ranks, lines = dist.get_rank(), dist.get_world_size(), io.StringIO()
    drawn: list[float] = []
    last_one = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    )
    train = DataLoader(data(4 * ranks + 1, 1), batch_size=4)

    def on_step(state: Any) -> bool:
        drawn.append(float(torch.rand(())))
        return rank == ranks - 1 and state.epoch == 1  # one rank stops all

    with contextlib.redirect_stderr(lines):
        result = hgnp.prune(
            last_one.double(), train, [tuple(data(5, 1).tensors)], on_step=on_step,
            recipe=hgnp.Recipe(**RECIPE | {"keep": 1.0, "warmup_epochs": 5}),
        )  # fmt: skip
    image = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    from hgnp.execution.process_group import ProcessGroupReducer

    (summed,) = ProcessGroupReducer().sum([image])
    return {
        "drawn": drawn, "lines": lines.getvalue(), "steps": len(drawn), "stopped": result.stopped,
        "buffers": dict(last_one.named_buffers()), "strides": [summed.stride(), image.stride()],
        "summed": summed, "own": image.detach(),
    }  # fmt: skip


def documented(folder: Path) -> dict[str, Any]:
    """The script of docs/distributed.md, on a CPU."""
    page = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(# train.py.*?)```", page, re.DOTALL)[0].replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(script, names)  # noqa: S102  the repository's own text
    return {"reached": names["result"].reached, "weights": dict(names["net"].state_dict())}


def command(folder: Path) -> dict[str, Any]:
    """`hgnp run` as torchrun would start it, with arguments that are refused."""
    lines = [["run", "nonsense"], ["run", "demo", "--device", "cpu", "--out", str(folder / "taylor-2")]]
    return commands(lines)


def torchrun_command(folder: Path, ranks: int) -> "subprocess.CompletedProcess[str]":
    """`torchrun --nproc-per-node N -m hgnp run …` as a user types it."""
    file = folder / "tiny.yaml"
    recipe = "{keep: 0.9, warmup_epochs: 0, finetune_epochs: 0, measure: none, method: taylor}"
    file.write_text(f"model: process_cases:tiny\ndata: process_cases:both\nrecipe: {recipe}\n")
    line = ["-m", "hgnp", "run", str(file), "--out", str(folder / "tiny"), "--device", "cpu"]
    return subprocess.run(
        [*TORCHRUN, f"--nproc-per-node={ranks}", *line], env=environment(), capture_output=True, text=True, timeout=100
    )


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def both() -> tuple[Any, Any]:
    return DataLoader(data(SAMPLES, 1), batch_size=4, shuffle=True), DataLoader(data(HELD_OUT, 2), batch_size=4)


def commands(lines: list[list[str]]) -> dict[str, Any]:
    """Exit code, stdout and stderr of each."""
    from hgnp.cli import app

    found = []
    for line in lines:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                app(line)
            except SystemExit as end:
                found.append([end.code, out.getvalue(), errors.getvalue()])
        dist.barrier()
    return {"found": found}


def failures(folder: Path) -> dict[str, Any]:
    """A rank with an error of its own, one that diverges, one that hangs, and in the end one that dies."""
    rank, found = dist.get_rank(), {}
    x, y = data(SAMPLES, 1).tensors
    bad = torch.where(torch.arange(SAMPLES) % 8 == 7, 7, y)  # in rank 1's part of every batch
    train = DataLoader(TensorDataset(x, bad), batch_size=4)

    def diverge(state: Any) -> None:
        if rank == 1 and state.epoch == 2:
            state.net.out.bias.data.fill_(torch.nan)

    def hang(state: Any) -> None:
        if rank == 1 and state.epoch == 1:
            time.sleep(2 * TIMEOUT_SECONDS)

    def die(state: Any) -> None:
        if rank == 1 and state.epoch == 2:
            os._exit(9)

    def wrapped() -> nn.Module:
        everybody = list(range(dist.get_world_size()))
        impatient = dist.new_group(everybody, timeout=timedelta(seconds=TIMEOUT_SECONDS))
        return nn.parallel.DistributedDataParallel(network(1), process_group=impatient)

    one, other = wrapped(), wrapped()
    start = time.monotonic()
    found["error"] = said(lambda: hgnp.prune(one, train, recipe=hgnp.Recipe(**RECIPE), verbose=False))
    dist.barrier()
    run = partial(run_case, "default", 1, batch=GLOBAL // 2, out=folder / "diverged")
    found["diverged"] = said(lambda: run(on_step=diverge))
    found["after divergence"] = run(resume=True)
    found["hang"] = said(lambda: run_case("default", 1, batch=GLOBAL // 2, wrap=lambda net: other, on_step=hang))
    dist.barrier()
    found["seconds"] = time.monotonic() - start
    write(folder, rank, "failures", found)
    start = time.monotonic()
    found["death"] = said(lambda: run_case("default", 1, batch=GLOBAL // 2, out=folder / "resumed", on_step=die))
    found["until death"] = time.monotonic() - start
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """The run that died on two ranks, with the loaders that it had there."""
    return run_case("default", 1, batch=GLOBAL // 2, out=folder / "resumed", resume=True)


FOR_GRAPHS = 9 * GLOBAL + 5
"""Samples of an epoch in which most steps are replays."""


def on_one_gpu(folder: Path) -> dict[str, Any]:
    """Both ranks on the first GPU, in a gloo group: nccl wants a GPU for each."""
    ranks, found = dist.get_world_size(), {}
    for name in NAMES[2]:
        with graph_replays() as replayed:
            found[name] = run_case(name, 1, batch=GLOBAL // ranks, samples=FOR_GRAPHS, device="cuda:0")
        found[f"{name}: replays"] = len(replayed)
    return found


def stood_in_run(folder: Path | None = None) -> dict[str, Any]:
    """Whole runs whose steps come from what stands in for CUDA graphs on a CPU."""

    class Stood(Graphed):
        uses_graphs = False  # but for steps

    def executor(step: Any, state: Any, precision: Any, *, graphs: bool) -> Graphed:
        Stand.graphed = Stood(step, state, precision)
        return Stand.graphed

    ranks, found = dist.get_world_size() if dist.is_initialized() else 1, {}
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr("hgnp.training.trainer.make_executor", executor)
        for name in ("default", "paper", "sam"):
            with replays() as replayed:
                found[name] = run_case(name, 1, batch=GLOBAL // ranks, samples=FOR_GRAPHS)
            assert Stand.graphed.refused is None
            found[f"{name}: replays"] = len(replayed)
    return found


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (equal_runs, stood_in_run, documented, refusals, details, command, failures, resumed, on_one_gpu)
}


def write(folder: Path, rank: int, name: str, found: dict[str, Any]) -> None:
    torch.save(found, folder / f"{name}-{dist.get_world_size()}-{rank}.pt")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment() -> dict[str, str]:
    """Of processes that find hgnp and the tests' own modules."""
    tests = Path(__file__).parent
    return os.environ | {"PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "OMP_NUM_THREADS": "1"}


def launch(ranks: int, folder: Path, names: Sequence[str], *, torchrun: bool = False) -> list[dict[str, Any]]:
    """What each rank saw in each case. Without `torchrun` processes are started as it would start them, but outlive each
    other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | group for rank in range(ranks)]
    starter = [*TORCHRUN, f"--nproc-per-node={ranks}"] if torchrun else [sys.executable]
    processes = [
        subprocess.Popen(
            [*starter, __file__, str(folder), *names], env=environment() | extra,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for extra in ([{}] if torchrun else own)
    ]  # fmt: skip
    texts = [process.communicate(timeout=500)[0] for process in processes]
    files = [{name: folder / f"{name}-{ranks}-{rank}.pt" for name in names} for rank in range(ranks)]
    assert all(file.exists() for each in files for file in each.values()), "\n".join(texts)
    codes = [process.returncode for process in processes]
    return [{name: torch.load(file) for name, file in each.items()} | {"codes": codes} for each in files]


def main(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    from hgnp.execution.process_group import initialise

    if "on_one_gpu" in names:
        dist.init_process_group("gloo")
    else:
        initialise()
    for name in names:
        write(folder, dist.get_rank(), name, CASES[name](folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
