"""A round of pruning, and a run that runs out of neurons."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from hgnp.training.rounds import Pruner
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
def test_the_last_round_takes_no_more_than_it_must(keep: float) -> None:
    torch.manual_seed(0)
    net = Residual()
    x = loaders()[0].dataset[0][0].unsqueeze(0).repeat(2, 1, 1, 1)
    neurons = hgnp.Neurons(net, x)
    pruner = Pruner(
        neurons, hgnp.Flatness(net, mu=0.0), recipe(keep=keep, method="l2", neurons_per_round=neurons.count),
        torch.optim.SGD(net.parameters(), lr=0.1), neurons.preview({}),
    )  # fmt: skip
    scores = hgnp.sensitivity(net, neurons, [], criterion="l2")
    possible = [neurons.preview(neurons.least(scores, n)).kept for n in range(1, neurons.count)]
    pruner.round([])
    assert neurons.kept == max(kept for kept in possible if kept <= keep)


def test_a_network_is_left_in_the_mode_it_came_in() -> None:
    net = made().eval()
    hgnp.prune(net, *loaders(), recipe=recipe())
    assert not any(module.training for module in net.modules())
