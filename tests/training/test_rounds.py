"""A round of pruning, and a run that runs out of neurons."""

from pathlib import Path
from typing import Any

import pytest

import hgnp
from train_cases import loaders, made, recipe


def test_a_run_that_can_remove_no_more_says_so_however_often_it_was_resumed(tmp_path: Path) -> None:
    """The norms' scales say nothing of the linear layer, and what they speak of is not enough for the target."""

    class StopError(Exception):
        pass

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
