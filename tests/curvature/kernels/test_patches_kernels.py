"""The kernels within a convolution's Ψ: on a GPU, or interpreted where Triton is there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hgnp.curvature import factors
from hgnp.curvature.factors import Patches
from hgnp.curvature.kernels.support import kernels
from triton_cases import CUDA, DEVICE, need_triton

need_triton()
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "3 × 3": ((3, 5, 6, 7), (3, 3), {}),
    "many positions": ((17, 4, 32, 32), (3, 3), {}),
    "many channels": ((2, 150, 4, 4), (3, 3), {}),
    "many of both": ((9, 70, 32, 32), (1, 1), {"padding": (0, 0)}),
    "many taps": ((2, 33, 6, 6), (5, 5), {"padding": (2, 2)}),
    "one channel": ((4, 1, 5, 5), (3, 3), {}),
    "1 × 1, strided": ((3, 16, 7, 8), (1, 1), {"stride": (2, 2), "padding": (0, 0)}),
    "strides, not square": ((2, 6, 9, 11), (2, 3), {"stride": (2, 3), "padding": (1, 0)}),
    "dilated": ((2, 6, 9, 11), (3, 2), {"dilation": (2, 3), "padding": (2, 3)}),
    "padding beyond the kernel": ((2, 4, 3, 3), (2, 2), {"padding": (3, 2)}),
    "one position": ((5, 20, 1, 1), (1, 1), {"padding": (0, 0)}),
}


def given(name: str, dtype: torch.dtype, *, bias: bool = True, last: bool = True) -> tuple[Patches, Tensor]:
    """A factor, and a vector."""
    shape, kernel, changed = CASES[name]
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    a = a.contiguous(memory_format=torch.channels_last) if last else a
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)} | changed
    psi = Patches([a], [options], torch.Size((8, shape[1], *kernel)), 1, 3.0, bias)
    x = torch.randn(1, psi.side, generator=generator, dtype=torch.float64)
    return psi, x.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)


def by_convolution(psi: Patches, x: Tensor) -> Tensor:
    """In float64, by a convolution and its gradient."""
    a, filters = psi.inputs[0].double(), x.double()[:, : psi.kernel[1:].numel()].reshape(1, *psi.kernel[1:])
    r, grad = factors.product_by_convolution(a, filters, x.double()[:, -1] if psi.bias else None, psi.options[0])
    total = torch.cat([grad.reshape(1, -1), r.sum().view(1, 1)], 1) if psi.bias else grad.reshape(1, -1)
    return total / psi.count


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_a_convolution_and_its_gradient(name: str, bias: bool) -> None:
    from hgnp.curvature.kernels.patches import product

    psi, x = given(name, torch.float64, bias=bias)
    found = product(psi.inputs[0], x, psi.kernel[2:], bias, psi.count, psi.options[0])
    torch.testing.assert_close(found, by_convolution(psi, x), rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_low_precision_on_a_gpu(name: str, bias: bool, dtype: torch.dtype) -> None:
    """Of a filter as it is rounded, with sums in float32."""
    assert kernels("patches", dtype, torch.device("cuda", 0)) is not None
    psi, x = given(name, dtype, bias=bias)
    side = psi.kernel[1:].numel()
    x = torch.cat([x[:, :side].to(dtype).float(), x[:, side:]], 1)
    exact = by_convolution(psi, x)
    eps = max(torch.finfo(dtype).eps, 1e-3)  # products of float32 may be rounded to TF32
    assert (psi.product(x) - exact).abs().max() <= 2 * eps * exact.abs().max()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_factor_takes_them_where_channels_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(factors, "kernels", lambda *a: taken.append(kernels(*a)) or taken[-1])
    for last, times in ((True, 1), (False, 0)):
        taken.clear()
        psi, x = given("3 × 3", torch.float64, last=last)
        torch.testing.assert_close(psi.product(x), by_convolution(psi, x), rtol=1e-10, atol=1e-10)
        assert len(taken) == times
