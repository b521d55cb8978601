"""A derivative that PyTorch does not have is refused by name. These tests fail if PyTorch changes how it says so."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import hgnp


class Second(torch.autograd.Function):
    """cos(x). Its derivative is zeta(x + 3, 1), which PyTorch cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.special.zeta(x + 3, torch.ones_like(x))


class First(torch.autograd.Function):
    """sin(x), twice differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * Second.apply(x)


class Once(First):
    """sin(x), with a derivative that is a constant to PyTorch."""

    backward = staticmethod(once_differentiable(First.backward))


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = First) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x))


def test_a_third_derivative_that_pytorch_lacks_is_refused_by_name() -> None:
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.rand(6, 4).double(), torch.arange(6) % 3
    flat = hgnp.Flatness(net, mu=1.0, bound=-1e6, flatness="paper")
    with pytest.raises(hgnp.HgnpError, match=r"differentiate twice more, got: .*zeta.* is not implemented"):
        flat.backward(x, y)


@pytest.mark.parametrize("options", [{}, {"flatness": "paper"}, {"curvature": "hessian"}], ids=str)
def test_a_function_marked_once_differentiable_is_refused_before_the_first_step(options: Any) -> None:
    """Its curvature would be zero in silence."""
    net, x, y = Net(Once), torch.rand(6, 4), torch.arange(6) % 3
    flat = hgnp.Flatness(net, bound=-1.0, **options)
    with pytest.raises(hgnp.HgnpError, match=r"layer 'layer': OnceBackward after it must have a second derivative"):
        flat.backward(x, y)
    assert all(p.grad is None for p in net.parameters())


def test_sharpness_refuses_a_function_marked_once_differentiable() -> None:
    with pytest.raises(hgnp.HgnpError, match=r"must be twice differentiable, got an autograd.Function marked"):
        hgnp.sharpness(Net(Once), [(torch.rand(6, 4), torch.arange(6) % 3)])


@pytest.mark.parametrize("operation", ["pdist", "segment_reduce"])
def test_pytorch_says_of_a_missing_derivative_that_it_is_not_implemented(operation: str) -> None:
    """One lacks a formula, the other is not differentiable as a whole: PyTorch raises two kinds of errors."""
    x = torch.rand(3, 2, dtype=torch.double, requires_grad=True)
    out = F.pdist(x) if operation == "pdist" else torch.segment_reduce(x, "sum", lengths=torch.tensor([3]))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        grad.sum().backward()
