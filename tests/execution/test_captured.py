"""What is kept beside a CUDA graph."""

import pytest
import torch

from hgnp.execution.captured import Versions


def test_versions_are_restored_by_a_separate_call() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    (loss,) = weight**3
    before = Versions.of([weight])
    with torch.no_grad():
        weight.add_(0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight, retain_graph=True)
    before.restore()
    before.restore()  # as often as the graph is replayed
    assert torch.autograd.grad(loss, weight)[0].item() == 12
