"""Steps are timed as a run makes them, for every network, and told beside inference."""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hgnp.training.trainer import EpochStatistics

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import widths


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)
    )  # fmt: skip


@pytest.mark.parametrize("mu", widths.STEP.values())
def test_a_step_is_a_share_of_the_steps_that_were_timed(mu: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def timed(calls: list[Callable[[], EpochStatistics]], **_: Any) -> list[Any]:
        made.extend(len(call().losses) for call in calls)
        return [SimpleNamespace(median=3.0 * steps) for steps in made]

    monkeypatch.setattr(widths, "time_interleaved", timed)
    nets = [net(4), net(8)]
    before = [own[0].weight.detach().clone() for own in nets]
    found = widths.steps(nets, torch.zeros(1, 6, 6), Namespace(device="cpu", repeats=2), mu=mu)
    assert made == [widths.STEPS] * 2
    assert found == [3.0, 3.0]
    assert all(not torch.equal(own[0].weight, weight) for own, weight in zip(nets, before, strict=True))


def test_a_row_of_the_report_on_widths_has_all_times() -> None:
    times = {"per step": 2.0, "per plain step": 1.0, "eager": 0.5}
    rows = [widths.Row("demo", 0, m, 0.05, 0.9 + m / 1000, 0.1, 1.0, times, (m,)) for m in (1, 8)]
    assert "| 2.00 | 1.00 | 0.50 |" in widths.line(rows[0], ["eager"])
    assert "+0.70 points" in str(widths.against(rows, "demo", 8, 1, ["eager"]))
