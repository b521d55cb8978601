"""What `Graphed` decides on the host, without a GPU: graphs are stood in for by work that is done again at every replay.

It leaves out what a graph itself does; test_graphed_cuda.py has that."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from graphed_cases import Again, Net, Stand, prepared, replays, stand_in
from hgnp.curvature import device, eigen
from hgnp.curvature.step import make_step
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import CaptureError
from hgnp.flatness import step_and_state
from hgnp.training.data import Prefetcher


def trained(stood_in: bool, choices: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net().double()
    data = [(torch.randn(n, 3, 6, 6).double(), torch.randint(0, 5, (n,))) for n in (12, 12, 12, 7) * 10]
    neurons = hgnp.Neurons(net, data[0][0][:2])
    flat = hgnp.Flatness(net, **choices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    trainer: Any = flat
    if stood_in:
        Stand.graphed = trainer = Graphed(*step_and_state(flat))
    losses, seen = [], []
    with replays() as replayed:
        for number, (x, y) in enumerate(data):
            if number == 22:
                neurons.remove(neurons.least(hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat), 5), optimizer)
            flat.mu = choices["mu"] * min(1.0, (number + 1) / 6)
            if not stood_in or number % 3:  # graphs put their gradients in place of those that are there
                optimizer.zero_grad(set_to_none=True)
            losses.append(trainer.backward(x, y).item())
            optimizer.step()
            seen.append((not step_and_state(flat)[1].plan.penalty, flat.block, flat.curvature, flat.radius))
    assert not stood_in or (trainer.refused is None and len(replayed) > 20)
    return losses, seen, {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize(
    "choices",
    [
        {"mu": 0.0},
        {"mu": 0.05, "bound": 0.0},
        {"mu": 0.05, "bound": 0.2, "refresh_every": 3},
        {"mu": 0.05, "bound": 0.025, "refresh_every": 4, "skip_inactive": True},
        {"mu": 0.05, "bound": 0.75, "refresh_every": 3, "skip_inactive": True, "kfac_approx": "expand"},
        {"mu": 0.05, "bound": 0.3, "refresh_every": 3, "skip_inactive": True},
        {"mu": 0.05, "bound": 0.3, "scaling": "scale_invariant"},
        {"mu": 0.05, "bound": 0.05, "direction_from": "this_batch"},
        {
            "mu": 0.05,
            "bound": 0.3,
            "direction_from": "this_batch",
            "kfac_approx": "expand",
            "scaling": "scale_invariant",
        },
        {"mu": 0.05, "bound": 0.3, "flatness": "paper"},
        {"mu": 0.05, "bound": 0.6, "refresh_every": 2, "skip_inactive": True, "direction_over": "network"},
        {"mu": 0.05, "bound": 0.0, "penalty_every": 3, "direction_over": "network"},
        {"mu": 0.05, "bound": 0.2, "penalty_every": 2, "refresh_every": 2},
        {"mu": 0.05, "bound": 0.3, "penalty_every": 2, "flatness": "paper"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_graphed_and_eager_steps_have_the_same_trajectory(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    losses, seen, state = trained(True, choices)
    expected, also_seen, other = trained(False, choices)
    assert losses == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(state, other, rtol=1e-10, atol=1e-10)
    if choices["mu"]:
        assert [(rested, block) for rested, block, *_ in seen] == [(rested, block) for rested, block, *_ in also_seen]
        assert [q for *_, q, _ in seen] == pytest.approx([q for *_, q, _ in also_seen], rel=1e-7, nan_ok=True)
        assert any(rested for rested, *_ in seen) is ("skip_inactive" in choices or "penalty_every" in choices)


def test_a_scale_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    Stand.graphed = graphed = Graphed(*make_step(net, mu=0.05, bound=-1.0))
    for _ in range(4):
        graphed.backward(x, y)
    for scale in (2.0, torch.full((1,), 2.0).double()):
        net.zero_grad()
        graphed.backward(x, y)
        once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        graphed.backward(x, y, scale=scale)
        twice = [p.grad for p in net.parameters()]
        # v goes on from step to step
        torch.testing.assert_close(twice, [2 * grad for grad in once], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("stage", ["backward_loss_and_refresh", "tangents", "backward_penalty"])
def test_a_step_whose_piece_cannot_be_captured_is_made_once(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the paper's order, with a stage of each piece: what the pieces before it did stands."""
    stand_in(monkeypatch)
    found = []
    for able in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        step, state = make_step(net, mu=0.05, bound=-1.0, direction_from="this_batch")
        run = getattr(step, stage)

        def captured(*args: Any, run: Any = run, able: bool = able, **kwargs: Any) -> Any:
            if Stand.recording and not able:
                raise CaptureError("it cannot")
            return run(*args, **kwargs)

        monkeypatch.setattr(step, stage, captured)
        Stand.graphed = graphed = Graphed(step, state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(6):
            x, y = torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
            optimizer.zero_grad(set_to_none=True)
            graphed.backward(x, y)
            optimizer.step()
        assert graphed.refused == (None if able else "it cannot")
        found.append(net.state_dict())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_what_was_made_in_a_capture_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1237, torch.double, torch.device("cpu")  # of no other test: the cache is the process's

    class Unable(Stand):
        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            with monkeypatch.context() as patch:
                patch.setattr(device, "capturing", lambda: True)
                eigen.arbitrary(*size).fill_(torch.nan)  # as memory that no kernel has written to
            raise CaptureError("it cannot")

    stand_in(monkeypatch, Unable)
    torch.manual_seed(0)
    graphed = prepared(Net().double())[1]
    for _ in range(3):
        graphed.backward(torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,)))
    assert graphed.refused == "it cannot"
    assert eigen.arbitrary(*size).norm().item() == pytest.approx(1)


def test_gradients_that_hooks_see_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net = Net().double()
    seen: list[bool] = []
    next(net.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(True))
    Stand.graphed = graphed = Graphed(*make_step(net, mu=0.05, bound=-1.0, direction_from="this_batch"))
    for _ in range(4):
        net.zero_grad()
        graphed.backward(torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,)))
    assert graphed.refused == "hooks get its gradients"
    assert len(seen) == 4


class Deeper(Net):
    """With a layer that only larger pictures meet."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        large = x.shape[-1] > 6
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.c(x)) if large else x
        return self.out(torch.relu(self.nb(self.b(x)) + x).mean((2, 3)))


@pytest.mark.parametrize("choices", [{}, {"direction_from": "this_batch"}, {"flatness": "paper"}], ids=str)
def test_layers_that_only_some_batches_meet(choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the others are there when the first such batch comes."""
    stand_in(monkeypatch)
    found = []
    for stood_in in (True, False):
        torch.manual_seed(0)
        flat, graphed, optimizer = prepared(Deeper().double(), bound=-1.0, **choices)
        data = [(torch.randn(12, 3, n, n).double(), torch.randint(0, 5, (12,))) for n in (6, 6, 6, 8, 6, 6, 8, 8, 6)]
        given = [x.clone() for x, _ in data]
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            losses.append((graphed if stood_in else flat).backward(x, y).item())
            optimizer.step()
        assert all(torch.equal(x, was) for (x, _), was in zip(data, given, strict=True))
        found.append((losses, flat.net.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


class Branches(nn.Module):
    """The branch with the larger input has the larger λ."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.left(x[:, :3])) + torch.tanh(self.right(x[:, 3:]))


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ORDERS = {
    "this_batch": {"direction_from": "this_batch"},
    "last_batch": {},
    "skip_inactive": {"refresh_every": 2, "skip_inactive": True},  # every other step refreshes v, without a penalty
}


@pytest.mark.parametrize("executor", ["eager", "stand-in", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("order", ORDERS)
def test_v_stays_in_its_block_where_no_eigenvalue_is_finite(
    order: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its graph was captured while v was in another block."""
    if executor != "cuda":
        stand_in(monkeypatch)
    torch.manual_seed(0)
    device = "cuda" if executor == "cuda" else "cpu"
    net, y = Branches().to(device, torch.double), torch.arange(8, device=device) % 4
    flat, graphed, _ = prepared(net, bound=1e9, **ORDERS[order])
    large = {"left": [1.0, 0.1], "right": [0.1, 1.0], "nan": [torch.nan, torch.nan]}
    seen: list[str | None] = []
    with replays() as replayed, graphed.running():
        for kind in [*["left"] * 8, *["right"] * 4, *["nan"] * 4, "left"]:
            x = torch.randn(8, 2, 3).double() * torch.tensor(large[kind]).view(2, 1)
            (flat if executor == "eager" else graphed).backward(x.flatten(1).to(device), y)
            seen.append(flat.block)
    assert executor == "eager" or (graphed.refused is None and replayed)
    assert (seen[7], seen[11]) == ("left", "right")
    assert seen[12:16] == ["right"] * 4
    assert seen[16] == ("left" if order == "this_batch" else "right")  # the lagged v is still that of the step before


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "elsewhere", "momentum", "loss", "bound", "hook", "none"])
def test_what_is_done_to_the_network_between_epochs_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    found = []
    for stood_in in (True, False):
        torch.manual_seed(0)
        net = Net().double()
        net.b.requires_grad_(change != "unfreeze")
        flat, graphed, optimizer = prepared(net, bound=-1.0, loss=nn.CrossEntropyLoss())
        for epoch in range(2):
            graphed.begin_epoch()
            for number in range(4):
                x, y = torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
                optimizer.zero_grad()
                with replays() as replayed:
                    (graphed if stood_in else flat).backward(x, y)
                if epoch and not number and stood_in:
                    assert bool(replayed) is (change in ("bound", "none"))
                optimizer.step()
            if change in ("freeze", "unfreeze"):
                net.b.requires_grad_(change == "unfreeze")
            elif change == "elsewhere":
                net.a.weight.data = net.a.weight.data.clone()
            elif change == "momentum":
                net.na.momentum = 0.5
            elif change == "loss":
                vars(step_and_state(flat)[0].loss).update(label_smoothing=0.1)
            elif change == "bound":
                flat.bound = 0.1
            elif change == "hook":
                net.a.weight.register_hook(lambda grad: 2 * grad)
        found.append(net.state_dict())
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


def test_gradients_that_were_replaced_after_a_step_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    found = []
    for stood_in in (True, False):
        torch.manual_seed(0)
        net = Net().double()
        flat, graphed, optimizer = prepared(net, mu=0.0)

        def centre(*_: Any, net: Net = net) -> None:
            for weight in (net.b.weight, net.out.weight):
                assert weight.grad is not None
                weight.grad = weight.grad - weight.grad.mean()

        optimizer.register_step_pre_hook(centre)
        for _ in range(6):
            x, y = torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
            if stood_in:
                graphed.backward(x, y)
                graphed.optimizer_step(optimizer)
            else:
                optimizer.zero_grad()
                flat.backward(x, y)
                optimizer.step()
        found.append(net.state_dict())
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


def test_a_refresh_without_a_penalty_does_not_send_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product with F takes q along v over the network; the host does not ask for it."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    flat, graphed, _ = prepared(net, bound=1e9, refresh_every=2, skip_inactive=True, direction_over="network")
    state = step_and_state(flat)[1]
    sent = set()
    with replays() as replayed:
        for _ in range(8):
            graphed.backward(x, y)
            assert state.statistics is not None
            sent.add((state.plan.penalty, state.statistics.sent is not None))
    assert {replay.piece for replay in replayed} >= {"unpenalized", "forward"}
    assert sent >= {(True, True), (False, False)}
    assert (False, True) not in sent


def test_an_epoch_that_was_stopped_leaves_no_batch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    batches = [(torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))) for _ in range(5)]
    _, graphed, _ = prepared(Net().double(), bound=-1.0)
    graphed.begin_epoch()
    ahead = Prefetcher(batches)
    graphed.fetch = ahead.fetch
    for _, (x, y) in zip(range(4), ahead, strict=False):
        graphed.backward(x, y)
    left = weakref.ref(batches[4][0])
    del batches, ahead, x, y
    graphed.fetch = None
    assert left() is not None
    graphed.begin_epoch()
    assert left() is None
