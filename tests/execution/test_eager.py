"""The order in which `Eager` runs a step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hgnp.curvature.step import StepStatistics, make_step
from hgnp.execution.eager import Eager


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_the_next_batch_is_fetched_before_the_host_waits_for_q(
    direction_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q is on its way by then, and the step's autocast is off: a transform would compute in half precision."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    eager = Eager(*make_step(net, bound=-1.0, direction_from=direction_from), autocast)
    order: list[Any] = []
    q = StepStatistics.q.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(StepStatistics, "q", property(lambda statistics: order.append("q") or q(statistics)))

    def fetch() -> None:
        assert not torch.is_autocast_enabled("cpu")
        assert eager.state.statistics is not None
        assert eager.state.statistics.sent is not None
        order.append("fetch")

    eager.fetch = fetch
    for _ in range(2):
        eager.backward(torch.randn(8, 4), torch.arange(8) % 3)
    assert order == ["fetch", "q"] * 2
