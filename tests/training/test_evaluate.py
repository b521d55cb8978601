"""Loss and accuracy over batches of unequal size, against the whole set at once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
