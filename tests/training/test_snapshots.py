"""Snapshots: what they come to, and that the run does not notice them."""

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.result import Row, Snapshot
from train_cases import loaders, made, recipe, stripes

Changes = dict[str, Any]
RECIPES: dict[str, Changes] = {
    "hgnp": {"mu": 0.01, "bound": 0.0, "schedule": "cosine", "anneal": "finetune"},
    "paper": {"mu": 0.01, "bound": 0.0, "coupling": "paper"},
    "sam": {"method": "sam", "clip_norm": 1.0, "schedule": "one_cycle", "anneal": "finetune"},
    "macs": {"method": "taylor", "target": "macs"},
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


def pruned(out: Path | None = None, **changes: Any) -> tuple[hgnp.Result, list[Any]]:
    """A run of `Dropping`, and what comes out of all random streams after it. Its loader has a generator of its own."""
    torch.manual_seed(3)
    net, generator = Dropping(), torch.Generator().manual_seed(5)
    train = DataLoader(TensorDataset(*stripes()), batch_size=16, shuffle=True, generator=generator)
    quick = {"neurons_per_round": 3, "finetune_epochs": 2, "keep": 0.3} | changes
    result = hgnp.prune(net, train, loaders()[1], recipe=recipe(**quick), out=out)
    after = [random.random(), float(np.random.rand()), float(torch.rand(())), generator.get_state().tolist()]
    return result, after


def timeless(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_the_run_is_the_same_with_and_without_snapshots(name: str, tmp_path: Path) -> None:
    without, streams = pruned(**RECIPES[name])
    for out in (None, tmp_path / "run"):
        with_, its = pruned(out, snapshots=(0.7, 0.5), **RECIPES[name])
        assert len(with_.snapshots) == 2
        assert timeless(with_.history) == timeless(without.history)
        assert its == streams
        assert_same(with_.model, without.model)


@pytest.mark.parametrize("name", RECIPES)
def test_a_snapshot_is_what_a_run_to_the_same_target_ends_with(name: str, tmp_path: Path) -> None:
    run, _ = pruned(tmp_path / "run", snapshots=(0.7, 0.5), **RECIPES[name])
    for snapshot in run.snapshots:
        alone, _ = pruned(tmp_path / f"{snapshot.asked}", **RECIPES[name] | {"keep": snapshot.got})
        assert snapshot.path == tmp_path / "run" / "snapshots" / str(snapshot.asked)
        assert_same(hgnp.load(snapshot.path, Dropping()), alone.model)
        lines = [(folder / "metrics.jsonl").read_text() for folder in (snapshot.path, tmp_path / f"{snapshot.asked}")]
        ours, theirs = (timeless([hgnp.files.json.loads(line) for line in text.splitlines()]) for text in lines)
        assert ours == theirs
        assert ours[snapshot.epoch]["phase"] == "prune"
        assert [row["phase"] for row in ours[snapshot.epoch + 1 :]] == ["finetune"] * snapshot.epochs == ["finetune"] * 2
        assert snapshot.got <= snapshot.asked
        after = alone.after
        assert (snapshot.metric, snapshot.val_loss) == (after.metric, after.loss)
        assert (snapshot.parameters, snapshot.neurons, snapshot.macs) == (after.parameters, after.neurons, after.macs)
        assert snapshot.kept == alone.kept


def test_a_schedule_over_the_whole_run_ends_with_the_snapshot(tmp_path: Path) -> None:
    run, _ = pruned(tmp_path / "run", snapshots=(0.6,), schedule="cosine", anneal="run")
    rates = [row["lr"] for row in hgnp.runs.read(tmp_path / "run" / "snapshots" / "0.6").rows]
    taken = run.snapshots[0].epoch
    assert rates[: taken + 1] == [row["lr"] for row in run.history[: taken + 1]]
    assert rates[taken] > rates[taken + 1] > rates[taken + 2]
    assert rates[-1] < 0.01 * rates[0] < rates[taken]
