"""The kernels of a norm's adjoints against the same in PyTorch's operations: on a GPU, or interpreted where Triton is there."""

import pytest
import torch
from torch import Tensor

from hgnp.curvature.autodiff import norms
from hgnp.curvature.kernels.support import kernels
from triton_cases import CUDA, DEVICE, need_triton

need_triton()
SHAPES = [
    (4, 5, 3, 3),
    (6, 70, 2, 2),
    (7, 19),
    (3, 64, 9, 9),
    (2, 3, 2, 3, 4),
    (5, 130, 1, 1),
    (300, 8, 3, 3),
    (40, 1, 3, 3),
]


EPS = 1e-5
SPACING = 0.34375
"""A mean of 3 and a deviation of 1 are about as far apart: some channels vary by less, some by more."""


def given(shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Y, Z, s, ṡ and γ, mean, inv, Σṡ, Σṡ(s − mean)."""
    generator = torch.Generator().manual_seed(0)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    values = [3 + torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    values = [x.to(DEVICE, dtype).contiguous(memory_format=last) for x in values]
    s, ds = values[2].double(), values[3].double()
    dims = [d for d in range(len(shape)) if d != 1]
    mean = s.mean(dims)
    inv = (s.var(dims, unbiased=False) + EPS).rsqrt()
    centred = s - mean.view(1, -1, *[1] * (len(shape) - 2))
    vectors = [torch.rand(shape[1], generator=generator, dtype=torch.float64).to(DEVICE) if affine else None]
    vectors += [mean, inv, ds.sum(dims), (ds * centred).sum(dims)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return values, [None if x is None else x.to(wide) for x in vectors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spacing", [SPACING, 0.0])
@pytest.mark.parametrize("both", [True, False])
def test_the_same_adjoints(shape: tuple[int, ...], affine: bool, spacing: float, both: bool) -> None:
    from hgnp.curvature.kernels.batch_norm import adjoints

    (Y, *rest), vectors = given(shape, torch.float64, affine=affine)
    arguments = [Y if both else None, *rest, *vectors, spacing, EPS]
    found, expected = adjoints(*arguments), norms.batch_norm_adjoints(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert found[0].stride() == rest[1].stride()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spacing", [SPACING, 0.0])
def test_the_same_tangent(shape: tuple[int, ...], affine: bool, spacing: float) -> None:
    from hgnp.curvature.kernels.batch_norm import tangent

    (_, _, s, ds), vectors = given(shape, torch.float64, affine=affine)
    arguments = [ds, s, *vectors[:3], spacing, EPS]
    found, expected = tangent(*arguments), norms.batch_norm_tangent(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert found[0].stride() == s.stride()


def test_a_weight_need_not_be_contiguous() -> None:
    from hgnp.curvature.kernels.batch_norm import adjoints, tangent

    (Y, Z, s, ds), (_, *statistics) = given((4, 5, 3, 3), torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64, device=DEVICE)
    for weight in (weights[:1, 0].expand(5), weights[:, 0]):
        arguments = [ds, s, weight, *statistics[:2], 0.0, EPS]
        torch.testing.assert_close(tangent(*arguments), norms.batch_norm_tangent(*arguments), rtol=1e-9, atol=1e-10)
        arguments = [Y, Z, s, ds, weight, *statistics, 0.0, EPS]
        torch.testing.assert_close(adjoints(*arguments), norms.batch_norm_adjoints(*arguments), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_low_precision_is_of_the_tensors_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sums are in float32: the result is the exact one of the given numbers, rounded."""
    from hgnp.curvature.kernels.batch_norm import adjoints, tangent

    values, vectors = given(shape, dtype)
    limits = (SPACING, EPS)
    found = *adjoints(*values, *vectors, *limits), *tangent(*values[:1:-1], *vectors[:3], *limits)
    values, vectors = [x.double() for x in values], [x.double() for x in vectors]
    exact = (
        *norms.batch_norm_adjoints(*values, *vectors, *limits),
        *norms.batch_norm_tangent(*values[:1:-1], *vectors[:3], *limits),
    )
    eps = torch.finfo(dtype).eps
    for got, want in zip(found, exact, strict=True):
        assert (got - want).abs().max() <= 4 * max(eps, 1e-5) * want.abs().max()  # sums cancel


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_norm_on_a_gpu_takes_them_where_channels_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(norms, "kernels", lambda *a: taken.append(a) or kernels(*a))
    for layout, times in ((torch.channels_last, 2), (torch.contiguous_format, 0)):
        taken.clear()
        s, ds = (torch.randn(4, 6, 5, 5, dtype=torch.float64, device="cuda") for _ in range(2))
        s, ds = (x.contiguous(memory_format=layout).requires_grad_() for x in (s, ds))
        y, dy = norms.BatchNormDual.apply(s, ds, None, None, None, None, 0.1, 1e-5, None)
        found = torch.autograd.grad((y.sin() + dy.sin()).sum(), (s, ds))
        assert len(taken) == times
        s, ds = (x.detach().cpu().requires_grad_() for x in (s, ds))
        y, dy = norms.BatchNormDual.apply(s, ds, None, None, None, None, 0.1, 1e-5, None)
        expected = torch.autograd.grad((y.sin() + dy.sin()).sum(), (s, ds))
        torch.testing.assert_close([x.cpu() for x in found], list(expected), rtol=1e-9, atol=1e-10)
