"""How a run trains: learning rates, optimizers, the penalty's weight, clipping, precision."""

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hgnp
from hgnp.progress import LineProgress
from hgnp.train import prune_and_report
from hgnp.training.data import Prefetcher
from hgnp.training.optimizers import initialize_momentum
from hgnp.training.trainer import EpochStatistics
from train_cases import STEPS, loaders, made, recipe, stripes


def rates(result: hgnp.Result) -> list[float]:
    return [row["lr"] for row in result.history]


def test_cosine_over_the_run_and_over_the_fine_tuning() -> None:
    whole = rates(hgnp.prune(made(), *loaders(), recipe=recipe(schedule="cosine", anneal="run", finetune_epochs=4)))
    assert whole == sorted(whole, reverse=True)
    assert whole[0] > 0.045
    assert whole[-1] < 0.005
    late = hgnp.prune(made(), *loaders(), recipe=recipe(schedule="cosine", anneal="finetune", finetune_epochs=4))
    phases = [row["phase"] for row in late.history]
    assert all(lr == 0.05 for lr, phase in zip(rates(late), phases, strict=True) if phase != "finetune")
    last = [0.05 * (1 + math.cos(math.pi * (epoch + 1 - 1 / STEPS) / 4)) / 2 for epoch in range(4)]  # at the last step
    assert rates(late)[-4:] == pytest.approx(last)


def test_a_schedule_ends_with_a_run_that_meets_its_target_amid_an_epoch() -> None:
    """The last step of the epoch is not the end: a rate that falls to 0 at the end is what it would be a step earlier."""
    given = {"schedule": "cosine", "anneal": "run", "prune_unit": "steps", "finetune_epochs": 0, "warmup_epochs": 1}
    seen: list[float] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            super().step()

    for keep, every, n in ((0.6, 2, 3), (0.4, 4, 12)):  # the first meets its target earlier than was estimated
        seen.clear()
        mine = recipe(keep=keep, prune_every=every, neurons_per_round=n, **given)
        result = hgnp.prune(made(), *loaders(), recipe=mine, optimizer=lambda p: Watching(p, lr=0.05))
        assert result.reached
        assert seen == sorted(seen, reverse=True)
        position = [math.acos(2 * lr / 0.05 - 1) / math.pi for lr in seen]
        assert position[-1] + (position[-1] - position[-2]) == pytest.approx(1.0)


def test_schedules_steps_and_one_cycle() -> None:
    stepped = rates(
        hgnp.prune(made(), *loaders(), recipe=recipe(schedule="steps", anneal="run", lr_steps=[0.5], lr_factor=0.2))
    )
    assert sorted(set(stepped)) == pytest.approx([0.01, 0.05])
    cycle = rates(
        hgnp.prune(
            made(),
            *loaders(),
            recipe=recipe(schedule="one_cycle", anneal="run", keep=1.0, warmup_epochs=10, finetune_epochs=0),
        )
    )
    assert max(cycle) == pytest.approx(0.05, rel=0.1)
    assert cycle.index(max(cycle)) in (2, 3)
    assert cycle[-1] < 0.003


def test_own_optimizer_and_scheduler() -> None:
    net = made()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    result = hgnp.prune(net, *loaders(), recipe=recipe(), optimizer=optimizer, scheduler=scheduler)
    assert rates(result) == pytest.approx([0.01 * 0.5 ** (i + 1) for i in range(result.epochs)])
    for p in net.parameters():
        assert optimizer.state[p]["exp_avg"].shape == p.shape
    made_inside = hgnp.prune(
        made(), *loaders(), recipe=recipe(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    )  # fmt: skip
    assert made_inside.reached


def test_mu_warms_up() -> None:
    history = hgnp.prune(made(), *loaders(), recipe=recipe(mu=0.01, bound=0.0, mu_warmup_epochs=3)).history
    assert [row["mu"] for row in history[:4]] == pytest.approx(
        [0.01 * (i + 1 - 1 / STEPS) / 3 for i in range(3)] + [0.01]
    )
    assert 0 < history[0]["penalty"] < 0.01 * history[0]["curvature"]


@pytest.mark.parametrize("method", ["hgnp", "sam"])
def test_gradients_are_clipped(method: str) -> None:
    net = made()
    norms = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            norms.append(float(torch.stack([p.grad.norm() for p in net.parameters()]).norm()))
            super().step()

    def optimizer(p: Any) -> torch.optim.Optimizer:
        return Watching(p, lr=0.05)

    hgnp.prune(net, *loaders(), recipe=recipe(clip_norm=0.01, method=method), optimizer=optimizer)
    assert max(norms) <= 0.01001


@pytest.mark.parametrize("method", ["hgnp", "sam"])
def test_runs_in_float16_train(method: str) -> None:
    history = hgnp.prune(made(), *loaders(), recipe=recipe(keep=1.0, method=method, precision="fp16")).history
    assert history[-1]["loss"] < history[0]["loss"]


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_clipping_measures_the_gradients_that_the_optimizer_steps_on(precision: str) -> None:
    """In fp16 those of other parameters are still scaled by 65536."""
    net, norms = made(), []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            norms.append(float(torch.stack([p.grad.norm() for p in net.out.parameters()]).norm()))
            super().step()

    given = recipe(keep=1.0, clip_norm=0.01, mu=0.0, precision=precision, warmup_epochs=2, finetune_epochs=0)
    hgnp.prune(net, *loaders(), recipe=given, optimizer=Watching(net.out.parameters(), lr=0.05))
    assert norms == pytest.approx([0.01] * 2 * STEPS, rel=1e-3)


def test_clipping_does_not_see_the_gradients_of_earlier_steps() -> None:
    """Not those of parameters that the optimizer does not train either."""
    net = made()
    norms = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            norms.append(net.a.weight.grad.norm().item())  # type: ignore[union-attr]

    given = recipe(keep=1.0, clip_norm=1e9, mu=0.0, warmup_epochs=3, finetune_epochs=0)
    x, y = next(iter(loaders()[0]))
    hgnp.prune(net, [(x, y)], recipe=given, optimizer=Watching(net.out.parameters(), lr=0.05))
    assert norms == pytest.approx([norms[0]] * 3)


def test_fused_sgd_takes_parameters_that_are_unfrozen_later() -> None:
    found = []
    for fused in (True, None):
        net = made()
        optimizer = initialize_momentum(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=fused)
        )
        for step in range(4):
            net.a.requires_grad_(step > 1)
            optimizer.zero_grad()
            net(stripes(12)[0]).square().mean().backward()
            optimizer.step()
        found.append(net.state_dict())
    torch.testing.assert_close(*found)


def test_bf16_trains_float32_weights() -> None:
    result = hgnp.prune(made(), *loaders(), recipe=recipe(precision="bf16"))
    assert result.after.metric is not None
    assert result.after.metric > 0.9
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    exact = hgnp.prune(made(), *loaders(), recipe=recipe())
    assert result.history[0]["loss"] != exact.history[0]["loss"]


def test_an_epoch_that_skips_the_penalty_has_no_active_penalty() -> None:
    resting, plain = (EpochStatistics(losses=[torch.tensor(1.0)] * 2, skipped=rested).summary(0.5) for rested in (2, 0))
    assert (resting["active"], resting["penalty"], resting["radius"]) == (0.0, 0.0, None)
    assert plain["active"] is None  # there was no penalty


def test_steps_that_overflow_are_left_out_of_the_means() -> None:
    def row(*numbers: float) -> list[float | None]:
        q = [torch.tensor(number) for number in numbers]
        statistics = EpochStatistics(losses=[torch.tensor(1.0)] * len(q), radii=q, curvatures=q, mus=[0.5] * len(q))
        summary = statistics.summary(1.0)
        return [summary[name] for name in ("radius", "curvature", "penalty")]

    assert row(2.0, math.nan, math.inf) == [2.0, 2.0, pytest.approx(0.5 / 3)]
    assert row(math.nan, math.inf) == [None, None, 0.0]


def test_a_batch_may_be_fetched_ahead() -> None:
    def batches() -> Iterator[tuple[int, int]]:
        for number in range(3):
            made.append(number)
            yield number, number
        if fails:
            raise KeyError("a picture")

    for fails in (False, True):
        made: list[int] = []
        ahead = Prefetcher(batches())
        iterator = iter(ahead)
        assert next(iterator) == (0, 0)
        assert made == [0]
        assert ahead.fetch() == ahead.fetch() == (1, 1)
        assert made == [0, 1]
        assert [next(iterator), next(iterator)] == [(1, 1), (2, 2)]
        assert ahead.fetch() is None
        with pytest.raises(KeyError if fails else StopIteration):  # when its turn has come
            next(iterator)


def test_a_loaders_error_does_not_keep_the_callers_frame_alive() -> None:
    class Held:
        pass

    def train() -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(KeyError):
            list(Prefetcher(batches()))
        return weakref.ref(held)

    def batches() -> Iterator[tuple[int, int]]:
        raise KeyError("a picture")
        yield 0, 0

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("every", [True, False])
def test_reduce_lr_on_plateau_is_not_stepped_when_every_label_is_ignored(every: bool, tmp_path: Path) -> None:
    """Neither a batch nor a whole set without labels moves the learning rate."""
    x, y = stripes()
    none = torch.full_like(y, 255)
    val = [(x, none)] if every else [(x, none), (x, y)]
    plateau = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731
    notes: list[str] = []

    class Heard(LineProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    result = prune_and_report(
        made(), [(x, y)], val, recipe=recipe(keep=1.0, warmup_epochs=4, lr=0.01), scheduler=plateau,
        loss=nn.CrossEntropyLoss(ignore_index=255), out=tmp_path / "run", progress=Heard(),
    )  # fmt: skip
    assert result.history[-1]["lr"] == 0.01
    if every:
        assert {(row["val_loss"], row["metric"]) for row in result.history} == {(None, None)}
        assert (result.after.loss, result.after.metric) == (None, None)
        assert len([note for note in notes if note.startswith("scheduler: ReduceLROnPlateau is not stepped")]) == 1
        assert len([note for note in notes if note.startswith("val: every label is ignored")]) == 1
    else:
        with torch.no_grad():
            want = F.cross_entropy(result.model.eval()(x), y)
        assert result.after.loss == pytest.approx(float(want), rel=1e-5)
