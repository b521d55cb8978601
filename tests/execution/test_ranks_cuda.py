"""Ranks on a GPU: a group of one rank, whose sums go through nccl or gloo, and two gloo ranks that share a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hgnp
from graphed_cases import replays
from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.execution.eager import Eager
from hgnp.execution.executor import Executor
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import GraphSequence
from hgnp.execution.process_group import ProcessGroupReducer
from hgnp.reducer import LOCAL, Reducer
from process_cases import FOR_GRAPHS, NAMES, launch, network, run_case
from synchronization import no_synchronization

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
BACKENDS = ["nccl", "gloo", "cpu:gloo,cuda:nccl"]


class ForcedReducer(ProcessGroupReducer):
    """A rank that sums as one of several: its sums are its own numbers, but they go through the group."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = 2


@pytest.fixture(params=BACKENDS)
def forced(request: pytest.FixtureRequest) -> Iterator[Reducer]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ForcedReducer()
    finally:
        dist.destroy_process_group()


CHOICES: dict[str, dict[str, Any]] = {
    "mu=0": {"mu": 0.0},
    "default": {},
    "refresh_every": {"refresh_every": 3, "bound": 0.02},
    "skip_inactive": {"refresh_every": 3, "bound": 0.02, "skip_inactive": True},
    "penalized_loss": {"gamma_from": "penalized_loss"},
    "expand": {"kfac_approx": "expand", "refresh_every": 2},
    "empirical": {"ranking": "empirical", "scaling": "scale_invariant"},
    "network": {"direction_over": "network", "refresh_every": 2},
    "this_batch": {"direction_from": "this_batch", "bound": 0.02},
    "paper": {"flatness": "paper"},
    "SAM": {},
}


def made(name: str, net: nn.Module, reducer: Reducer) -> tuple[Step, State]:
    if name == "SAM":
        return SAMStep(net, rho=0.1, reducer=reducer), State(0.0, 0.0, Direction(net))
    return make_step(net, reducer=reducer, **{"mu": 0.1, "bound": 0.0} | CHOICES[name])


def batches(count: int, dtype: torch.dtype = torch.double) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    sizes = [5 if number % 5 == 4 else 8 for number in range(count)]  # another shape now and then
    return [
        (torch.randn(n, 1, 6, 6, generator=draws).to("cuda", dtype), torch.randint(0, 3, (n,), generator=draws).cuda())
        for n in sizes
    ]


def trained(name: str, reducer: Reducer, *, graphs: bool) -> tuple[dict[str, Any], Executor]:
    net = network(1, norm=True).cuda()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 6, 6, dtype=torch.double, device="cuda"))
    step, state = made(name, net, reducer)
    executor: Any = Graphed(step, state) if graphs else Eager(step, state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, Any] = {"losses": [], "q": [], "blocks": [], "gradients": []}
    with executor.running():
        for number, (x, y) in enumerate(batches(30)):
            if number == 15:
                neurons.remove({"a": [1, 4], "c": [0]}, optimizer)
            optimizer.zero_grad()
            found["losses"].append(float(executor.backward(x, y)))
            if state.statistics is not None:
                found["q"].append(float(state.statistics.curvature))
                found["blocks"].append(state.statistics.penalized.block.name)
            found["gradients"].append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            optimizer.step()
    return found, executor


@pytest.mark.parametrize("name", CHOICES)
def test_a_group_of_one_rank_changes_nothing(name: str, forced: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation, and from graphs with the sums between them."""
    assert forced.broadcast(b"abc") == b"abc"
    want, _ = trained(name, LOCAL, graphs=False)
    eager, _ = trained(name, forced, graphs=False)
    splits: list[None] = []
    continue_in = GraphSequence.continue_in

    def recorded(*args: Any, **kwargs: Any) -> None:
        splits.append(None)
        continue_in(*args, **kwargs)

    monkeypatch.setattr(GraphSequence, "continue_in", recorded)
    with replays() as replayed:
        graphed, executor = trained(name, forced, graphs=True)
    assert isinstance(executor, Graphed)
    assert executor.refused is None
    assert replayed
    assert bool(splits) is (name != "mu=0")
    for found in (eager, graphed):
        assert found["blocks"] == want["blocks"]
        for key in ("losses", "q", "gradients"):
            torch.testing.assert_close(found[key], want[key], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_plain_step_of_an_nccl_rank_does_not_wait_for_the_device(graphs: bool) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = network(1, norm=True).float().cuda()
        step, state = made("mu=0", net, ForcedReducer())
        executor: Any = Graphed(step, state) if graphs else Eager(step, state)
        with executor.running(), replays() as replayed:
            x, y = batches(1, torch.float)[0]
            for _ in range(4):
                executor.zero_grad()
                executor.backward(x, y)
            assert bool(replayed) is graphs
            with no_synchronization():
                executor.zero_grad()
                executor.backward(x, y)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(2, tmp_path_factory.mktemp("shared"), ["on_one_gpu"])


@pytest.mark.parametrize("name", NAMES[2])
def test_two_gloo_ranks_share_a_gpu(name: str, shared: list[dict[str, Any]]) -> None:
    """Whole runs from graphs. One process runs operation by operation, with ghost batches where there are norms."""
    want = run_case(name, 2 if name == "norm" else 1, samples=FOR_GRAPHS, device="cuda:0", execution="eager")
    for rank in shared:
        assert rank["on_one_gpu"][f"{name}: replays"] > 10
        torch.testing.assert_close(rank["on_one_gpu"][name], want, **CLOSE, check_device=False)
