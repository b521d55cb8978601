"""Steps from CUDA graphs compute what steps as they are compute."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from graphed_cases import graph_replays, replays
from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State, Step, make_step
from hgnp.execution.eager import Eager
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import CaptureContext
from hgnp.flatness import step_and_state
from hgnp.training.evaluate import Evaluation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.na = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.b, self.nb = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.c, self.drop, self.out = nn.Linear(16, 24), nn.Dropout(dropout), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.na(self.a(x)))
            x = torch.relu(self.nb(self.b(x)) + x).mean((2, 3))
            return self.out(self.drop(torch.relu(self.c(x))))

    return Net().double().cuda().to(memory_format=torch.channels_last)


def sam(model: nn.Module, **options: float) -> tuple[Step, State]:
    return SAMStep(model, **options), State(0.0, 0.0, Direction(model))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        n = 10 if number % 5 == 4 else 16  # another shape now and then
        made.append(
            (torch.randn(n, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator))
        )
    return [(x.cuda(), y.cuda()) for x, y in made]


def trained(captured: bool, dropout: float = 0.0, **choices: Any) -> tuple[nn.Module, list[float], list[Any], Any]:
    model = net(dropout)
    neurons = hgnp.Neurons(model, batches(1)[0][0][:2])
    flat = hgnp.Flatness(model, **choices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    graphed = Graphed(*step_and_state(flat))
    trainer = graphed if captured else flat
    losses, seen = [], []
    with graphed.running():
        for number, (x, y) in enumerate(batches(30)):
            if number == 15:
                cut = neurons.least(hgnp.sensitivity(model, neurons, [(x, y)], flatness=flat), 12)
                neurons.remove(cut, optimizer)
            flat.mu = choices["mu"] * min(1.0, number / 4) if number else choices["mu"]
            optimizer.zero_grad(set_to_none=True)
            losses.append(trainer.backward(x, y).item())
            optimizer.step()
            seen.append((flat.block, flat.radius, flat.curvature))
    return model, losses, seen, graphed


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "choices",
    [
        {"mu": 0.0},
        {"mu": 0.05, "bound": 0.0},
        {"mu": 0.05, "bound": 0.0, "refresh_every": 3},
        {"mu": 0.05, "bound": 0.025, "refresh_every": 3, "skip_inactive": True},
        {"mu": 0.05, "bound": 0.0, "gamma_from": "penalized_loss"},
        {"mu": 0.05, "bound": 0.03, "gamma_from": "penalized_loss"},
        {"mu": 0.05, "bound": 0.0, "direction_from": "this_batch"},
        {"mu": 0.05, "bound": 0.0, "kfac_approx": "expand", "refresh_every": 2},
        {"mu": 0.05, "bound": 0.0, "kfac_approx": "expand", "direction_from": "this_batch"},
        {"mu": 0.05, "bound": 0.03, "direction_from": "this_batch"},
        {"mu": 0.05, "bound": 0.0, "flatness": "paper"},
        {"mu": 0.05, "bound": 0.0, "refresh_every": 2, "direction_over": "network"},
        {"mu": 0.05, "bound": 0.0, "penalty_every": 3, "direction_over": "network"},
        {"mu": 0.05, "bound": 0.0, "scaling": "scale_invariant", "kfac_approx": "expand", "ranking": "empirical"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_the_same_trajectory(choices: dict[str, Any], dropout: float) -> None:
    """With dropout too: graphs draw the masks that steps as they are draw, and the passes of a step share them."""
    with replays() as replayed:
        model, losses, seen, graphed = trained(True, dropout, **choices)
    other, expected, also_seen, _ = trained(False, dropout, **choices)
    assert graphed.refused is None
    assert replayed
    assert losses == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-8)
    if choices["mu"]:
        assert [block for block, _, _ in seen] == [block for block, _, _ in also_seen]
        assert [q for _, _, q in seen] == pytest.approx([q for _, _, q in also_seen], rel=1e-5)


def test_sharpness_aware_steps_are_captured_too() -> None:
    found = []
    for captured in (True, False):
        model = net()
        step, state = sam(model, rho=0.1)
        graphed, eager = Graphed(step, state), Eager(step, state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        with graphed.running(), replays() as replayed:
            for x, y in batches(12):
                optimizer.zero_grad(set_to_none=True)
                losses.append((graphed if captured else eager).backward(x, y).item())
                optimizer.step()
        assert bool(replayed) is captured
        found.append((losses, model.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_validation_from_graphs_is_validation() -> None:
    model, data = net(), batches(10)
    neurons = hgnp.Neurons(model, data[0][0][:2])
    captured, plain = (Evaluation(model, F.cross_entropy, None, None, graphs=graphs) for graphs in (True, False))
    for _ in range(2):
        with graph_replays() as replayed:
            assert captured(data) == pytest.approx(plain(data), rel=1e-9)
        assert replayed
        neurons.remove(neurons.least(hgnp.sensitivity(model, neurons, data[:1]), 6))
    with_metric = Evaluation(model, F.cross_entropy, lambda out, y: out.sum() + y.sum(), None, graphs=True)
    assert with_metric(data)[1] == pytest.approx(
        Evaluation(model, F.cross_entropy, lambda out, y: out.sum() + y.sum(), None)(data)[1]
    )


def test_a_network_that_takes_a_layout_for_granted_is_trained_in_it() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.conv(x)).view(len(x), -1))

    torch.manual_seed(0)
    recipe = hgnp.Recipe(keep=0.7, warmup_epochs=1, neurons_per_round=1, finetune_epochs=1, precision="float32")
    result = hgnp.prune(Viewed().double().cuda(), batches(8), batches(3), recipe=recipe)
    assert result.reached
    model = net().float()
    result = hgnp.prune(model, [(x.float(), y) for x, y in batches(4)], recipe=hgnp.Recipe(keep=1.0, warmup_epochs=1))
    assert model.a.weight.is_contiguous(memory_format=torch.channels_last)  # as it was found


def test_draws_that_graphs_cannot_repeat_are_not_captured() -> None:
    class Drawing(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.out, self.device = nn.Linear(4, 5), device

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x * torch.rand((), device=self.device).to(x))

    x, y = torch.randn(8, 4).cuda(), torch.randint(0, 5, (8,)).cuda()
    this_batch = {"mu": 0.1, "bound": -1.0, "direction_from": "this_batch"}
    for device, (step, state), captured in (
        ("cpu", make_step(Drawing("cpu").cuda(), mu=0.0), False),
        ("cuda", make_step(Drawing("cuda").cuda(), mu=0.0), True),
        ("cuda", make_step(Drawing("cuda").cuda(), mu=0.1, bound=-1.0), True),
        ("cuda", make_step(Drawing("cuda").cuda(), **this_batch), False),
        ("cuda", sam(Drawing("cuda").cuda()), False),
    ):
        graphed = Graphed(step, state)
        with graphed.running(), replays() as replayed:
            losses = {graphed.backward(x, y).item() for _ in range(6)}
        assert len(losses) == 6, (device, step, state.mu)  # every step draws anew
        assert graphed.refused == (None if captured else "its forward draws random numbers"), (device, step, state.mu)
        assert bool(replayed) is captured


def test_a_run_uses_graphs_and_continues_after_a_removal() -> None:
    x = torch.randn(64, 3, 8, 8)
    y = (x[:, 0].mean((1, 2)) > 0).long()
    data = [(x[i : i + 16].cuda(), y[i : i + 16].cuda()) for i in range(0, 64, 16)]
    model = net().float()
    recipe = hgnp.Recipe(keep=0.5, warmup_epochs=3, neurons_per_round=10, finetune_epochs=3, lr=0.05, seed=0)
    result = hgnp.prune(model, data, data, recipe=recipe)
    assert result.reached
    assert result.history[-1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize(
    "method",
    [{}, {"method": "hybrid", "threshold": 0.75}, {"method": "hybrid", "threshold": 0.75, "flatness": "paper"}],
)
def test_a_run_in_float64_equals_one_operation_by_operation(method: dict[str, Any]) -> None:
    x = torch.randn(64, 3, 8, 8).double()
    y = (x[:, 0].mean((1, 2)) > 0).long()
    data = [(x[i : i + 16].cuda(), y[i : i + 16].cuda()) for i in range(0, 64, 16)]
    histories = []
    for execution in ("auto", "eager"):
        recipe = hgnp.Recipe(
            keep=0.5, warmup_epochs=3, neurons_per_round=10, finetune_epochs=3, lr=0.05, seed=0, execution=execution,
            precision="float32", mu=0.01, bound=0.0, mu_warmup_epochs=2, **method,
        )  # fmt: skip
        histories.append(hgnp.prune(net(), data, data, recipe=recipe).history)
    for one, other in zip(*histories, strict=True):
        assert one["widths"] == other["widths"]
        assert one["mu"] == other["mu"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["curvature"] == pytest.approx(other["curvature"], rel=1e-5)


@pytest.mark.parametrize("flatness", [{}, {"direction_from": "this_batch"}])
def test_the_optimizer_s_steps_come_from_a_graph_too(flatness: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(96, 3, 8, 8)
    y = (x[:, 0].mean((1, 2)) > 0).long()
    data = [(x[i : i + 16].cuda(), y[i : i + 16].cuda()) for i in range(0, 96, 16)]
    captured: list[None] = []
    capture = CaptureContext.capture

    def recorded(own: CaptureContext, work: Callable[[], Any]) -> Any:
        captured.extend([None] * isinstance(getattr(work, "__self__", None), torch.optim.Optimizer))
        return capture(own, work)

    monkeypatch.setattr(CaptureContext, "capture", recorded)
    histories = []
    for execution in ("auto", "eager"):
        recipe = hgnp.Recipe(
            keep=0.5, warmup_epochs=2, neurons_per_round=10, finetune_epochs=2, lr=0.02, seed=0, execution=execution,
            precision="float32", mu=0.01, bound=0.0, schedule="cosine", flatness=flatness,
        )  # fmt: skip
        histories.append(hgnp.prune(net().float(), data, data, recipe=recipe).history)
        assert 3 <= len(captured) <= len(histories[0])  # one an epoch, and none operation by operation
    for one, other in zip(*histories, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)


def test_a_run_in_the_paper_s_order_stays_on_one_stream() -> None:
    x = torch.randn(64, 3, 8, 8).cuda()
    y = (x[:, 0].mean((1, 2)) > 0).long()
    data = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    recipe = hgnp.Recipe(
        keep=0.5, warmup_epochs=3, neurons_per_round=10, finetune_epochs=3, lr=0.05, seed=0, bound=0.0,
        flatness={"direction_from": "this_batch"},
    )  # fmt: skip
    streams = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # autograd warns of parameters that it met on another stream
        hgnp.prune(
            net().float(), data, data, recipe=recipe, on_epoch=lambda _: streams.append(torch.cuda.current_stream())
        )
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.default_stream()


def test_memory_does_not_grow_with_removals() -> None:
    """Graphs of the network after a removal take the memory of those before it."""
    model = net()
    neurons = hgnp.Neurons(model, batches(1)[0][0][:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    graphed = Graphed(*make_step(model, mu=0.0))
    reserved = []
    with graphed.running(), graph_replays() as replayed:
        for _ in range(8):
            for x, y in batches(4):
                graphed.backward(x, y)
                graphed.optimizer_step(optimizer)
            scores = hgnp.sensitivity(model, neurons, batches(1))
            neurons.remove(neurons.least(scores, 1), optimizer)
            reserved.append(torch.cuda.memory_reserved())
    assert replayed
    assert reserved[-1] == reserved[2]
