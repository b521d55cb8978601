"""Top eigenpairs of many factors at once, against each by itself."""

import math
from typing import Any

import pytest
import torch

from hgnp.curvature.eigen import Eigenpair, kronecker_residual, settled, top_of_each
from hgnp.curvature.factors import Dense, Patches, Rows


def best_in_krylov_space(
    F: torch.Tensor, x: torch.Tensor, powers: int, flat: bool, squared: bool, steps: int
) -> Eigenpair:
    """By dense decompositions: the top eigenpair of F restricted to the space of y, Fy, … with y = F^powers x."""
    pairs = []
    for matrix, start in zip(F, x, strict=True):
        scaled = matrix / torch.linalg.matrix_norm(matrix, 2)
        columns = [torch.linalg.matrix_power(scaled, powers) @ start]
        for _ in range(0 if flat else min(1 if squared else steps, len(matrix) - 1)):
            columns.append(scaled @ columns[-1])
        basis = (
            torch.eye(len(matrix)).double()
            if steps == 60 and not squared
            else torch.linalg.qr(torch.stack(columns, 1)).Q
        )
        v = basis @ torch.linalg.eigh(basis.T @ matrix @ basis).eigenvectors[:, -1]
        value = v @ matrix @ v
        pairs.append((value, v, (matrix @ v - value * v).norm() / value))
    return Eigenpair(*(torch.stack(part) for part in zip(*pairs, strict=True)))


def test_factors_solved_together_are_the_best_in_their_krylov_spaces() -> None:
    generator = torch.Generator().manual_seed(0)

    def rows(groups: int, count: int, side: int, bias: bool) -> Rows:
        made = torch.randn(groups, count, side, generator=generator, dtype=torch.double)
        made = made + (0.3 if side > 128 else 0.0)  # a gap in the spectrum, which large random factors do not have
        return Rows(made * torch.linspace(0.1, 2, side, dtype=torch.double), float(count), bias)

    def patches(channels: int, groups: int, bias: bool) -> Patches:
        a = torch.randn(4, channels * groups, 5, 6, generator=generator, dtype=torch.double)
        conv = {"stride": (1, 2), "padding": (1, 0), "dilation": (1, 1)}
        return Patches([a, a + 1], [conv, conv], torch.Size([groups, channels, 3, 2]), groups, 4.0, bias)

    factors: list[Any] = [
        rows(1, 6, 4, True),
        rows(3, 6, 2, False),
        rows(2, 6, 9, True),
        rows(1, 40, 3, False),
        rows(1, 5, 7, False),
        rows(1, 6, 900, False),
        Dense(rows(1, 30, 7, False).dense()),
        Dense(rows(2, 30, 11, False).dense()),
        Dense(rows(1, 300, 150, False).dense()),
        rows(1, 700, 140, True),
        patches(2, 1, True),
        patches(3, 2, False),
        patches(1, 1, False),
    ]
    starts = [torch.randn(f.entries, f.side, generator=generator).double() for f in factors]
    starts = [start / start.norm(dim=1, keepdim=True) for start in starts]
    for steps in (1, 4, 60):
        for factor, start, found in zip(factors, starts, top_of_each(factors, starts, steps), strict=True):
            # matrices that can be squared have their 64th power, rows with one more product for R on each side
            flat = isinstance(factor, Rows) and factor.is_flat
            squared = flat or (not isinstance(factor, Patches) and factor.side <= 128)
            alone = best_in_krylov_space(
                factor.dense(), start, 65 if flat else 64 if squared else 0, flat, squared, steps
            )
            torch.testing.assert_close(found.value, alone.value)
            torch.testing.assert_close(found.vector, alone.vector * (found.vector * alone.vector).sum(1, True).sign())
            torch.testing.assert_close(found.residual, alone.residual, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(found.vector.norm(dim=1), torch.ones(len(start)).double())
    dead = Rows(torch.zeros(1, 6, 4).double(), 6.0)
    (pair,) = top_of_each([dead], [starts[0][:, :4]], 4)
    assert pair.value.item() == 0
    assert torch.isfinite(pair.vector).all()
    assert pair.vector.norm().item() == pytest.approx(1)


class Counted(Dense):
    products = 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        self.products += 1
        return super().product(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("second", [0.01, 0.5, 0.9])
def test_a_search_ends_once_it_is_settled_and_not_at_what_was_the_top_one(dtype: torch.dtype, second: float) -> None:
    side = 40
    basis = torch.linalg.qr(torch.randn(side, side, generator=torch.Generator().manual_seed(0)).double()).Q
    values = torch.cat([torch.tensor([1.0, second]), torch.linspace(0.3 * second, 0, side - 2)]).double()
    factor = Counted(((basis * values) @ basis.T).to(dtype).unsqueeze(0))
    was_the_top = basis[:, 1].to(dtype).unsqueeze(0)  # an eigenvector still: its residual is nothing
    pair = settled(factor, was_the_top, 400)
    assert pair.value.item() == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps / (1 - second))
    assert abs(float(pair.vector[0].double() @ basis[:, 0])) == pytest.approx(1.0, abs=1e-3)
    assert factor.products < (20 if second == 0.01 else 80 if second == 0.5 else 330)


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e4])
def test_small_and_large_factors_keep_their_pair_and_residual_in_single_precision(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows(size * torch.randn(2, 30, 9, generator=generator) * torch.linspace(0.5, 2, 9), 30.0)
    inputs = size * torch.randn(4, 2, 5, 6, generator=generator)
    conv = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    for factor in (rows, Dense(rows.dense()), Patches([inputs], [conv], torch.Size([1, 2, 3, 3]), 1, 4.0, False)):
        start = torch.nn.functional.normalize(torch.randn(factor.entries, factor.side, generator=generator))
        for _ in range(2):  # the second time the direction is all but exact
            (pair,) = top_of_each([factor], [start], 1 if isinstance(factor, Patches) else 60)
            F, v = factor.dense().double(), pair.vector.double()
            image = (F @ v.unsqueeze(2)).squeeze(2)
            value = (v * image).sum(1)
            residual = (image / value.unsqueeze(1) - v).norm(dim=1)
            torch.testing.assert_close(pair.value.double(), value, rtol=1e-5, atol=0)
            torch.testing.assert_close(pair.residual.double(), residual, rtol=1e-3, atol=2e-6)
            start = pair.vector


@pytest.mark.parametrize(
    ("space", "kernel", "stride", "padding", "dilation"),
    [
        ((7,), (3,), (2,), (1,), (1,)),
        ((6, 7), (3, 2), (1, 2), (1, 0), (2, 1)),
        ((6, 7), (1, 1), (2, 2), (0, 0), (1, 1)),
        ((9, 8), (3, 3), (3, 2), (4, 1), (1, 3)),
        ((4, 5, 4), (2, 1, 3), (1, 2, 2), (1, 0, 1), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_factor_is_that_of_its_patches(
    space: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, bias: bool
) -> None:
    """Patches by a convolution with one filter for each entry of a patch."""
    torch.manual_seed(0)
    channels, entries = 3, 3 * math.prod(kernel)
    a = torch.randn(4, channels, *space).double()
    if len(space) == 2:
        a = a.contiguous(memory_format=torch.channels_last)
    each = torch.eye(entries).double().view(entries, channels, *kernel)
    zeros = [0] * len(space)
    patches = torch.convolution(a, each, None, stride, padding, dilation, False, zeros, 1).flatten(2)
    patches = torch.cat([patches, torch.ones_like(patches[:, :1])], 1) if bias else patches
    expected = (patches @ patches.mT).sum(0) / 4
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    factor = Patches([a], [options], torch.Size([5, channels, *kernel]), 1, 4.0, bias)
    assert factor._has_few_taps
    torch.testing.assert_close(factor.dense()[0], expected, rtol=1e-12, atol=1e-12)


def test_a_pair_of_which_one_half_is_unknown_is_unknown() -> None:
    inf, zero, some = torch.tensor([torch.inf]), torch.zeros(1), torch.tensor([0.5])
    for psi, gamma in ((inf, zero), (zero, inf), (inf, inf), (inf, some)):
        assert kronecker_residual(psi, gamma).item() == math.inf
    assert kronecker_residual(some, some).item() == pytest.approx(math.sqrt(0.5625))
