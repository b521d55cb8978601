"""The pretended device: it computes as the CPU does, and refuses what a GPU refuses."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.tangent import load_jvp
from pretend_device import PRETENDED, pretended_device


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with pretended_device():
        yield


def trained(device: torch.device) -> list[Tensor]:
    """The parameters after steps of a network with convolutions, a norm, dropout, attention and a weight that two layers
    share."""
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    convolutions = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 2, groups=8))
    made = nn.ModuleList([convolutions, attention, nn.Linear(8, 8), nn.Linear(8, 3)])
    made[2].weight = attention.self_attn.out_proj.weight
    net = copy.deepcopy(made.double()).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x, y = torch.randn(6, 2, 5, 5).double().to(device), torch.randint(3, (6,)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        hidden = net[1](net[0](x).flatten(2).transpose(1, 2)).mean(1)
        F.cross_entropy(net[3](net[2](hidden)), y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_training_gives_the_parameters_of_a_cpu() -> None:
    found, expected = trained(PRETENDED), trained(torch.device("cpu"))
    assert {p.device for p in found} == {PRETENDED}
    torch.testing.assert_close([p.cpu() for p in found], expected, rtol=1e-9, atol=1e-12)


def test_transformed_functions_and_views() -> None:
    x = torch.randn(3, 4, device=PRETENDED)

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, x), (3,))

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: function(x).square().sum())(x)

    load_jvp()
    for each in (function, gradient):
        for run in (
            lambda x, each=each: torch.func.jvp(each, (x,), (x,))[1],
            lambda x, each=each: torch.func.vmap(each)(x.expand(2, 3, 4)),
        ):
            torch.testing.assert_close(run(x).cpu(), run(x.cpu()))
    x[1:].unflatten(1, (2, 2))[:, 0].zero_()
    assert x[1:, :2].cpu().eq(0).all()
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda here, there: there + here,
    "product": lambda here, there: here @ there,
    "in place": lambda here, there: here.add_(there),
    "into a number": lambda here, there: torch.zeros(()).add_(there.sum()),
    "class labels": lambda here, there: F.cross_entropy(there, torch.tensor([0, 1])),
    "concatenation": lambda here, there: torch.cat([here, there]),
    "index": lambda here, there: here[there.long()],
    "mask": lambda here, there: there.masked_fill(here > 0, 0.0),
    "generator": lambda here, there: there.normal_(generator=torch.Generator()),
    "loss": lambda here, there: F.mse_loss(there, here),
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_mixed_devices_are_refused(operation: Callable[[Tensor, Tensor], Any]) -> None:
    here = torch.eye(2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operation(here, here.to(PRETENDED))


def test_numbers_indices_and_copies_may_be_on_the_cpu() -> None:
    here = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    there = here.to(PRETENDED)
    assert (there * torch.tensor(2.0) % 3).tolist() == (here * 2 % 3).tolist()
    assert there[torch.tensor([1])].tolist() == [[3.0, 4.0]]
    there[torch.tensor([1])] = torch.tensor(0.0)
    assert there.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    there.copy_(here)
    assert there.normal_(generator=torch.Generator(PRETENDED)).device == PRETENDED
    with pytest.raises(TypeError, match="can't convert maia:0 device type tensor to numpy"):
        there.numpy()
    here.copy_(there)
