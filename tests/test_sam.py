"""SAM against the method written out: two passes, a step of length ρ between them, everything put back."""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.direction import Direction
from hgnp.curvature.sam import SAMStep
from hgnp.curvature.step import State
from hgnp.execution.eager import Eager

RHO = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.3), nn.Flatten())
        self.out, self.unused = nn.Linear(96, 3), nn.Linear(3, 3)
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


def precision(half: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def written_out(net: nn.Module, x: Tensor, y: Tensor, half: bool) -> tuple[Tensor, list[Tensor | None]]:
    """A context of its own for each pass, as a plain loop would have it."""
    stream = torch.get_rng_state()
    free = [p for p in net.parameters() if p.requires_grad]
    with precision(half):
        loss = F.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, free, allow_unused=True)
    length = torch.sqrt(sum((g**2).sum() for g in gradients if g is not None))
    moved = copy.deepcopy(net)
    with torch.no_grad():
        for p, g in zip([p for p in moved.parameters() if p.requires_grad], gradients, strict=True):
            p.add_(0.0 if g is None else RHO * g / length)
    torch.set_rng_state(stream)
    with precision(half):
        value = F.cross_entropy(moved(x), y)
    return loss, list(torch.autograd.grad(value, [p for p in moved.parameters() if p.requires_grad], allow_unused=True))


@pytest.mark.parametrize("half", [False, True])
def test_the_gradient_is_that_at_the_worst_point_nearby(half: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float if half else torch.double
    net, x, y = Net().to(dtype), torch.randn(8, 2, 6, 6, dtype=dtype), torch.randint(0, 3, (8,))
    twin, weights = copy.deepcopy(net), [p.detach().clone() for p in net.parameters()]
    torch.manual_seed(7)
    loss, expected = written_out(twin, x, y, half)
    stream = torch.get_rng_state()
    torch.manual_seed(7)
    with precision(half):  # autocast keeps copies of the weights within one context
        found = Eager(SAMStep(net, rho=RHO), State(0.0, 0.0, Direction(net))).backward(x, y, scale=2.0)
        after = net(x)
    assert found == loss
    for p, g in zip([p for p in net.parameters() if p.requires_grad], expected, strict=True):
        assert (p.grad is None) == (g is None)
        if p.grad is not None and g is not None:
            torch.testing.assert_close(p.grad, 2 * g, rtol=1e-4 if half else 1e-12, atol=0 if not half else 1e-6)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))
    torch.set_rng_state(stream)
    with precision(half):
        assert torch.equal(after, twin(x))  # buffers saw one pass, the stream went on as after one, no copy is stale


def test_small_gradients_do_not_underflow_in_the_ascent_of_float16() -> None:
    torch.manual_seed(0)
    net, x, y = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.randn(16, 6),
        torch.randint(0, 3, (16,)),
    )

    def tiny(output: Tensor, target: Tensor) -> Tensor:
        return 1e-7 * F.cross_entropy(output, target)  # its derivatives are below float16's smallest number

    _, expected = written_out(copy.deepcopy(net), x, y, half=False)
    executor = Eager(SAMStep(net, loss=tiny, rho=RHO), State(0.0, 0.0, Direction(net)))
    with torch.autocast("cpu", torch.float16):
        executor.backward(x, y, scale=torch.tensor(2.0**22))
    for p, g in zip(net.parameters(), expected, strict=True):
        assert p.grad is not None
        assert g is not None
        torch.testing.assert_close(p.grad / (2.0**22 * 1e-7), g, rtol=0.02, atol=0.01 * float(g.abs().max()))


def test_an_ascent_that_overflows_leaves_a_gradient_that_a_scaler_skips() -> None:
    net, x, y = nn.Linear(6, 3), torch.randn(16, 6), torch.randint(0, 3, (16,))
    before = [p.detach().clone() for p in net.parameters()]
    executor = Eager(SAMStep(net, rho=RHO), State(0.0, 0.0, Direction(net)))
    executor.backward(x, y, scale=torch.tensor(math.inf))
    assert not any(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("rho", [0.0, -1.0, math.inf, math.nan, "x", None, True])
def test_a_radius_that_is_no_positive_number_is_refused(rho: Any) -> None:
    with pytest.raises(ValueError, match=f"rho must be a finite number > 0, got {rho!r}"):
        SAMStep(nn.Linear(2, 2), rho=rho)
