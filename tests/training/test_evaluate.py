"""Loss and accuracy over batches of unequal size, against the whole set at once."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hgnp.training import evaluate
from hgnp.training.evaluate import Evaluation


def test_means_are_over_samples_and_labels_that_are_ignored_do_not_count() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.double), torch.arange(7) % 3
    mean, accuracy = Evaluation(net, F.cross_entropy, None, None)([(x[:5], y[:5]), (x[5:], y[5:])])
    assert mean == pytest.approx(F.cross_entropy(net(x), y).item())
    right = net(x).argmax(1) == y
    assert accuracy == pytest.approx(right.double().mean().item())
    _, accuracy = Evaluation(net, partial(F.cross_entropy, ignore_index=1), None, None)(
        [(x[:5], y[:5]), (x[5:], y[5:])]
    )
    assert accuracy == pytest.approx(right[y != 1].double().mean().item())


def test_graphs_are_of_the_network_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a replay finds what was found when the graph was made, as it reads the memory of then."""

    class Stand:
        def __init__(self, device: torch.device) -> None:
            self.device = device
            self.captures = 0

        def running(self) -> Any:
            return nullcontext()

        def capture(self, work: Callable[[], Any]) -> tuple["Stand", Any]:
            self.captures += 1
            return self, work()

        def replay(self) -> None: ...

        def forget(self) -> None: ...

    monkeypatch.setattr(evaluate, "Capture", Stand)
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.double), torch.arange(7) % 3
    evaluation = Evaluation(net, F.cross_entropy, None, None, graphs=True)
    for captures in (1, 1, 2):
        if captures == 2:
            net.weight.data = torch.randn(3, 4, dtype=torch.double)
        for _ in range(2):
            assert evaluation([(x, y)])[0] == pytest.approx(F.cross_entropy(net(x), y).item())
        assert evaluation._capture.captures == captures  # type: ignore[union-attr]
