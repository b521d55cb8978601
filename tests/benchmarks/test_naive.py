"""The textbook step that benchmarks measure against is the step that `flatness="paper"` takes."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hgnp

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from naive import naive_step


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(72, 5),
    ).double()  # fmt: skip


@pytest.mark.parametrize(("scale", "block"), [(1.0, "3"), (0.2, "7")])
def test_the_textbook_step_is_the_papers(scale: float, block: str) -> None:
    net = small()
    with torch.no_grad():
        net[-1].weight *= scale  # which decides what block is penalised
    ours = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (16,), generator=generator)
    options = {"mu": 0.3, "bound": -10.0}  # the hinge is open
    found = naive_step(net, x, y, **options)

    flat = hgnp.Flatness(ours, flatness="paper", **options)
    for _ in range(40):  # its eigenvectors come closer with every step
        ours.zero_grad()
        flat.backward(x, y)
    assert flat.block == found.block == block
    assert flat.radius == pytest.approx(float(found.radius), rel=1e-9)
    assert flat.curvature == pytest.approx(float(found.curvature), rel=1e-7)
    assert float(found.curvature) > -10
    theirs = torch.cat([part.flatten() for part in flat.direction.values()])
    v = torch.cat([part.flatten() for part in found.direction])
    assert abs(float(theirs @ v)) == pytest.approx(1, abs=1e-9)
    for parameter, other in zip(net.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-8)


def test_it_leaves_the_buffers_that_pytorch_would() -> None:
    net, plain = small(), small()
    x, y = torch.randn(16, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (16,))
    naive_step(net, x, y)
    plain(x)
    buffers = {name: b for name, b in net.named_buffers() if "num" not in name}
    expected = {name: b for name, b in plain.named_buffers() if "num" not in name}
    torch.testing.assert_close(buffers, expected)
