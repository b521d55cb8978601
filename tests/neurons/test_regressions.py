"""Networks that once came out wrong or frozen, each reduced to the least that shows it."""

import copy

import pytest
import torch
from oracles import masked, worst_error
from torch import Tensor, nn

import hgnp


def conv(inside: int, outside: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, padding=1)


def assert_removal_equals_masking(net: nn.Module, x: Tensor, selection: dict[str, list[int]]) -> None:
    net = net.double().eval()
    small = copy.deepcopy(net)
    gone = hgnp.Neurons(small, x).remove(selection)
    with torch.no_grad():
        with masked(net, gone, ((x,), {})):
            want = net(x)
        assert worst_error(small(x), want) < 1e-10


@pytest.fixture
def image() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8, dtype=torch.double)


def test_group_norm_with_a_group_for_each_channel_is_exact(image: Tensor) -> None:
    net = nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), conv(8, 8), nn.GroupNorm(8, 8, affine=False), conv(8, 4))
    assert_removal_equals_masking(net, image, {"0": [1, 4], "2": [0, 7]})
