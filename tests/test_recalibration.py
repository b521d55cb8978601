"""`recalibrate`: batch norms get the statistics of all values over the batches; everything else stays as it was."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hgnp


class Net(nn.Module):
    """A batch norm behind a dropout, one behind another, and one that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na, self.drop = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.b, self.nb, self.unused = nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(5)
        self.double()

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return self.nb(self.b(self.drop(torch.relu(self.na(self.a(x * scale)))).mean((2, 3))))


def made() -> Net:
    torch.manual_seed(0)
    net = Net()
    for _ in range(3):
        net(torch.randn(8, 2, 5, 5).double())
    net.unused(torch.randn(4, 5).double())
    net.na.eval()  # a mode of its own
    return net


def draw(rows: tuple[int, ...] = (6, 6, 3)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [2 + 3 * torch.randn(n, 2, 5, 5, generator=generator).double() for n in rows]


def state(net: nn.Module) -> Any:
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    modules = [(m.training, getattr(m, "momentum", None), m.__dict__.keys()) for m in net.modules()]
    return generators, modules, [p.grad for p in net.parameters()]


def test_statistics_are_those_of_all_values_over_uneven_batches() -> None:
    net, batches = made(), draw()
    before, found = state(net), copy.deepcopy(net.state_dict())
    hgnp.recalibrate(net, batches)
    assert state(net) == before

    a, b, relu = net.a, net.b, torch.relu  # by hand, without dropout, each batch normalised by itself
    bottoms, tops = [], []
    for x in batches:
        out = a(x)
        mean, variance = out.mean((0, 2, 3)), out.var((0, 2, 3), unbiased=False)
        bottoms.append(out.movedim(1, -1).flatten(0, 2))
        normal = (out - mean.view(-1, 1, 1)) / (variance + net.na.eps).sqrt().view(-1, 1, 1)
        tops.append(b(relu(normal * net.na.weight.view(-1, 1, 1) + net.na.bias.view(-1, 1, 1)).mean((2, 3))))
    for norm, values in ((net.na, torch.cat(bottoms)), (net.nb, torch.cat(tops))):
        torch.testing.assert_close(norm.running_mean, values.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, values.var(0), rtol=1e-12, atol=1e-12)
        assert norm.num_batches_tracked == 3
    for name, value in net.state_dict().items():  # weights, and what no batch reaches
        assert ("na." in name or "nb." in name) or torch.equal(value, found[name]), name


def test_a_norm_that_is_called_twice_gets_the_statistics_of_both_calls() -> None:
    norm = nn.BatchNorm1d(3).double()
    x, y = torch.randn(5, 3).double(), 4 + torch.randn(2, 3).double()
    net = nn.Module()
    net.norm = norm
    net.forward = lambda x, y: norm(x).sum() + norm(y).sum()  # type: ignore[method-assign]
    hgnp.recalibrate(net, [((x, y), None)])
    torch.testing.assert_close(norm.running_mean, torch.cat([x, y]).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, torch.cat([x, y]).var(0), rtol=1e-12, atol=1e-12)


def test_norms_that_lost_a_part_of_their_statistics() -> None:
    x = draw()
    net, expected = made(), made()
    hgnp.recalibrate(expected, x)
    net.nb.track_running_stats = False  # evaluation still reads the statistics
    net.na.num_batches_tracked = None
    net.unused.running_mean = net.unused.running_var = None
    hgnp.recalibrate(net, x)
    assert net.nb.track_running_stats is False
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]) or name == "nb.num_batches_tracked", name


def test_batches_of_every_kind_give_the_same_statistics() -> None:
    x, one = draw(), torch.ones(()).double()
    kinds: list[list[Any]] = [
        x,
        [(each, torch.zeros(len(each))) for each in x],
        [((each, one), None) for each in x],
        [({"x": each, "scale": one}, None) for each in x],
        [{"x": each, "labels": torch.zeros(len(each))} for each in x],
    ]
    results = []
    for batches in kinds:
        net = made()
        hgnp.recalibrate(net, batches)
        results.append(net.state_dict())
    assert all(torch.equal(value, other[name]) for other in results for name, value in results[0].items())
    plain = nn.Linear(2, 2)
    hgnp.recalibrate(plain, [])  # no batch norm: nothing to do


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], r"^batches must have at least one batch, got none$"),
        (torch.zeros(3, 2), r"^batches must be a list of batches or a loader, got Tensor; use \[x\]$"),
        ([*draw(), "x"], r"^batches must be inputs, \(inputs, target\) pairs or dicts, got a str; use \[\(x, y\)\]$"),
        ([*draw(), draw((1,))[0]], "^batches must have at least two samples for a batch norm, got a single one in batch 3$"),
        ([*draw(), torch.zeros(4, 3, 5, 5).double()], "^net must take batch 3 of batches, but its forward failed in a: "),
        ([*draw(), draw()[0] / 0], "^batches must give na finite statistics, got some that are not$"),
    ],
)  # fmt: skip
def test_a_failure_changes_nothing(batches: Any, message: str) -> None:
    net = made()
    before, found = state(net), copy.deepcopy(net.state_dict())
    with pytest.raises(hgnp.HgnpError, match=message):
        hgnp.recalibrate(net, batches)
    assert state(net) == before
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())


def test_statistics_in_half_precision_do_not_overflow() -> None:
    torch.manual_seed(0)
    norm, batches = nn.BatchNorm2d(2).half(), [torch.randn(8, 2, 96, 96).half() for _ in range(2)]
    hgnp.recalibrate(nn.Sequential(norm), batches)
    values = torch.cat(batches).double()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean.double(), values.mean((0, 2, 3)), rtol=0, atol=2e-3)
    torch.testing.assert_close(norm.running_var.double(), values.var((0, 2, 3)), rtol=2e-3, atol=0)


def test_a_norm_whose_forward_is_called_directly_is_refused() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm.forward(x)

    with pytest.raises(ValueError, match="net must call norm as a module, got a call of its forward"):
        hgnp.recalibrate(Direct(), [torch.randn(8, 3) + 5])
