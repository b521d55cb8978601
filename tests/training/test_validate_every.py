"""Validation after every k-th epoch: the same run, with fewer measurements of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.io import runs
from hgnp.reporting import run_charts
from hgnp.reporting.charts import Chart
from train_cases import StopError, loaders, made, recipe, stripes


def run(every: int, **given: Any) -> hgnp.Result:
    settings = {"keep": 0.5, "warmup_epochs": 4, "finetune_epochs": 3, "method": "taylor"} | given.pop("recipe", {})
    train, val = loaders()[0], list(loaders()[1])
    return hgnp.prune(
        made(), train, given.pop("val", val), recipe=recipe(validate_every=every, **settings), verbose=False, **given
    )


def without_validation(result: hgnp.Result) -> list[dict[str, Any]]:
    hidden = ("seconds", "train_seconds", "val_loss", "metric")
    return [{key: value for key, value in row.items() if key not in hidden} for row in result.history]


def test_the_run_is_the_same_and_the_validated_epochs_have_its_numbers() -> None:
    every, third = run(1), run(3)
    last = every.epochs - 1
    due = {2, 3, 5, last} | set(range(2, last, 3))  # 3: the epoch before the first round
    for one, other in zip(every.history, third.history, strict=True):
        validated = one["epoch"] in due
        assert (other["val_loss"], other["metric"]) == ((one["val_loss"], one["metric"]) if validated else (None, None))
    assert without_validation(every) == without_validation(third)
    assert (third.before.metric, third.after.metric) == (every.before.metric, every.after.metric)
    torch.testing.assert_close(third.model.state_dict(), every.model.state_dict(), rtol=0, atol=0)


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    def shuffled_val() -> Any:
        return DataLoader(TensorDataset(*stripes()), 32, shuffle=True, generator=torch.Generator().manual_seed(4))

    def stop(state: Any) -> None:
        if state.epoch == 4:  # the first with a round
            raise StopError

    whole = run(3, val=shuffled_val(), out=tmp_path / "whole")
    with pytest.raises(StopError):
        run(3, val=shuffled_val(), out=tmp_path / "pieces", on_epoch=stop)
    pieces = run(3, val=shuffled_val(), out=tmp_path / "pieces", resume=True)
    assert without_validation(pieces) == without_validation(whole)
    assert [row["val_loss"] for row in pieces.history] == [row["val_loss"] for row in whole.history]
    torch.testing.assert_close(pieces.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_run_that_a_callback_ends_has_its_last_epoch_validated(tmp_path: Path) -> None:
    result = run(100, out=tmp_path, on_epoch=lambda state: state.epoch == 5)
    assert result.epochs == 6
    assert result.after.metric is not None
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["metric"] is not None] == [3, 5]
    assert rows[-1]["metric"] == result.after.metric


def test_a_plateau_is_one_of_validated_epochs() -> None:
    plateau: list[torch.optim.lr_scheduler.ReduceLROnPlateau] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
        plateau.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
        return plateau[-1]

    result = run(2, scheduler=scheduler, recipe={"keep": 1.0})
    assert (
        plateau[-1].last_epoch == sum(row["val_loss"] is not None for row in result.history) == result.epochs // 2 + 1
    )


def test_labels_are_checked_at_the_first_validation() -> None:
    _, val = loaders()
    wrong = [(x, y.clone().fill_(7)) for x, y in val]
    with pytest.raises(hgnp.HgnpError, match="val"):
        run(3, val=[*val, *wrong])


def test_curves_connect_the_validated_epochs(tmp_path: Path) -> None:
    run(3, out=tmp_path)
    chart = run_charts.over_epochs(runs.read(tmp_path))
    assert isinstance(chart, Chart)
    (accuracy,) = (series for series in chart.series if series.label == "accuracy")
    assert None not in accuracy.y
    assert len(accuracy.x) == len(accuracy.y) < len(runs.read(tmp_path).rows)
