"""Snapshots: their results, and that they do not affect the run."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.io import runs
from hgnp.result import Row
from hgnp.train import prune_and_report
from hgnp.training import checkpoint
from train_cases import Net, StopError, loaders, made, recipe, stripes

Changes = dict[str, Any]
RECIPES: dict[str, Changes] = {
    "hgnp": {"mu": 0.01, "bound": 0.0, "schedule": "cosine", "anneal": "finetune"},
    "paper": {"mu": 0.01, "bound": 0.0, "coupling": "paper", "lr": 0.01},
    "sam": {"method": "sam", "clip_norm": 1.0, "schedule": "one_cycle", "anneal": "finetune"},
    "macs": {"method": "taylor", "target": "macs"},
    "hybrid": {"method": "hybrid", "threshold": 0.6, "mu": 0.01, "bound": 0.0},
}


class Dropping(nn.Module):
    """With an addition, dropout and batch norms: random numbers and buffers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.b, self.nb = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        return self.out(self.drop(torch.relu(self.nb(self.b(x)) + x).mean((2, 3))))


def pruned(
    out: Path | None = None, *, resume: bool = False, on_epoch: Any = None, **changes: Any
) -> tuple[hgnp.Result, list[Any]]:
    """A run of `Dropping`, and the next numbers of all random number generators. Its loader has its own generator."""
    torch.manual_seed(3)
    net, generator = Dropping(), torch.Generator().manual_seed(5)
    train = DataLoader(TensorDataset(*stripes(48)), batch_size=16, shuffle=True, generator=generator)
    quick = {"neurons_per_round": 4, "finetune_epochs": 2, "keep": 0.3} | changes
    val = loaders()[1]
    result = hgnp.prune(net, train, val, recipe=recipe(**quick), out=out, resume=resume, on_epoch=on_epoch)
    after = [random.random(), float(np.random.rand()), float(torch.rand(())), generator.get_state().tolist()]
    return result, after


Runs = Callable[[str], tuple[hgnp.Result, list[Any]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The run of a recipe with two snapshots and a folder, and the next random numbers. Each is run once."""
    return functools.cache(
        lambda name: pruned(tmp_path_factory.mktemp(name) / "run", snapshots=(0.7, 0.5), **RECIPES[name])
    )


@pytest.fixture(scope="module")
def held() -> Runs:
    """The same without a folder."""
    return functools.cache(lambda name: pruned(snapshots=(0.7, 0.5), **RECIPES[name]))


def rows_of(folder: Path) -> list[Row]:
    return [dict(row) for row in runs.read(folder).rows]


def timeless(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["paper", "hybrid"])
def test_the_run_is_the_same_with_and_without_snapshots(name: str, saved: Runs, held: Runs) -> None:
    without, numbers = pruned(**RECIPES[name])
    for runs_with in (saved, held):
        with_, its = runs_with(name)
        assert len(with_.snapshots) == 2
        assert timeless(with_.history) == timeless(without.history)
        assert its == numbers
        assert_same(with_.model, without.model)


@pytest.mark.parametrize("name", ["paper", "sam", "macs", "hybrid"])
def test_a_snapshot_is_what_a_run_to_the_same_target_ends_with(name: str, saved: Runs, tmp_path: Path) -> None:
    run, _ = saved(name)
    for snapshot in run.snapshots:
        alone, _ = pruned(tmp_path / f"{snapshot.asked}", **RECIPES[name] | {"keep": snapshot.asked})
        assert run.out is not None
        assert snapshot.path == run.out / "snapshots" / str(snapshot.asked)
        assert_same(hgnp.load(snapshot.path, Dropping()), alone.model)
        ours, theirs = (timeless(rows_of(folder)) for folder in (snapshot.path, tmp_path / f"{snapshot.asked}"))
        assert ours == theirs
        assert ours[snapshot.epoch]["phase"] == "prune"
        assert (
            [row["phase"] for row in ours[snapshot.epoch + 1 :]] == ["finetune"] * snapshot.epochs == ["finetune"] * 2
        )
        assert snapshot.got == alone.target.got <= snapshot.asked
        after = alone.after
        assert (snapshot.metric, snapshot.val_loss) == (after.metric, after.loss)
        assert (snapshot.parameters, snapshot.neurons, snapshot.macs) == (after.parameters, after.neurons, after.macs)
        assert snapshot.kept == alone.kept


def test_a_schedule_over_the_whole_run_ends_with_the_snapshot(tmp_path: Path) -> None:
    run, _ = pruned(tmp_path / "run", snapshots=(0.6,), schedule="cosine", anneal="run", neurons_per_round=3)
    rates = [row["lr"] for row in rows_of(tmp_path / "run" / "snapshots" / "0.6")]
    taken = run.snapshots[0].epoch
    assert rates[:taken] == [row["lr"] for row in run.history[:taken]]
    assert rates[taken] > rates[taken + 1] > rates[taken + 2]
    assert rates[-1] < 0.01 * rates[0] < rates[taken]


def test_with_fewer_checkpoints_a_stopped_run_resumes_from_the_last_and_takes_the_same_snapshots(
    saved: Runs, tmp_path: Path
) -> None:
    complete, _ = saved("hybrid")
    last = complete.snapshots[0].epoch + 1
    settings = RECIPES["hybrid"] | {"snapshots": (0.7, 0.5), "checkpoint_every": last}
    stored: list[int] = []

    def on_epoch(state: Any) -> None:
        stored.append(len(checkpoint.read(tmp_path / "run" / "checkpoint.safetensors")["run"]["history"]))
        if state.epoch == last:
            raise StopError

    with pytest.raises(StopError):
        pruned(tmp_path / "run", on_epoch=on_epoch, **settings)
    resumed, _ = pruned(tmp_path / "run", resume=True, **settings)
    assert set(stored) <= {0, last}
    assert resumed.parts == 2
    assert timeless(resumed.history) == timeless(complete.history) == timeless(rows_of(tmp_path / "run"))
    assert_same(resumed.model, complete.model)
    for one, other in zip(resumed.snapshots, complete.snapshots, strict=True):
        assert one.path is not None
        assert other.path is not None
        assert_same(hgnp.load(one.path, Dropping()), hgnp.load(other.path, Dropping()))


def accuracy(net: nn.Module) -> float:
    x, y = stripes(60, seed=2)
    with torch.no_grad():
        return float((net.eval()(x).argmax(1) == y).double().mean())


def test_saved_and_held_networks_have_the_metric_that_is_reported(saved: Runs, held: Runs) -> None:
    (filed, _), (in_memory, _) = saved("paper"), held("paper")
    for on_disk, kept in zip(filed.snapshots, in_memory.snapshots, strict=True):
        assert on_disk.path is not None
        assert kept.path is on_disk.model is None
        assert kept.model is not None
        net = hgnp.load(on_disk.path, Dropping())
        assert_same(net, kept.model)
        assert accuracy(net) == on_disk.metric == kept.metric
        assert 0.4 < on_disk.metric < 1
        assert sum(p.numel() for p in net.parameters()) == on_disk.parameters == kept.parameters
        assert {file.name for file in on_disk.path.iterdir()} == {
            "run.json", "metrics.jsonl", "model.safetensors", "result.json",
        }  # fmt: skip
    assert filed.out is not None
    again = hgnp.prune(Dropping(), *loaders(), recipe=filed.recipe, out=filed.out, resume=True)
    assert again.snapshots == filed.snapshots
    assert again.as_dict() == filed.as_dict()


def test_values_reached_by_one_round_are_each_met_to_the_neuron(tmp_path: Path) -> None:
    wanted = recipe(keep=0.2, neurons_per_round=8, snapshots=(0.5, 0.6, 0.9))
    run = hgnp.prune(made(), *loaders(16), recipe=wanted, out=tmp_path / "run")
    _, middle, small = run.snapshots
    assert middle.epoch == small.epoch
    assert run.history[small.epoch]["kept"] < 0.45  # the run's own round goes further
    assert [snapshot.asked for snapshot in run.snapshots] == [0.9, 0.6, 0.5]
    for snapshot in run.snapshots:
        assert snapshot.path == tmp_path / "run" / "snapshots" / str(snapshot.asked)
        assert snapshot.asked - 0.01 < snapshot.got <= snapshot.asked


def test_without_fine_tuning_a_snapshot_is_the_network_of_its_epoch(tmp_path: Path) -> None:
    run, _ = pruned(tmp_path / "run", snapshots=(0.6,), finetune_epochs=0)
    (snapshot,) = run.snapshots
    rows = timeless(rows_of(tmp_path / "run" / "snapshots" / "0.6"))
    assert snapshot.epochs == 0
    assert (snapshot.metric, snapshot.val_loss, snapshot.kept) == tuple(
        rows[-1][key] for key in ("metric", "val_loss", "kept")
    )
    assert len(rows) == snapshot.epoch + 1
    assert rows[:-1] == timeless(run.history[: snapshot.epoch])


def test_the_optimizer_and_the_scheduler_of_the_user_are_copied() -> None:
    def run(**changes: Any) -> tuple[hgnp.Result, list[float]]:
        net = made()
        optimizer = torch.optim.AdamW(
            [{"params": net.a.parameters(), "lr": 0.02}, {"params": [*net.parameters()][2:]}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        quick = recipe(**{"keep": 0.2, "seed": 1, "neurons_per_round": 16} | changes)
        result = hgnp.prune(net, *loaders(), recipe=quick, optimizer=optimizer, scheduler=scheduler)
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, net.parameters()))
        return result, [row["lr"] for row in result.history]

    with_, rates = run(snapshots=(0.5,))
    without, same = run()
    assert rates == same
    assert_same(with_.model, without.model)
    (snapshot,) = with_.snapshots
    alone, _ = run(keep=0.5)
    assert snapshot.model is not None
    assert_same(snapshot.model, alone.model)


class Frozen(Net):
    def __deepcopy__(self, memo: object) -> "Frozen":
        raise RuntimeError("I am the only one")


def test_networks_and_optimizers_that_cannot_be_copied_are_refused_before_the_run() -> None:
    wanted = recipe(snapshots=(0.5,))
    net = Frozen()
    with pytest.raises(
        ValueError, match=r"net, .* must work with copy.deepcopy to take snapshots, but failed: RuntimeError: I am"
    ):
        hgnp.prune(net, *loaders(), recipe=wanted)
    other = made()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}

    def maker(_: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(other.parameters(), lr=0.1)

    with pytest.raises(
        ValueError, match="optimizer must hold the network's parameters alone, got others; a function must use"
    ):
        hgnp.prune(other, *loaders(), recipe=wanted, optimizer=maker)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)


class Notes:
    """What a run tells."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.epochs: list[tuple[str, int]] = []

    def start(self, info: Any) -> None: ...

    def batch(self, *_: Any) -> None: ...

    def epoch(self, row: Row, left: float | None) -> None:
        self.epochs.append((row["phase"], row["epoch"]))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None: ...


def test_a_stopped_run_has_the_snapshots_it_reached_and_notes_the_others() -> None:
    notes = Notes()
    run = prune_and_report(
        made(), *loaders(), recipe=recipe(keep=0.2, snapshots=(0.8, 0.3)), progress=notes,
        on_epoch=lambda state: state.row["kept"] < 0.5,
    )  # fmt: skip
    assert run.stopped is not None
    assert [snapshot.asked for snapshot in run.snapshots] == [0.8]
    taken = run.snapshots[0].epoch
    assert notes.notes == [
        f"snapshot 0.8: resumes after {taken} epochs",
        f"snapshot 0.3 is left out: the run ended with {run.target.got:.2%} left",
    ]
    assert notes.epochs[-3:] == [("prune", taken), ("finetune", taken + 1), ("finetune", taken + 2)]


def test_a_snapshot_that_diverges_is_left_out(tmp_path: Path) -> None:
    calls: list[float] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(out, target)
        if ended and torch.is_grad_enabled():
            late.append(True)
        return value * float("nan") if len(late) > 9 else value  # after the round, which repeats the run's own

    def on_epoch(state: Any) -> None:
        ended[:] = [True] if state.row["phase"] == "finetune" and len(calls) == 1 else []
        calls.extend([1.0] if state.row["phase"] == "finetune" else [])

    ended: list[bool] = []
    late: list[bool] = []
    notes = Notes()
    run = prune_and_report(
        made(), *loaders(), recipe=recipe(keep=0.2, method="taylor", snapshots=(0.5,)), loss=loss, on_epoch=on_epoch,
        out=tmp_path / "run", progress=notes,
    )  # fmt: skip
    assert run.snapshots == ()
    assert run.reached
    assert any(note.startswith("snapshot 0.5 is left out: the loss is nan in epoch") for note in notes.notes)
    assert (tmp_path / "run" / "result.json").exists()


def test_a_snapshot_that_a_callback_made_unfit_for_the_initial_network_is_left_out(tmp_path: Path) -> None:
    def replace(state: Any) -> None:
        if state.epoch == 0:
            state.net.act = nn.Sigmoid()

    class Activated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

    notes = Notes()
    run = prune_and_report(
        Activated(), *loaders(), recipe=recipe(keep=0.2, method="taylor", snapshots=(0.5,)), on_epoch=replace,
        out=tmp_path / "run", progress=notes,
    )  # fmt: skip
    assert (run.snapshots, run.reached) == ((), True)
    assert any(note.startswith("snapshot 0.5 is left out: resume: net must fit") for note in notes.notes)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_snapshot_values_are_checked_and_sorted() -> None:
    assert recipe(keep=0.1, snapshots=[0.2, 0.144, 0.5]).snapshots == (0.5, 0.2, 0.144)
    assert recipe(keep=0.1, snapshots=[0.2, 0.5]).as_dict()["snapshots"] == [0.5, 0.2]
    for values in ((0.1,), (0.05,), (1,), (1.0,), (0.5, 0.5), ("0.5",), (True,), 0.5, "0.5", (float("nan"),), None):
        with pytest.raises(
            ValueError, match=r"snapshots must be a list of distinct fractions above keep \(0.1\) and below 1, got "
        ):
            recipe(keep=0.1, snapshots=values)


def test_a_folder_with_snapshots_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "snapshots" / "0.5").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"with snapshots and no run\.json"):
        pruned(tmp_path / "run", snapshots=(0.5,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_snapshots_train_in_their_own_graphs(tmp_path: Path) -> None:
    train, val = loaders()
    wanted = recipe(keep=0.2, snapshots=(0.7, 0.4), mu=0.01, bound=0.0, finetune_epochs=3)
    net = made().cuda()
    run = hgnp.prune(net, train, val, recipe=wanted, out=tmp_path / "run")
    assert run.model is net
    assert len(run.snapshots) == 2
    for snapshot in run.snapshots:
        assert snapshot.path is not None
        small = hgnp.load(snapshot.path, made())
        assert sum(p.numel() for p in small.parameters()) == snapshot.parameters
        assert accuracy(small) == pytest.approx(snapshot.metric, abs=2 / 60)  # rounding may move a sample
        rows = rows_of(snapshot.path)
        assert [row["phase"] for row in rows[-3:]] == ["finetune"] * 3
        assert rows[-1]["loss"] < rows[0]["loss"]
