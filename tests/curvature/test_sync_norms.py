"""BatchNorm over ranks: two or three ranks with shares of a batch are one process with all of it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.autodiff.gauss_newton import GaussNewton
from hgnp.curvature.autodiff.hessian import Hessian
from hgnp.curvature.autodiff.tape import Tape
from hgnp.curvature.losses import CrossEntropy
from hgnp.reducer import LOCAL, Reducer
from ranks import run_ranks


class Square(nn.Module):
    """Bends, by a rule: `torch.func.jvp`, which other bent operations take, keeps its levels in one place for all threads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


NETS: dict[str, Callable[[bool], nn.Module]] = {
    "1d": lambda affine: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, affine=affine), Square(),
        nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5, affine=affine, momentum=None), nn.ReLU(),
        nn.Linear(5, 3),
    ),
    "2d": lambda affine: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=affine, momentum=0.3), nn.ReLU(),
        nn.Conv2d(3, 4, 2), Square(), nn.BatchNorm2d(4, affine=affine), nn.Flatten(),
        nn.Linear(16, 3),
    ),
}  # fmt: skip


def case(kind: str, affine: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = NETS[kind](affine).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(8, 4) if kind == "1d" else torch.randn(8, 2, 5, 5)
    return net, x.double() + 3, torch.randint(0, 3, (8,))


def measured(
    net: nn.Module, x: Tensor, y: Tensor, route: str, along: str, samples: int, reducer: Reducer
) -> tuple[Any, ...]:
    """Of this rank: the output, running statistics, and C, q and their gradients, as its share w·C of the loss has them."""
    net = copy.deepcopy(net)
    parameters, share = list(net.parameters()), len(x) / samples
    draws = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=draws, dtype=p.dtype) for p in parameters]
    tangents = list(zip(parameters, directions, strict=True))[: 1 if along == "first layer" else None]
    kind = "hessian" if "hessian" in route else "ggn"
    mode: GaussNewton | Hessian
    if kind == "ggn":
        mode = GaussNewton(tangents, CrossEntropy(), observer=None, reducer=reducer)
    else:
        mode = Hessian(tangents, observer=None, reducer=reducer)
    z: Tensor
    if "tape" in route:
        tape = Tape()
        with Forward(tape=tape, reducer=reducer):
            z = net(x)
        if isinstance(mode, GaussNewton):
            assert tape.tangent(mode, z) is not None
        else:
            again = tape.rerun(mode, [parameter for parameter, _ in tangents], z)
            assert again is not None
            z = again
    else:
        with mode:
            z = net(x)
    loss = share * F.cross_entropy(z, y)
    q = mode.quotient(loss, z, y) * (share if kind == "ggn" else 1)
    gradients = [torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in (loss, q)]
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return z.detach(), buffers, reducer.sum([loss.detach(), q.detach(), *gradients[0], *gradients[1]])


@pytest.mark.parametrize(
    ("along", "shares"), [("first layer", (5, 3)), ("everything", (1, 7)), ("everything", (4, 3, 1))]
)
@pytest.mark.parametrize("route", ["ggn", "hessian", "ggn by tape", "hessian by tape"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", NETS)
def test_ranks_have_the_values_and_derivatives_of_the_joint_batch(
    kind: str, affine: bool, route: str, along: str, shares: tuple[int, ...]
) -> None:
    net, x, y = case(kind, affine)
    parts = list(zip(x.split(list(shares)), y.split(list(shares)), strict=True))
    have = run_ranks(len(shares), lambda rank, reducer: measured(net, *parts[rank], route, along, len(x), reducer))
    z, buffers, sums = measured(net, x, y, route.removesuffix(" by tape"), along, len(x), LOCAL)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([own[0] for own in have]), z, **close)
    assert sums[1].abs() > 1e-3  # q
    for own in have:
        torch.testing.assert_close(own[1], buffers, **close)
        torch.testing.assert_close(own[2], sums, **close)
        torch.testing.assert_close(own[1:], have[0][1:], rtol=0, atol=0)


class Counting(Reducer):
    """A single process that counts sums over ranks."""

    sync_norms = True

    def __init__(self) -> None:
        self.sums = 0

    def differentiable_sum(self, x: Tensor) -> Tensor:
        self.sums += 1
        return super().differentiable_sum(x)


def test_a_norm_sums_twice_and_its_tangent_once_more() -> None:
    net, x, _ = case("2d", affine=True)
    plain, along, evaluation = Counting(), Counting(), Counting()
    with Forward(reducer=plain):
        net(x)
    assert plain.sums == 2 * 2
    with GaussNewton([(net[0].weight, torch.ones_like(net[0].weight))], CrossEntropy(), observer=None, reducer=along):
        net(x)
    assert along.sums == 2 * 3
    net.eval()
    with Forward(reducer=evaluation):
        net(x)
    assert evaluation.sums == 0


@pytest.mark.parametrize("mode", [Forward, lambda reducer: Hessian([], observer=None, reducer=reducer)])
def test_half_precision_is_summed_in_float32(mode: Callable[..., Forward]) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 4, 4).bfloat16() + 2
    norm, other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    with mode(reducer=Counting()):
        have = norm(x)
    torch.testing.assert_close(have, other(x), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dict(norm.named_buffers()), dict(other.named_buffers()), rtol=1e-5, atol=1e-6)
