"""A step on a GPU gives the gradient of a step on a CPU, and never waits for the device."""

import copy

import pytest
import torch
from torch import nn

from curvature_cases import convnet, images
from hgnp import Flatness, sharpness
from synchronization import no_synchronization

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def steps(flat: Flatness, net: nn.Module, device: str, dtype: torch.dtype, count: int = 3) -> list[torch.Tensor]:
    for seed in range(count):
        torch.manual_seed(seed)
        x, y = images()
        net.zero_grad()
        flat.backward(x.to(device, dtype), y.to(device))
    return [p.grad.double().cpu() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("choices", [{}, {"flatness": "paper"}, {"scaling": "scale_invariant"}], ids=str)
def test_the_gradient_is_that_of_a_cpu(choices: dict[str, str]) -> None:
    torch.manual_seed(0)
    net = convnet().double().train()
    other = copy.deepcopy(net).cuda()
    here = Flatness(net, mu=0.1, bound=-1.0, **choices)  # type: ignore[arg-type]
    there = Flatness(other, mu=0.1, bound=-1.0, **choices)  # type: ignore[arg-type]
    expected, found = steps(here, net, "cpu", torch.double), steps(there, other, "cuda", torch.double)
    assert here.block == there.block
    assert there.curvature == pytest.approx(here.curvature, rel=1e-8)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("by", ["backward", "loss"])
def test_a_step_does_not_wait_for_the_device(by: str) -> None:
    torch.manual_seed(0)
    net = convnet().float().cuda().train()
    flat = Flatness(net, mu=0.1, bound=-1.0)
    x, y = images()
    x, y = x.float().cuda(), y.cuda()

    def step() -> None:
        if by == "backward":
            flat.backward(x, y)
        else:
            flat.loss(x, y).backward()

    for _ in range(3):  # each block's tangent is checked the first time it is penalised
        step()
    with no_synchronization():
        step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = convnet().float().cuda().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    flat, optimizer = Flatness(net, mu=0.01), torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    x, y = images()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            losses.append(flat.backward(x.float().cuda(), y.cuda(), scale=scaler.scale(torch.ones((), device="cuda"))))
        scaler.step(optimizer)
        scaler.update()
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.parametrize("choices", [{}, {"curvature": "hessian"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_under_autocast(dtype: torch.dtype, choices: dict[str, str]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(6, 16), layer, nn.Flatten(), nn.Linear(80, 3)).cuda()
    x, y = torch.randn(8, 5, 6, device="cuda"), torch.randint(3, (8,), device="cuda")
    curvatures = []
    for enabled in (True, False):
        flat = Flatness(net, mu=0.1, bound=-1.0, **choices)  # type: ignore[arg-type]
        for _ in range(3):
            net.zero_grad()
            with torch.autocast("cuda", dtype, enabled=enabled):
                flat.backward(x, y)
        assert all(bool(torch.isfinite(p.grad).all()) for p in net.parameters())  # type: ignore[arg-type]
        curvatures.append(flat.curvature)
    assert curvatures[0] == pytest.approx(curvatures[1], rel=0.1)


def test_sharpness_on_a_gpu() -> None:
    torch.manual_seed(0)
    net = convnet().double()
    x, y = images()
    here = sharpness(net, [(x.double(), y)])
    there = sharpness(net.cuda(), [(x.double().cuda(), y.cuda())])
    assert there.eigenvalues[0] == pytest.approx(here.eigenvalues[0], rel=1e-3)
