"""Steps of several ranks, each with its share of a batch, are the steps of one process with all of it."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from graphed_cases import Again, Stand, replays, stand_in
from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.execution.eager import Eager
from hgnp.execution.executor import Executor
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import CaptureError
from hgnp.reducer import LOCAL, Reducer
from hgnp.scoring import compute_scores
from ranks import run_ranks

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS = 5


class Square(nn.Module):
    """Bends, by a rule: `torch.func.jvp`, which other bent operations take, keeps its levels in one place for all threads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x / 4


class Net(nn.Module):
    """Convolutions and a linear layer, with one that is never met: its parameters have no gradient."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 2), nn.Linear(5, 3)
        self.na, self.nb = (nn.BatchNorm2d(4), nn.BatchNorm2d(5)) if norm else (nn.Identity(), nn.Identity())
        self.square, self.unmet = Square(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.square(self.na(self.a(x)))
        return self.out(self.square(self.nb(self.b(x))).mean((2, 3)))


def made(norm: bool) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


def batches(kind: str, samples: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(samples, 2, 5, 5, generator=draws, dtype=torch.double)
        y = torch.randint(0, 3, (samples,), generator=draws)
        if kind == "ignored":
            y[torch.tensor([1, 6])] = -100
        found.append((x, torch.randn(samples, 3, generator=draws, dtype=torch.double) if kind == "mse" else y))
    return found


def trained(
    net: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    make: Callable[..., tuple[Step, State]],
    mu: float | None,
    reducer: Reducer = LOCAL,
    execute: Callable[[Step, State], Executor] = Eager,
) -> dict[str, Any]:
    """What a rank sees of all steps, and scores at the end."""
    net = copy.deepcopy(net)
    neurons = hgnp.Neurons(net, torch.zeros(2, 2, 5, 5, dtype=torch.double))
    step, state = make(net, reducer=reducer)
    executor = execute(step, state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    found: dict[str, Any] = {name: [] for name in ("losses", "plans", "q", "radius", "blocks", "gradients", "weights")}
    for x, y in data:
        optimizer.zero_grad()
        found["losses"].append(executor.backward(x, y))
        found["plans"].append(state.plan)
        if state.statistics is not None:
            found["q"].append(state.statistics.curvature)
            found["radius"].append(state.statistics.penalized.radius)
            found["blocks"].append(state.statistics.penalized.block.name)
        found["gradients"].append(
            {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
        )
        optimizer.step()
        found["weights"].append({name: tensor.clone() for name, tensor in net.state_dict().items()})
    found["scores"] = compute_scores(neurons, data[:3], step, state, criterion="taylor", mu=mu, coupling="coupled")
    return found


def sam(net: nn.Module, *, reducer: Reducer, **options: Any) -> tuple[Step, State]:
    return SAMStep(net, rho=0.1, reducer=reducer, **options), State(0.0, 0.0, Direction(net))


def compare(norm: bool, kind: str, shares: tuple[int, ...], make: Callable[..., Any], mu: float | None = None) -> Any:
    net, joint = made(norm), batches(kind, sum(shares))
    split = [list(zip(x.split(list(shares)), y.split(list(shares)), strict=True)) for x, y in joint]
    have = run_ranks(len(shares), lambda rank, reducer: trained(net, [each[rank] for each in split], make, mu, reducer))
    want = trained(net, joint, make, mu)
    assert_same(have, want)
    return want


def assert_same(have: list[dict[str, Any]], want: dict[str, Any]) -> None:
    """Each rank saw what one process saw."""
    assert all(torch.isfinite(loss) for loss in want["losses"])
    for own in have:
        assert own["plans"] == want["plans"]
        assert own["blocks"] == want["blocks"]
        for name in ("losses", "q", "radius", "gradients", "weights", "scores"):
            torch.testing.assert_close(own[name], want[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "refresh_every": {"refresh_every": 2, "skip_inactive": True},
    "inactive": {"refresh_every": 3, "skip_inactive": True, "bound": 1e3},
    "penalty_every": {"penalty_every": 2, "refresh_every": 2},
    "paper": {"flatness": "paper"},
    "this_batch": {"direction_from": "this_batch"},
    "hessian": {"curvature": "hessian"},
    "empirical": {"ranking": "empirical"},
    "scale_invariant": {"scaling": "scale_invariant"},
    "expand": {"kfac_approx": "expand"},
    "penalized_loss": {"gamma_from": "penalized_loss"},
}


@pytest.mark.parametrize(("norm", "shares"), [(False, (5, 3)), (True, (4, 3, 1))], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("choices", CHOICES)
def test_steps_of_ranks_are_the_steps_of_the_joint_batch(choices: str, norm: bool, shares: tuple[int, ...]) -> None:
    make = partial(make_step, **{"mu": 0.1, "bound": 0.0} | CHOICES[choices])
    want = compare(norm, "labels", shares, make)
    assert want["q"]
    assert all(q.abs() > 1e-3 for q in want["q"])
    assert (choices in ("inactive", "penalty_every")) is any(not plan.penalty for plan in want["plans"])


def test_the_network_s_product_is_summed_over_ranks() -> None:
    make = partial(make_step, mu=0.1, bound=0.0, direction_over="network", refresh_every=2)
    assert set(compare(True, "labels", (5, 3), make)["blocks"]) == {"network"}


def test_the_objectives_of_ranks_add_up_to_that_of_the_joint_batch() -> None:
    ((x, y),) = batches("labels", 8, steps=1)
    net = made(norm=True)  # here and not on the ranks: they are threads, and draw from one generator

    def objective(x: Tensor, y: Tensor, reducer: Reducer) -> Tensor:
        step, state = make_step(copy.deepcopy(net), mu=0.1, bound=-2.0, reducer=reducer)
        step.share(state, x, y)
        v = step.direction_of(state, x, y)
        return step.objective(state, x, y, mu=state.mu, direction=v).value().detach()

    shares = list(zip(x.split([5, 3]), y.split([5, 3]), strict=True))
    have = run_ranks(2, lambda rank, reducer: objective(*shares[rank], reducer))
    torch.testing.assert_close(have[0] + have[1], objective(x, y, LOCAL), **CLOSE)


LOSSES = {
    "labels": F.cross_entropy,
    "ignored": partial(F.cross_entropy, weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.double)),
    "mse": F.mse_loss,
    "of one's own": lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("choices", ["default", "paper"])
def test_shares_of_a_loss_are_those_of_its_normaliser(loss: str, choices: str) -> None:
    make = partial(make_step, mu=0.1, bound=0.0, loss=LOSSES[loss], **CHOICES[choices])
    compare(True, loss, (5, 3), make)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("make", [sam, partial(make_step, mu=0.0)], ids=["SAM", "mu=0"])
@pytest.mark.parametrize("kind", ["labels", "ignored"])
def test_steps_without_the_penalty(make: Callable[..., Any], norm: bool, kind: str) -> None:
    compare(norm, kind, (4, 3, 1), partial(make, loss=LOSSES[kind]), 0.0)


class TimeFirst(nn.Module):
    """Samples do not lead in all of its tensors, so that gates are of a batch as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 6), Square(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1).contiguous()).mean(0)


@pytest.mark.filterwarnings("ignore:the first dimension of some tensor is not the sample")
def test_scores_of_a_batch_as_a_whole_are_summed_before_their_absolute_value() -> None:
    torch.manual_seed(0)
    net = TimeFirst().double()
    joint = [(torch.randn(8, 4, 2, dtype=torch.double), torch.randint(0, 3, (8,))) for _ in range(3)]

    def scores(net: nn.Module, data: list[tuple[Tensor, Tensor]], reducer: Reducer) -> Any:
        neurons = hgnp.Neurons(net, torch.zeros(2, 4, 2, dtype=torch.double))
        step, state = make_step(net, mu=0.0, reducer=reducer)
        return compute_scores(neurons, data, step, state, criterion="taylor", mu=None, coupling="coupled")

    split = [[(x[:7], y[:7]), (x[7:], y[7:])] for x, y in joint]  # of a single sample nobody knows where it leads
    have = run_ranks(2, lambda rank, reducer: scores(copy.deepcopy(net), [each[rank] for each in split], reducer))
    with pytest.warns(UserWarning, match="the first dimension of some tensor is not the sample"):
        want = scores(net, joint, LOCAL)
    torch.testing.assert_close(have, [want, want], **CLOSE)


@pytest.mark.parametrize("choices", [*CHOICES, "SAM"])
def test_a_rank_none_of_whose_labels_count(choices: str) -> None:
    """The mean of its own share is 0/0."""
    own = sam if choices == "SAM" else partial(make_step, **{"mu": 0.1, "bound": 0.0} | CHOICES[choices])
    compare(True, "ignored", (1, 1, 6), partial(own, loss=LOSSES["ignored"]), 0.0 if choices == "SAM" else None)


GRAPHED: dict[str, Callable[..., tuple[Step, State]]] = {
    name: partial(make_step, **{"mu": 0.1, "bound": 0.0} | choices) for name, choices in CHOICES.items()
} | {
    "mu=0": partial(make_step, mu=0.0),
    "bound": partial(make_step, mu=0.1, bound=0.45, refresh_every=2),
    "skips": partial(make_step, mu=0.1, bound=0.45, refresh_every=2, skip_inactive=True),
    "network": partial(make_step, mu=0.1, bound=0.0, direction_over="network", refresh_every=2),
    "network, every other step": partial(make_step, mu=0.1, bound=0.0, direction_over="network", penalty_every=2),
    "SAM": sam,
}


def compare_graphed(name: str) -> list[Graphed]:
    """Steps of three ranks from graphs with those of one process. One rank meets a new shape while the first has graphs of its
    own, and one never captures: they sum all the same."""
    net, joint, mu = made(norm=True), batches("labels", 9, steps=12), 0.0 if name in ("mu=0", "SAM") else None
    shares = [(4, 3, 2) if number % 4 else (4, 2, 3) for number in range(len(joint))]
    split = [list(zip(x.split(each), y.split(each), strict=True)) for (x, y), each in zip(joint, shares, strict=True)]
    graphs: dict[int, Graphed] = {}

    def rank_steps(rank: int, reducer: Reducer) -> dict[str, Any]:
        def execute(step: Step, state: State) -> Executor:
            Stand.graphed = graphs[rank] = Graphed(step, state)
            return graphs[rank] if rank < 2 else Eager(step, state)

        return trained(net, [each[rank] for each in split], GRAPHED[name], mu, reducer, execute)

    assert_same(run_ranks(3, rank_steps), trained(net, joint, GRAPHED[name], mu))
    return [graphs[0], graphs[1]]


@pytest.mark.parametrize("name", GRAPHED)
def test_ranks_whose_steps_come_from_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with replays() as replayed:
        ranks = compare_graphed(name)
    for graphed in ranks:
        assert graphed.refused is None
        assert any(replay.state is graphed.state for replay in replayed)


@pytest.mark.parametrize("capture", [1, 2, 3])
@pytest.mark.parametrize("name", ["default", "paper", "mu=0"])
def test_a_rank_that_cannot_capture_continues_with_the_others(
    name: str, capture: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unable(Stand):
        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            number = vars(self).setdefault("number", itertools.count(1))
            if self.graphed.step.reducer.rank == 0 and next(number) == capture:
                raise CaptureError("it cannot")
            return super().capture(work)

    stand_in(monkeypatch, Unable)
    first, second = compare_graphed(name)
    assert first.refused == ("it cannot" if capture == 1 or name != "mu=0" else None)
    assert second.refused is None


class Skips(nn.Module):
    """A small batch does not call layer b."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.b: nn.Module = nn.Conv1d(6, 6, 1) if conv else nn.Linear(6, 6)
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 2
        if len(x) > 3:
            x = self.b(x.unsqueeze(2)).squeeze(2) if self.conv else self.b(x)
        return self.out(x)


@pytest.mark.parametrize(
    "choices", [{}, {"kfac_approx": "expand"}, {"ranking": "empirical"}, {"flatness": "paper"}], ids=str
)
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("first", [0, 5])
def test_ranks_that_call_different_layers(first: int, conv: bool, choices: dict[str, Any]) -> None:
    """The factors of a layer that some ranks do not call are sums over the samples of those that do."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    net = Skips(conv).double()
    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    if first:
        parts.reverse()

    def train(rank: int, reducer: Reducer) -> tuple[str, float, list[Tensor | None]]:
        own = copy.deepcopy(net)
        step, state = make_step(own, mu=1.0, bound=-1.0, reducer=reducer, **choices)
        executor = Eager(step, state)
        for _ in range(4):
            own.zero_grad()
            executor.backward(*parts[rank])
        assert state.statistics is not None
        penalized = state.statistics.penalized
        return penalized.block.name, float(penalized.radius), [p.grad for p in own.parameters()]

    (block, radius, grads), other = run_ranks(2, train)
    torch.testing.assert_close((radius, grads), other[1:])
    assert other[0] == block
    if choices.get("ranking") == "empirical":
        return
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {"a": [], "b": [], "out": []}
    for name, layer in (("a", net.a), ("b", net.b), ("out", net.out)):
        layer.register_forward_hook(lambda _, args, out, name=name: seen[name].append((args[0].detach(), out)))
    loss = sum(F.cross_entropy(net(inputs), target, reduction="sum") for inputs, target in parts) / 8
    radii = {}
    for name, calls in seen.items():
        grads = torch.autograd.grad(loss, [out for _, out in calls], retain_graph=True)
        a = torch.cat([F.pad(given.reshape(len(given), -1), (0, 1), value=1.0) for given, _ in calls])
        g = torch.cat([8 * grad.reshape(len(grad), -1) for grad in grads])
        radii[name] = float(torch.linalg.eigvalsh(a.T @ a / 8)[-1] * torch.linalg.eigvalsh(g.T @ g / 8)[-1])
    assert block == max(radii, key=lambda name: radii[name])
    assert radius == pytest.approx(radii[block], rel=1e-6)
