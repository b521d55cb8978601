"""The kernels of a norm's second derivative against the same in PyTorch's operations: on a GPU, or interpreted where Triton is
there."""

import pytest
import torch
from torch import Tensor

from hgnp.curvature.autodiff import norms
from hgnp.curvature.kernels.support import kernels
from triton_cases import CUDA, DEVICE, need_triton

need_triton()
SHAPES = [(4, 5, 3, 3), (6, 70, 2, 2), (7, 19), (3, 64, 9, 9), (2, 3, 2, 3, 4), (300, 8, 3, 3), (40, 1, 3, 3)]
EPS = 1e-5
SPACING = 0.34375
"""A mean of 3 and a deviation of 1 are about as far apart: some channels vary by less, some by more."""


def given(
    shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool = True, offset: float = 3.0
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Y, Z, X, s, ṡ, s̈ and γ, mean, inv."""
    generator = torch.Generator().manual_seed(0)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    values = [offset + torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(6)]
    values = [x.to(DEVICE, dtype).contiguous(memory_format=last) for x in values]
    s, dims = values[3].double(), [d for d in range(len(shape)) if d != 1]
    weight = torch.rand(shape[1], generator=generator, dtype=torch.float64).to(DEVICE) if affine else None
    vectors = [weight, s.mean(dims), (s.var(dims, unbiased=False) + EPS).rsqrt()]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return values, [None if x is None else x.to(wide) for x in vectors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spacing", [SPACING, 0.0])
@pytest.mark.parametrize("curved", [True, False])
def test_the_same_derivatives_and_adjoints(shape: tuple[int, ...], affine: bool, spacing: float, curved: bool) -> None:
    from hgnp.curvature.kernels.batch_norm_second import adjoints, second

    (Y, Z, X, s, ds, dds), vectors = given(shape, torch.float64, affine=affine)
    curve, limits = (s, ds, dds if curved else None), (spacing, EPS)
    *found, moments = second(*curve, *vectors, *limits)
    expected = norms.batch_norm_second(*curve, *vectors, *limits)
    torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-9)
    for of_value in (Y, None):
        found = adjoints(of_value, Z, X, *curve, *vectors, moments, *limits)
        expected = norms.batch_norm_second_adjoints(of_value, Z, X, *curve, *vectors, *limits)
        assert (found[2] is None) is not curved
        for ours, theirs in zip(found[: 5 if of_value is not None else 4], expected, strict=False):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-8)
        assert found[0].stride() == s.stride()


def test_a_weight_need_not_be_contiguous() -> None:
    from hgnp.curvature.kernels.batch_norm_second import adjoints, second

    (Y, Z, X, *curve), (_, *statistics) = given((4, 5, 3, 3), torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64, device=DEVICE)
    for weight in (weights[:1, 0].expand(5), weights[:, 0]):
        *found, moments = second(*curve, weight, *statistics, 0.0, EPS)
        found += adjoints(Y, Z, X, *curve, weight, *statistics, moments, 0.0, EPS)
        expected = (
            *norms.batch_norm_second(*curve, weight, *statistics, 0.0, EPS),
            *norms.batch_norm_second_adjoints(Y, Z, X, *curve, weight, *statistics, 0.0, EPS),
        )
        torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [3.0, 300.0])
def test_low_precision_is_of_the_tensors_alone(dtype: torch.dtype, offset: float) -> None:
    """Sums are in float32 and of centred numbers: the result is the exact one of the given numbers, rounded."""
    from hgnp.curvature.kernels.batch_norm_second import adjoints, second

    (Y, Z, X, *curve), vectors = given((16, 40, 9, 9), dtype, offset=offset)
    *found, moments = second(*curve, *vectors, 0.0, EPS)
    found += adjoints(Y, Z, X, *curve, *vectors, moments, 0.0, EPS)
    Y, Z, X, *curve = (x.double() for x in (Y, Z, X, *curve))
    vectors = [x.double() for x in vectors]
    exact = (
        *norms.batch_norm_second(*curve, *vectors, 0.0, EPS),
        *norms.batch_norm_second_adjoints(Y, Z, X, *curve, *vectors, 0.0, EPS),
    )
    eps = torch.finfo(dtype).eps
    for got, want in zip(found, exact, strict=True):
        assert (got - want).abs().max() <= 4 * max(eps, 1e-5) * want.abs().max()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("adjoints", [(0, 1, 2), (0,), (1,), (2,), (0, 2)])
def test_a_norm_on_a_gpu_takes_them_where_channels_lie_together(
    monkeypatch: pytest.MonkeyPatch, adjoints: tuple[int, ...]
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(norms, "kernels", lambda *a: taken.append(a[0]) or kernels(*a))
    curve = [torch.randn(4, 6, 5, 5, dtype=torch.float64) for _ in range(3)]
    weights = [torch.randn(6, dtype=torch.float64) for _ in range(2)]
    found = []
    for device, layout in (
        ("cuda", torch.channels_last),
        ("cuda", torch.contiguous_format),
        ("cpu", torch.contiguous_format),
    ):
        leaves = [x.to(device).contiguous(memory_format=layout).requires_grad_() for x in curve]
        leaves += [x.to(device).requires_grad_() for x in weights]
        taken.clear()
        out = norms.BatchNormSecond.apply(*leaves, None, None, 0.1, 1e-5, None)
        assert taken == (["batch_norm_second"] if layout is torch.channels_last else [])
        value = sum(out[number].sin().sum() for number in adjoints)
        grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        found.append([x.cpu() for x in (*out, *grads)])
    for each in found[:2]:
        torch.testing.assert_close(each, found[2], rtol=1e-9, atol=1e-9)
