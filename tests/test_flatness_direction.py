"""`Flatness.direction` is the v of the last step."""

import pytest
import torch
from torch import Tensor, nn

import hgnp


@pytest.mark.parametrize("direction_over", ["block", "network"])
def test_the_direction_keeps_the_parts_of_parameters_that_are_frozen_after_the_step(direction_over: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    flat = hgnp.Flatness(net, mu=0.1, bound=-1.0, direction_over=direction_over)  # type: ignore[arg-type]
    flat.backward(torch.randn(8, 4).double(), torch.arange(8) % 3)
    before: dict[str, Tensor] = flat.direction
    length = sum(part.square().sum() for part in before.values())
    torch.testing.assert_close(length, torch.ones(()).double(), rtol=1e-12, atol=0)
    net[0].bias.requires_grad_(False)
    net[2].bias.requires_grad_(False)
    torch.testing.assert_close(flat.direction, before, rtol=0, atol=0)
