"""A round of pruning, and a run that runs out of neurons."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from cases.heads import FusedHeads, transformer
from hgnp.curvature.step import make_step
from hgnp.errors import InputError
from hgnp.experiments.config import Config
from hgnp.experiments.models import DigitsNet
from hgnp.progress import LineProgress
from hgnp.pruning.summary import Frozen
from hgnp.pruning.verify import CutVerifier
from hgnp.train import prune_and_report
from hgnp.training.measure import Measurements
from hgnp.training.pruner import Pruner
from hgnp.training.task import CallbackState
from hgnp.training.trainer import Trainer
from train_cases import Net, StopError, loaders, made, recipe


def test_a_target_that_the_method_cannot_meet_is_refused_before_training() -> None:
    """The norms' scales say nothing of the linear layer, and what they speak of is not enough for the target."""
    net = made()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError, match=r"got 0\.03: .* 20 neurons \(c\) have no bn_scale score and 3 neurons are frozen"
    ):
        hgnp.prune(net, *loaders(), recipe=recipe(method="bn_scale", keep=0.03))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    bare = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="net must have a layer with neurons followed by a norm"):
        hgnp.prune(bare, *loaders(), recipe=recipe(method="bn_scale", keep=0.5))


@pytest.mark.parametrize("coupling", ["coupled", "paper"])
def test_the_reachable_target_is_computed_with_the_runs_coupling(
    coupling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Residual()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 6, 6))
    pruner = Pruner(
        neurons, *make_step(net, mu=0.0), recipe(keep=0.001, coupling=coupling),
        torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}),
    )  # fmt: skip
    asked, least = [], hgnp.Neurons.least

    def seen(*args: Any, **given: Any) -> Any:
        asked.append(given.get("coupling", "coupled"))
        return least(*args, **given)

    monkeypatch.setattr(hgnp.Neurons, "least", seen)
    with pytest.raises(ValueError, match=r"got 0\.001"):
        pruner.check_reachable()
    assert set(asked) == {coupling}


class Side(nn.Module):
    """Most of its neurons are in a branch that only training runs, so that scores, taken in evaluation mode, do not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(36, 6), nn.Linear(6, 3)
        self.branch, self.side = nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x.flatten(1)))
        return self.out(x) + self.side(torch.relu(self.branch(x))) if self.training else self.out(x)


@pytest.mark.parametrize("method", ["taylor", "hgnp"])
def test_a_target_that_derivatives_cannot_meet_is_refused_before_training(method: str) -> None:
    with pytest.raises(ValueError, match=r"got 0\.2: .* 64 neurons \(branch\) have no taylor score") as caught:
        hgnp.prune(Side(), *loaders(), recipe=recipe(method=method, keep=0.2, target="neurons"))
    assert "\n" not in str(caught.value)
    result = hgnp.prune(
        Side(), *loaders(), recipe=recipe(method="l2", keep=0.2, target="neurons", neurons_per_round=60)
    )
    assert result.reached  # weights are there in every mode


def test_a_network_without_removable_neurons_is_refused_with_the_reasons() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(
        ValueError, match=r"keep must be 1 .*, got 0\.3: no neuron can be removed \(1: it is protected; 3: "
    ) as caught:
        hgnp.prune(net, *loaders(), recipe=recipe(), protect=["1"])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="it has no linear or convolutional layer"):
        hgnp.prune(_Bias(), *loaders(), recipe=recipe(method="taylor"))


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3] + self.bias


def test_a_run_that_can_remove_no_more_neurons_says_so_also_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what its scores speak of is not enough for the target, which is not looked at here."""
    monkeypatch.setattr(Pruner, "check_reachable", lambda self: None)

    def stop(state: Any) -> None:
        if state.epoch == 3:
            raise StopError

    r = recipe(method="bn_scale", keep=0.03, warmup_epochs=0, neurons_per_round=20, finetune_epochs=3)
    whole = hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path / "whole")
    assert whole.history[-1]["widths"] == {"a": 1, "b": 1, "c": 20}
    assert [row["removed"] for row in whole.history[:4]] == [20, 6, 0, 0]  # the third round finds nothing
    assert whole.epochs == 6
    assert whole.stopped == "no more neurons could be removed"
    with pytest.raises(StopError):
        hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path / "pieces", on_epoch=stop)
    pieces = hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path / "pieces", resume=True)
    assert (pieces.stopped, pieces.epochs, pieces.kept) == (whole.stopped, whole.epochs, whole.kept)


class Residual(nn.Module):
    """Groups of two and three neurons: what fits into a number and what does not takes turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 10, 3, padding=1), nn.Conv2d(10, 8, 3, padding=1)
        self.d, self.out = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(self.c(torch.relu(self.b(x))) + x)
        return self.out(torch.relu(self.d(x) + x).mean((2, 3)))


@pytest.mark.parametrize("keep", [0.8, 0.6, 0.5, 0.35])
def test_the_last_round_removes_no_more_than_the_target_needs(keep: float) -> None:
    torch.manual_seed(0)
    net = Residual()
    x = loaders()[0].dataset[0][0].unsqueeze(0).repeat(2, 1, 1, 1)
    neurons = hgnp.Neurons(net, x)
    pruner = Pruner(
        neurons, *make_step(net, mu=0.0), recipe(keep=keep, method="l2", neurons_per_round=neurons.count),
        torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}),
    )  # fmt: skip
    scores = hgnp.sensitivity(net, neurons, [], criterion="l2")
    possible = [neurons.preview(neurons.least(scores, n)).kept for n in range(1, neurons.count)]
    pruner.round([])
    assert neurons.kept == max(kept for kept in possible if kept <= keep)


@pytest.mark.parametrize("given", [{}, {"coupling": "paper"}, {"target": "macs"}, {"neurons_per_round": 1}], ids=str)
def test_a_run_with_round_to_reaches_its_target(given: dict[str, Any]) -> None:
    result = hgnp.prune(
        made(), *loaders(), recipe=recipe(**({"keep": 0.35, "round_to": 4, "warmup_epochs": 1} | given))
    )
    assert result.stopped is None
    assert result.target.got <= 0.35
    rows = [row["widths"] for row in result.history]
    assert all(width % 4 == 0 for row in rows for width in row.values())
    assert rows[-1] != {"a": 12, "b": 16, "c": 20}


def test_a_run_keeps_limits_by_layer_and_resumes_with_them_in_order(tmp_path: Path) -> None:
    limits = {"floor": {"a": 7, "*": 3}, "max_removed": {"c": 0.5}, "round_to": {"[bc]": 4}}
    used = Config.from_dict(
        {"model": "m:N", "data": "m:d", "recipe": {"keep": 0.4}}, where="here", name="n"
    ).with_settings(["recipe.floor={a: 7, '*': 3}", "recipe.max_removed={c: 0.5}", "recipe.round_to={'[bc]': 4}"])
    assert used.recipe == {"keep": 0.4} | limits
    r = recipe(**used.recipe, warmup_epochs=1, finetune_epochs=1)
    with pytest.raises(StopError):
        hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path, on_epoch=raise_once_pruned, verbose=False)
    swapped = dataclasses.replace(r, floor={"*": 3, "a": 7})
    with pytest.raises(ValueError, match=r"resume: floor must be {'a': 7, '\*': 3} as in"):
        hgnp.prune(made(), *loaders(), recipe=swapped, out=tmp_path, resume=True, verbose=False)
    result = hgnp.prune(made(), *loaders(), recipe=r, out=tmp_path, resume=True, verbose=False)
    assert result.recipe.floor == limits["floor"]
    assert result.target.got <= 0.4
    rows = [row["widths"] for row in result.history]
    assert all(row["a"] >= 7 and row["c"] >= 10 and row["b"] % 4 == row["c"] % 4 == 0 for row in rows)
    assert rows[-1]["a"] < 12
    assert rows[-1]["b"] < 16


def raise_once_pruned(state: CallbackState) -> None:
    if state.neurons.version:
        raise StopError


@pytest.mark.parametrize("keep", [0.8, 0.6, 0.5])
def test_the_last_round_with_round_to_is_minimal_and_confirms_its_best_selection_alone(
    keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Residual()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 6, 6))
    pruner = Pruner(
        neurons, *make_step(net, mu=0.0), recipe(keep=keep, method="l2", neurons_per_round=neurons.count, round_to=2),
        torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}),
    )  # fmt: skip
    scores = hgnp.sensitivity(net, neurons, [], criterion="l2")
    possible = [neurons.preview(neurons.least(scores, n, round_to=2)).kept for n in range(1, neurons.count)]
    tried, mismatch = [], CutVerifier.mismatch

    def counted(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        return mismatch(*args, **kwargs)

    monkeypatch.setattr(CutVerifier, "mismatch", counted)
    pruner.round([])
    assert max(kept for kept in possible if kept <= keep) <= neurons.kept <= keep
    assert all(layer.alive % 2 == 0 for layer in neurons.layers)
    assert len(tried) == 2  # the round's own cut, and the one that is just enough


def test_a_rounded_group_that_later_ones_make_unnecessary_is_not_removed() -> None:
    """By importance the first layer's rounded group goes first, then two of the second's, which alone meet the target."""
    net = DigitsNet()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 8, 8))
    small = dict(zip(["features.0", "features.3", "features.7", "features.10"], [40, 40, 8, 16], strict=True))
    neurons.remove({layer.name: list(range(layer.alive - small[layer.name])) for layer in neurons.layers})
    for name, width in small.items():
        sizes = torch.full((width,), 9.0)
        if name == "features.0":
            sizes[:8] = 0.1
        elif name == "features.3":
            sizes[:16] = torch.tensor([1.0, 2.0]).repeat(8)
        weight = net.get_parameter(f"{name}.weight")
        with torch.no_grad():
            weight *= (sizes / weight.flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
    r = recipe(keep=0.05, method="l2", neurons_per_round=40, round_to=8)
    pruner = Pruner(neurons, *make_step(net, mu=0.0), r, torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}))
    scores = hgnp.sensitivity(net, neurons, [], criterion="l2")
    kept = [neurons.preview(neurons.least(scores, n, round_to=8)).kept for n in (8, 16, 24)]
    assert kept[1] > 0.05 > kept[2]
    assert pruner.round([]) == 16
    assert {layer.name: layer.alive for layer in neurons.layers} == small | {"features.3": 24}
    assert kept[2] < neurons.kept <= 0.05


class Moody(nn.Module):
    """Its code does something else with three to five channels: cuts down to there do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(1, 12, 3), nn.Conv2d(12, 12, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = torch.relu(x) if 3 <= x.size(1) <= 5 else torch.tanh(x)
        return self.out(torch.relu(self.b(x)).mean((2, 3)))


def test_the_last_round_confirms_every_selection_if_the_best_fails() -> None:
    torch.manual_seed(0)
    net = Moody()
    neurons = hgnp.Neurons(net, torch.zeros(2, 1, 6, 6))
    with torch.no_grad():
        net.a.weight *= 1e-3  # a's neurons are the first to go
    r = recipe(keep=0.45, method="l2", neurons_per_round=neurons.count)
    pruner = Pruner(neurons, *make_step(net, mu=0.0), r, torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}))
    assert pruner.round([])
    assert neurons.kept <= 0.45
    assert not 3 <= net.a.out_channels <= 5


def test_neurons_that_a_removal_freezes_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Frozen("late", "it is tired", 7)
    monkeypatch.setattr(hgnp.Neurons, "frozen", property(lambda self: (late,) if self.version else ()))
    prune_and_report(made(), *loaders(), recipe=recipe(), progress=LineProgress())
    assert capsys.readouterr().out.count("late: its 7 neurons can no longer be removed: it is tired") == 1


def test_rounds_and_measurements_run_on_the_stream_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    now = [0]

    @contextmanager
    def running(self: Trainer) -> Iterator[None]:
        now[0] += 1
        yield
        now[0] -= 1

    score, sharpness = Pruner.round, Measurements.with_sharpness
    monkeypatch.setattr(Trainer, "running", running)
    monkeypatch.setattr(Pruner, "round", lambda *args: inside.append(bool(now[0])) or score(*args))
    monkeypatch.setattr(Measurements, "with_sharpness", lambda *args: inside.append(bool(now[0])) or sharpness(*args))
    hgnp.prune(made(), *loaders(), recipe=recipe())
    assert len(inside) > 3  # rounds, and curvature before and after
    assert all(inside)
    assert now == [0]


def test_a_head_fits_into_a_round_of_fewer_neurons_than_it_has_rows() -> None:
    torch.manual_seed(0)
    net = transformer(FusedHeads(6, num_heads=8, head_dim=20))
    x, y = torch.randn(32, 5, 6), torch.arange(32) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    short = recipe(keep=0.4, method="taylor", neurons_per_round=50, warmup_epochs=0, finetune_epochs=0)
    result = hgnp.prune(net, loader, recipe=short)
    heads = net.attn.num_heads
    assert result.reached
    assert result.history[0]["widths"] == {"attn": heads}
    assert heads == 3  # of 60 rows each: 3 leave 39 % of the parameters
    assert net.attn.qkv.weight.shape == (3 * 20 * heads, 6)


def test_rounds_after_the_first_score_by_one_forward_pass() -> None:
    """Whether samples mix is found out once for a run."""
    passes: list[int] = []

    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and type(x) is Tensor and len(x) == 24:  # a batch of the scores
                passes[-1] += 1
            return super().forward(x)

    torch.manual_seed(0)
    net = Counting()
    train, _ = loaders()

    def on_epoch(state: Any) -> bool:
        passes.append(0)
        return len(passes) == 5

    passes.append(0)
    given = recipe(method="taylor", warmup_epochs=1, neurons_per_round=2)
    hgnp.prune(net, train, recipe=given, on_epoch=on_epoch, verbose=False)
    assert passes[1] == 2  # one to see whether samples mix
    assert passes[2:4] == [1, 1]


class Drifting(nn.Module):
    """Samples mix once `mix` is not 0; masks are drawn in evaluation mode too."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.out, self.drop = nn.Linear(4, 24), nn.Linear(24, 3), drop
        self.mix = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.out(nn.functional.dropout(torch.tanh(self.a(x)), self.drop))
        return z + self.mix * (z.cumsum(0) - z)


def rounds(net: nn.Module) -> tuple[Pruner, list[tuple[Tensor, Tensor]]]:
    """A pruner that removes 4 neurons a round, and the batch of its scores."""
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double), torch.arange(12) % 3
    neurons, optimizer = hgnp.Neurons(net, x[:2]), torch.optim.SGD(net.parameters(), lr=0.1)
    given = recipe(keep=0.1, method="taylor", neurons_per_round=4)
    return Pruner(neurons, *make_step(net, mu=0.0), given, optimizer, neurons.preview({})), [(x, y)]


def test_a_round_notices_that_samples_have_begun_to_mix() -> None:
    net = Drifting().double()
    pruner, batches = rounds(net)
    assert pruner.round(batches) == 4
    net.mix.data.fill_(1.0)
    before = net.a.weight.detach().clone()
    with pytest.warns(UserWarning, match="or samples mix"):
        chosen = pruner.neurons.least(hgnp.sensitivity(net, pruner.neurons, batches), 4)["a"]
    with pytest.warns(UserWarning, match="or samples mix"):
        pruner.round(batches)
    assert torch.equal(net.a.weight, before[[n for n in range(20) if n not in chosen]])


def test_a_network_that_draws_in_evaluation_mode_resumes_with_the_same_scores() -> None:
    """A resumed run finds out again whether samples mix, which draws random numbers."""
    found = []
    for resumed in (False, True):
        net = Drifting(drop=0.5).double()
        pruner, batches = rounds(net)
        pruner.round(batches)
        torch.manual_seed(1)
        (rounds(net)[0] if resumed else pruner).round(batches)
        found.append(net.a.weight)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("method", ["taylor", "l2"])
def test_a_network_that_cannot_be_scored_is_refused_before_training(method: str) -> None:
    class Checkpointed(Net):
        """In evaluation mode too, as timm's networks with `set_grad_checkpointing`."""

        def forward(self, x: Tensor) -> Tensor:
            trained.append(self.training and torch.is_grad_enabled())
            h = checkpoint(
                lambda x: torch.relu(self.nb(self.b(torch.relu(self.na(self.a(x)))))), x, use_reentrant=False
            )
            return self.out(torch.relu(self.c(h.mean((2, 3)))))  # type: ignore[no-any-return]

    trained: list[bool] = []
    given = recipe(method=method, warmup_epochs=1, finetune_epochs=0)
    if method == "l2":  # scores of weights need no pass
        assert hgnp.prune(Checkpointed(), *loaders(), recipe=given, verbose=False).reached
        return
    with pytest.raises(InputError, match="net must run without activation checkpointing in evaluation mode"):
        hgnp.prune(Checkpointed(), *loaders(), recipe=given, verbose=False)
    assert sum(trained) <= 4  # passes that look at the first batch
