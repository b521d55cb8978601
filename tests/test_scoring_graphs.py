"""Scores of many batches from graphs, without a GPU: graphs are stood in for by work that is done again at every replay.

It leaves out what a graph itself does; tests/test_scoring_cuda.py has that."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp import scoring
from hgnp.curvature.direction import Direction
from hgnp.curvature.step import make_step
from hgnp.execution.graphs import CaptureError
from hgnp.flatness import step_and_state
from hgnp.pruning import Scores
from hgnp.training.pruner import Pruner

Batches = list[tuple[Any, Any]]


def tensors(made: Tensor | Direction) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    assert made.choice is not None
    return [made.choice.index.number, *(x for pair in made.pairs.values() for x in pair.state().values())]


class Power(nn.Module):
    """x^1.5: the third derivative is infinite at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() ** 1.5


@pytest.mark.parametrize("bound", [1e6, -1.0])
def test_a_graph_masks_the_derivative_of_an_inactive_penalty(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    smooth = nn.Softplus() if bound < 0 else Power()
    net = nn.Sequential(nn.Linear(4, 6), smooth, nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    neurons, flat = hgnp.Neurons(net, x), hgnp.Flatness(net, mu=1.0, bound=bound, curvature="hessian")
    eager = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat)
    monkeypatch.setattr(scoring, "capturing", lambda: True)  # as inside a graph, which cannot ask the host
    torch.testing.assert_close(hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat), eager, rtol=1e-12, atol=0)


class Again:
    """A graph: it has computed nothing before its first replay, and shares memory with the others of its capture."""

    def __init__(self, work: Callable[[], Any], stand: "Stand") -> None:
        self.work, self.stand, self.made = work, stand, work()
        stand.graphs.append(self)

    def replay(self) -> None:
        self.stand.replays += 1
        for graph in self.stand.graphs:
            for tensor in tensors(graph.made):
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        for tensor, value in zip(tensors(self.made), tensors(self.work()), strict=True):
            tensor.copy_(value)


class Stand:
    """In place of `CaptureContext`."""

    device = torch.device("cpu")

    def __init__(self, *, refuses: bool = False) -> None:
        self.graphs: list[Again] = []
        self.replays, self.refuses, self.asked = 0, refuses, 0

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
        self.asked += 1
        if self.refuses:
            raise CaptureError("no graphs here")
        graph = Again(work, self)
        return graph, graph.made


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.b, self.out, self.dropout = nn.Linear(4, 6), nn.Linear(6, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x))).mean((2, 3))
        x = F.dropout(x, self.dropout, training=self.dropout > 0)
        return self.out(F.softplus(self.b(x)))


def made(dropout: float = 0.0) -> tuple[Net, hgnp.Neurons, Batches]:
    """Batches of two shapes; in every other one of each, inputs are so large that v is in another block."""
    torch.manual_seed(0)
    net = Net(dropout).double()
    sizes = [(n, scale) for _ in range(4) for n in (5, 3) for scale in (0.1, 30.0)]
    data = [(scale * (1 + torch.randn(n, 2, 5, 5).double()), torch.randint(0, 3, (n,))) for n, scale in sizes]
    return net, hgnp.Neurons(net, data[0][0]), data


def block_of(flat: hgnp.Flatness, inputs: Tensor, target: Tensor) -> str | None:
    """The block that the batch's own v lies in."""
    step, state = step_and_state(flat)
    step.share(state, inputs, target)
    return step.direction_of(state, inputs, target).name()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setattr(scoring, "make_capture", lambda net: stand)
    return stand


def operation_by_operation(
    neurons: hgnp.Neurons, data: Batches, flat: hgnp.Flatness | None, criterion: str = "taylor", **given: Any
) -> Scores:
    flat = hgnp.Flatness(neurons.net, mu=0.0, **given) if flat is None else flat
    return scoring.compute_scores(
        neurons, data, *step_and_state(flat), criterion=criterion, mu=None, coupling="coupled", graphs=False
    )


@pytest.mark.parametrize("criterion", ["taylor", "taylor_sum"])
@pytest.mark.parametrize(
    "choices",
    [{"mu": 0.0}, {"curvature": "ggn"}, {"curvature": "hessian"}, {"flatness": "paper"}],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_the_same_scores(criterion: str, choices: dict[str, Any], stand: Stand) -> None:
    net, neurons, data = made()
    flat = hgnp.Flatness(net, **({"mu": 0.5, "bound": -1.0} | choices))
    net.eval()
    blocks = {(len(y), block_of(flat, x, y)) for x, y in data}
    assert len(blocks) == 4 or "flatness" in choices  # v moves from block to block
    expected = operation_by_operation(neurons, data, flat, criterion)
    assert not stand.asked
    found = hgnp.sensitivity(net, neurons, data, flatness=flat, criterion=criterion)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    if flat.mu:  # one graph for each shape finds v; and one for each shape and block
        assert len(stand.graphs) == 2 + len(blocks)
        assert stand.replays == len(data) - 2 + len(data) - len(blocks)
    else:
        assert len(stand.graphs) == 2
        assert stand.replays == len(data) - 2


def test_a_shape_that_does_not_come_again_is_not_captured(stand: Stand) -> None:
    net, neurons, data = made()
    flat = hgnp.Flatness(net, mu=0.5)
    for batches in (data[:1], [data[0], data[2]]):
        hgnp.sensitivity(net, neurons, batches, flatness=flat)
    assert not stand.asked


def test_what_cannot_be_captured_is_scored_all_the_same(stand: Stand) -> None:
    net, neurons, data = made()
    flat = hgnp.Flatness(net, mu=0.5, bound=-1.0)
    expected = operation_by_operation(neurons, data, flat)
    stand.refuses = True
    torch.testing.assert_close(hgnp.sensitivity(net, neurons, data, flatness=flat), expected, rtol=1e-10, atol=0)
    asked = stand.asked
    assert asked

    def of_lists(z: Tensor, target: list[int]) -> Tensor:
        return F.cross_entropy(z, torch.tensor(target))

    lists = [(x, y.tolist()) for x, y in data]
    found = hgnp.sensitivity(net, neurons, lists, loss=of_lists)
    torch.testing.assert_close(found, operation_by_operation(neurons, data, None), rtol=1e-10, atol=0)
    assert stand.asked == asked


def test_a_forward_that_draws_is_not_captured(stand: Stand) -> None:
    net, neurons, data = made(dropout=0.3)
    expected = operation_by_operation(neurons, data, None)
    stream = torch.get_rng_state()
    torch.testing.assert_close(hgnp.sensitivity(net, neurons, data), expected, rtol=1e-10, atol=0)
    assert not stand.asked
    assert torch.equal(stream, torch.get_rng_state())


def test_a_failure_changes_nothing(stand: Stand) -> None:
    net, neurons, data = made()
    net.train()
    flat = hgnp.Flatness(net, mu=0.5, bound=-1.0)
    flat.backward(*data[0])
    before = copy.deepcopy((net.state_dict(), [p.grad for p in net.parameters()], flat.state_dict()))
    stream = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"batches must be .* pairs with samples"):
        hgnp.sensitivity(net, neurons, [*data, None], flatness=flat)  # type: ignore[list-item]
    assert stand.replays
    after = net.state_dict(), [p.grad for p in net.parameters()], flat.state_dict()
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    torch.testing.assert_close(after[2]["pairs"], before[2]["pairs"], rtol=0, atol=0)
    assert all(module.training for module in net.modules())
    assert torch.equal(stream, torch.get_rng_state())


@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_a_run_s_execution_decides(execution: str, stand: Stand) -> None:
    net, neurons, data = made()
    recipe = hgnp.Recipe(keep=0.5, neurons_per_round=3, execution=execution)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = Pruner(neurons, *make_step(net), recipe, optimizer, neurons.preview({}))
    assert pruner.round(data) == 3
    assert bool(stand.replays) is (execution == "auto")
