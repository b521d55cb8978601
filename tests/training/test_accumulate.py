"""`accumulate`: one step of the optimizer on several batches equals one on a large batch; each batch has its own penalty."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hgnp
from graphed_cases import Again, Stand, stand_in
from hgnp.curvature.step import make_step
from hgnp.execution.graphed import Graphed
from hgnp.training.trainer import EpochStatistics, Trainer
from train_cases import StopError, loaders, made, recipe, stripes

SIZES = (7, 7, 7, 7, 7, 4)  # with accumulate=4 the last step has two batches, of unequal size


def smooth() -> nn.Sequential:
    """Without batch norms, whose statistics are those of a batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


def data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    x, y = stripes(sum(sizes))
    y[::5] = -100  # ignored labels: batches differ in how many count
    return list(zip(x.double().split(sizes), y.split(sizes), strict=True))


WEIGHTED = partial(F.cross_entropy, weight=torch.tensor([0.5, 2.0, 1.3]).double())
QUICK = {"keep": 1.0, "warmup_epochs": 3, "finetune_epochs": 0, "precision": "float32"}


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, WEIGHTED, lambda z, y: (z - F.one_hot(y.clamp_min(0), 3)).abs().mean()]
)
def test_a_step_on_several_batches_equals_one_on_a_large_batch(loss: Any) -> None:
    """Also in the last step of an epoch, which has fewer batches, and with clipping."""
    small, large = smooth(), smooth()
    adam = partial(torch.optim.AdamW, lr=0.01)
    for net, batches, accumulate in ((small, data(*SIZES), 4), (large, data(28, 11), 1)):
        r = recipe(mu=0.0, clip_norm=0.2, **QUICK)
        hgnp.prune(net, batches, recipe=r, loss=loss, optimizer=adam, accumulate=accumulate, verbose=False)
    assert not torch.equal(small[1].weight, smooth()[1].weight)
    torch.testing.assert_close(small.state_dict(), large.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "given", [{"bound": -1.0}, {"bound": 0.37, "refresh_every": 2}, {"flatness": "paper", "bound": 0.37}]
)
def test_each_accumulated_batch_has_its_own_penalty(given: dict[str, Any]) -> None:
    """Against a loop written by hand: ∇ Σ N_i·L_i / Σ N_i, where N_i counts labels, and Algorithm 1 gives each L_i."""
    net, by_hand = smooth(), smooth()
    r = recipe(mu=0.3, **QUICK | given)
    hgnp.prune(net, data(*SIZES), recipe=r, optimizer=partial(torch.optim.SGD, lr=0.1), accumulate=4, verbose=False)

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    flat = hgnp.Flatness(
        by_hand,
        mu=0.3,
        bound=r.bound,
        flatness=r.flatness,
        refresh_every=r.refresh_every,  # type: ignore[arg-type]
    )
    active = []
    for _ in range(3):
        for group in (data(*SIZES)[:4], data(*SIZES)[4:]):
            counts = [int((y >= 0).sum()) for _, y in group]
            sums = [torch.zeros_like(p) for p in by_hand.parameters()]
            for (x, y), count in zip(group, counts, strict=True):
                optimizer.zero_grad()
                flat.backward(x, y)
                active.append(flat.curvature > r.bound)
                for total, p in zip(sums, by_hand.parameters(), strict=True):
                    total += count * p.grad / sum(counts)
            for total, p in zip(sums, by_hand.parameters(), strict=True):
                p.grad = total
            optimizer.step()
    assert any(active)
    assert all(active) == (r.bound < 0)
    torch.testing.assert_close(net.state_dict(), by_hand.state_dict(), rtol=1e-10, atol=1e-12)


def test_batches_from_graphs_are_accumulated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs leave all gradients in one memory, and replace what is there."""
    stand_in(monkeypatch)
    replays: list[Again] = []
    replay = Again.replay
    monkeypatch.setattr(Again, "replay", lambda graph: (replays.append(graph), replay(graph)))
    trained = []
    for graphed in (False, True):
        net = smooth()
        step, state = make_step(net, mu=0.3, bound=0.37, refresh_every=2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(step, state, optimizer, recipe(precision="float32"), torch.device("cpu"), accumulate=4)
        if graphed:
            Stand.graphed = trainer.executor = Graphed(step, state)
        for epoch in range(3):
            seen = trainer.train(
                data(*SIZES), total=6, epoch=epoch, rate=None, mu=lambda _: 0.3, before_step=lambda _: None,
                show=lambda *_: None,
            )  # fmt: skip
        assert len(seen.losses) == 6
        assert bool(replays) is graphed
        trained.append(net.state_dict())
    torch.testing.assert_close(*trained, rtol=1e-10, atol=1e-12)


def test_steps_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """For callbacks, rounds of pruning and schedulers; and a run resumes with the same `accumulate` alone."""
    per_epoch = 2  # six batches
    r = recipe(keep=0.6, prune_unit="steps", prune_every=2, neurons_per_round=4, warmup_epochs=1, finetune_epochs=0)
    seen: list[tuple[int, int]] = []
    versions: list[int] = []

    def watch(state: Any) -> None:
        seen.append((state.epoch, state.step))
        versions.append(state.neurons.version)

    def interrupt(state: Any) -> None:
        if state.neurons.version:
            raise StopError

    def run(net: nn.Module, accumulate: int = 4, **given: Any) -> hgnp.Result:
        cycle = partial(OneCycleLR, max_lr=0.1, total_steps=40)
        return hgnp.prune(
            net, *loaders(16), recipe=r, accumulate=accumulate, scheduler=cycle, verbose=False, **given
        )  # fmt: skip

    result = run(made(), on_step=watch)
    assert seen == [(epoch, step) for epoch in range(result.epochs) for step in range(per_epoch)]
    assert versions[: 2 * per_epoch] == [0, 0, 1, 1]  # a round before every second step, after one epoch
    again = made()
    with pytest.raises(StopError):
        run(again, out=tmp_path / "run", on_epoch=interrupt)
    with pytest.raises(ValueError, match="resume: accumulate must be 4 as when the run started, got 2"):
        run(made(), accumulate=2, out=tmp_path / "run", resume=True)
    again = made(5)
    run(again, out=tmp_path / "run", resume=True)
    torch.testing.assert_close(again.state_dict(), result.model.state_dict(), rtol=0, atol=0)


def test_sam_accumulates_the_gradients_at_each_batchs_own_point() -> None:
    net, by_hand = smooth(), smooth()
    r = recipe(method="sam", rho=0.1, **QUICK | {"warmup_epochs": 1})
    hgnp.prune(net, data(7, 7), recipe=r, optimizer=partial(torch.optim.SGD, lr=0.1), accumulate=2, verbose=False)
    sums = [torch.zeros_like(p) for p in by_hand.parameters()]
    counts = [int((y >= 0).sum()) for _, y in data(7, 7)]
    for (x, y), count in zip(data(7, 7), counts, strict=True):
        up = torch.autograd.grad(F.cross_entropy(by_hand(x), y), list(by_hand.parameters()))
        length = torch.stack([g.norm() for g in up]).norm()
        moved = copy.deepcopy(by_hand)
        with torch.no_grad():
            for p, g in zip(moved.parameters(), up, strict=True):
                p += 0.1 * g / length
        for total, g in zip(
            sums, torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters())), strict=True
        ):
            total += count * g / sum(counts)
    with torch.no_grad():
        for p, g in zip(by_hand.parameters(), sums, strict=True):
            p -= 0.1 * g
    torch.testing.assert_close(net.state_dict(), by_hand.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_an_invalid_accumulate_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^accumulate must be an integer ≥ 1, the batches per step of the optimizer, got"
    ):
        hgnp.prune(made(), *loaders(), recipe=recipe(), accumulate=wrong)


# Schedulers that are stepped after every step of the optimizer


def rates(
    make: Callable[..., Any], batches: int = 5, accumulate: int = 2, **given: Any
) -> tuple[list[float], list[float]]:
    """Learning rates of the steps of a run of three epochs of three steps, and of its epochs' rows."""
    seen: list[float] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            super().step()

    result = hgnp.prune(
        smooth(), data(*[6] * batches), recipe=recipe(mu=0.0, **QUICK | given), accumulate=accumulate,
        optimizer=partial(Watching, lr=0.1), scheduler=make, verbose=False,
    )  # fmt: skip
    return seen, [row["lr"] for row in result.history]


def test_one_cycle_and_cyclic_schedulers_are_stepped_per_step_and_others_as_the_recipe_says() -> None:
    steps = 9  # three epochs of ⌈5 / 2⌉ steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cycle = OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)
    want = []
    for _ in range(steps):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cycle.step() if len(want) < steps else None
    seen, rows = rates(partial(OneCycleLR, max_lr=0.5, total_steps=steps))
    assert seen == want
    assert rows[-1] == want[-1] == pytest.approx(0.5 / 25 / 1e4)
    # a run that is longer stays at the last rate, one step per epoch takes three
    assert rates(partial(OneCycleLR, max_lr=0.5, total_steps=6))[0][5:] == [pytest.approx(0.5 / 25 / 1e4)] * 4
    by_epoch, _ = rates(partial(OneCycleLR, max_lr=0.5, total_steps=3), scheduler_interval="epoch")
    assert [by_epoch[i] == by_epoch[i + 1] for i in range(8)] == [True, True, False, True, True, False, True, True]
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    assert rates(halving)[0] == [0.1] * 3 + [0.05] * 3 + [0.025] * 3
    assert rates(halving, scheduler_interval="step")[0] == [0.1 * 0.5**i for i in range(9)]
    with pytest.raises(ValueError, match="scheduler_interval must be 'epoch' with ReduceLROnPlateau"):
        hgnp.prune(
            made(), *loaders(), recipe=recipe(scheduler_interval="step"),
            scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        )  # fmt: skip


def test_a_trainer_accumulates_what_batches_leave_and_nothing_of_the_step_before() -> None:
    net = smooth()
    trainer = Trainer(
        *make_step(net, mu=0.0), torch.optim.SGD(net.parameters(), lr=0.0), recipe(precision="float32"),
        torch.device("cpu"), accumulate=2,
    )  # fmt: skip
    net[1].requires_grad_(False)
    for batch in data(7, 4):
        trainer.backward(batch, EpochStatistics())
    trainer.optimizer_step()
    first = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    assert first[:2] == [None, None]
    for batch in data(7, 4):
        trainer.backward(batch, EpochStatistics())
    trainer.optimizer_step()
    assert all(
        p.grad is None if g is None else torch.equal(p.grad, g) for p, g in zip(net.parameters(), first, strict=True)
    )
