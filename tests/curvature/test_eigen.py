"""Top eigenpairs of many factors at once, against dense decompositions, over ranks and by their number of products."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hgnp.curvature.eigen import Eigenpair, kronecker_residual, top_of_each
from hgnp.curvature.factors import Dense, Patches, Rows
from hgnp.reducer import Reducer
from ranks import run_ranks

CONV = {"stride": (1, 2), "padding": (1, 0), "dilation": (1, 1)}


def spread(generator: torch.Generator, groups: int, count: int, side: int) -> Tensor:
    """Rows with a gap in their spectrum, which large random factors do not have."""
    made = torch.randn(groups, count, side, generator=generator, dtype=torch.double) + (0.3 if side > 128 else 0.0)
    return made * torch.linspace(0.1, 2, side, dtype=torch.double)


def patches(inputs: Tensor, channels: int, groups: int, bias: bool, count: float = 4.0) -> Patches:
    return Patches([inputs, inputs + 1], [CONV, CONV], torch.Size([groups, channels, 3, 2]), groups, count, bias=bias)


def every_kind() -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def rows(groups: int, count: int, side: int, bias: bool) -> Rows:
        return Rows(spread(generator, groups, count, side), float(count), bias)

    def inputs(channels: int) -> Tensor:
        return torch.randn(4, channels, 5, 6, generator=generator, dtype=torch.double)

    return [
        rows(1, 6, 4, True),
        rows(3, 6, 2, False),
        rows(2, 6, 9, True),
        rows(1, 40, 3, False),
        rows(1, 5, 7, False),
        rows(1, 6, 900, False),
        rows(2, 6, 700, True),
        Dense(rows(1, 30, 7, False).dense() * 3, 3.0),
        Dense(rows(2, 30, 11, False).dense()),
        Dense(rows(1, 300, 150, False).dense() * 7, 7.0),
        Dense(rows(1, 300, 160, False).dense()),
        rows(1, 700, 140, True),
        patches(inputs(2), 2, 1, True),
        patches(inputs(6), 3, 2, False),
        patches(inputs(1), 1, 1, False),
        patches(inputs(30), 30, 1, True),
    ]


def random_starts(factors: Sequence[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(f.groups, f.side, generator=generator, dtype=torch.double) for f in factors]
    return [start / start.norm(dim=1, keepdim=True) for start in made]


def best_in_krylov_space(F: Tensor, x: Tensor, powers: int, dimension: int) -> Eigenpair:
    """By dense decompositions: the top eigenpair of F restricted to the space of y, Fy, … with y = F^powers x."""
    pairs = []
    for matrix, start in zip(F, x, strict=True):
        scaled = matrix / torch.linalg.matrix_norm(matrix, 2)
        columns = [torch.linalg.matrix_power(scaled, powers) @ start]
        for _ in range(min(dimension, len(matrix)) - 1):
            columns.append(scaled @ columns[-1])
        basis = torch.linalg.qr(torch.stack(columns, 1)).Q
        v = basis @ torch.linalg.eigh(basis.T @ matrix @ basis).eigenvectors[:, -1]
        value = v @ matrix @ v
        pairs.append((value, v, (matrix @ v - value * v).norm() / value))
    return Eigenpair(*(torch.stack(part) for part in zip(*pairs, strict=True)))


def test_warm_pairs_are_the_best_in_their_krylov_spaces() -> None:
    factors = every_kind()
    starts = random_starts(factors)
    for factor, start, found in zip(factors, starts, top_of_each(factors, starts, cold=False), strict=True):
        squared = not isinstance(factor, Patches) and factor.side <= 128
        best = best_in_krylov_space(factor.dense(), start, 64 if squared else 0, 2 if squared else factor.warm_products)
        torch.testing.assert_close(found.value, best.value)
        torch.testing.assert_close(found.vector, best.vector * (found.vector * best.vector).sum(1, True).sign())
        torch.testing.assert_close(found.residual, best.residual, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.vector.norm(dim=1), torch.ones(len(start)).double())


def test_cold_pairs_are_those_of_a_dense_decomposition() -> None:
    factors = every_kind()
    for factor, found in zip(factors, top_of_each(factors, random_starts(factors), cold=True), strict=True):
        values, vectors = torch.linalg.eigh(factor.dense())
        torch.testing.assert_close(found.value, values[:, -1], rtol=1e-12, atol=0)
        overlap = (found.vector * vectors[..., -1]).sum(1).abs()
        torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-12)
        assert (found.residual < 1e-6).all()


def test_a_dead_factor_has_no_eigenvalue_and_an_overflow_keeps_the_start() -> None:
    for side in (4, 200):
        (start,) = random_starts([Rows(torch.zeros(1, 6, side), 6.0)])
        for cold in (False, True):
            (dead,) = top_of_each([Rows(torch.zeros(1, 6, side).double(), 6.0)], [start], cold=cold)
            assert dead.value.item() == 0
            assert dead.vector.norm().item() == pytest.approx(1)
            huge = Rows(torch.full((1, 6, side), 1e200, dtype=torch.double), 6.0)
            (over,) = top_of_each([huge], [start], cold=cold)
            torch.testing.assert_close(over.vector, start)
            assert dead.residual.item() == over.residual.item() == math.inf


@pytest.mark.parametrize("cold", [False, True])
def test_two_ranks_find_the_pairs_of_the_joint_batch(cold: bool) -> None:
    """Whatever each holds: the second has no rows at all of one layer, and matrices where the first has rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 9, 7), (1, 6, 20), (1, 600, 140), (1, 10, 300), (1, 300, 150), (1, 9, 310))
    rows = [spread(generator, *size) for size in sizes]
    inputs = [torch.randn(5, channels, 5, 6, generator=generator, dtype=torch.double) for channels in (2, 30)]
    firsts = (5, 6, 250, 3, 20, 6)  # rows of the first rank

    def factors(rank: int | None) -> list[Any]:
        made: list[Any] = []
        for number, (R, first) in enumerate(zip(rows, firsts, strict=True)):
            mine = {None: R, 0: R[:, :first], 1: R[:, first:]}[rank]
            made.append(Rows(mine, float(R.shape[1]), bias=number % 2 == 1))
        if rank == 1:
            made[0], made[4] = Dense(made[0].dense()), Dense(made[4].dense())
        samples = {None: slice(5), 0: slice(2), 1: slice(2, 5)}[rank]
        return made + [patches(a[samples], a.shape[1], 1, True, 5.0) for a in inputs]

    joint, shares = factors(None), [factors(0), factors(1)]
    starts = random_starts(joint)
    expected = top_of_each(joint, starts, cold=cold)
    for found in run_ranks(2, lambda rank, reducer: top_of_each(shares[rank], starts, cold=cold, reducer=reducer)):
        for pair, other in zip(found, expected, strict=True):
            torch.testing.assert_close(pair.value, other.value, rtol=1e-10, atol=0)
            torch.testing.assert_close(pair.vector, other.vector, rtol=0, atol=1e-10)
            torch.testing.assert_close(pair.residual, other.residual, rtol=0, atol=1e-10)


class Counted(Reducer):
    """One of two ranks, of which the other has no samples."""

    ranks = 2

    def __init__(self) -> None:
        self.shapes: list[list[torch.Size]] = []

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.shapes.append([x.shape for x in tensors])
        return super().sum(tensors)


class CountedRows(Rows):
    products = 0

    def product(self, x: Tensor) -> Tensor:
        type(self).products += 1
        return super().product(x)


@pytest.mark.parametrize("cold", [False, True])
def test_the_number_of_products_does_not_depend_on_rows_or_ranks(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def products(factor: Any, **reducer: Any) -> int:
        monkeypatch.setattr(CountedRows, "products", 0)
        top_of_each([factor], random_starts([factor]), cold=cold, **reducer)
        return CountedRows.products

    counts, rounds = set(), []
    for rows in (3, 300, 5000):
        factor = CountedRows(torch.randn(1, rows, 200).double(), float(rows))
        counts |= {products(factor), products(factor, reducer=Counted())}
        reducer = Counted()
        several = [
            factor,
            Rows(torch.randn(2, rows, 30).double(), 1.0),
            Rows(torch.randn(1, 2 * rows, 150).double(), 1.0),
        ]
        several += [Dense(several[0].dense())] if rows == 3 else [several[0]]
        several += [patches(torch.randn(rows % 7 + 1, 2, 5, 6).double(), 2, 1, True)]
        top_of_each(several, random_starts(several), cold=cold, reducer=reducer)
        rounds.append(reducer.shapes)
    assert counts == {60 if cold else Rows.warm_products}
    assert rounds[0] == rounds[1] == rounds[2]
    assert len(rounds[0]) == (60 if cold else Rows.warm_products)  # all layers in one sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("second", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("side", [40, 200])
def test_a_cold_start_leaves_what_was_the_top_eigenvector(dtype: torch.dtype, second: float, side: int) -> None:
    basis = torch.linalg.qr(torch.randn(side, side, generator=torch.Generator().manual_seed(0)).double()).Q
    values = torch.cat([torch.tensor([1.0, second]), torch.linspace(0.3 * second, 0, side - 2)]).double()
    factor = Dense(((basis * values) @ basis.T).to(dtype).unsqueeze(0))
    was_the_top = basis[:, 1].to(dtype).unsqueeze(0)  # an eigenvector still: its residual is nothing
    (pair,) = top_of_each([factor], [was_the_top], cold=True)
    assert pair.value.item() == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps / (1 - second))
    assert abs(float(pair.vector[0].double() @ basis[:, 0])) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e4])
def test_small_and_large_factors_keep_their_pair_and_residual_in_single_precision(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows(size * torch.randn(2, 30, 9, generator=generator) * torch.linspace(0.5, 2, 9), 30.0)
    inputs = size * torch.randn(4, 2, 5, 6, generator=generator)
    conv = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    for factor in (rows, Dense(rows.dense()), Patches([inputs], [conv], torch.Size([1, 2, 3, 3]), 1, 4.0, False)):
        start = torch.nn.functional.normalize(torch.randn(factor.groups, factor.side, generator=generator))
        for _ in range(2):  # the second time the direction is all but exact
            (pair,) = top_of_each([factor], [start], cold=not isinstance(factor, Patches))
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
    assert factor.has_few_taps
    torch.testing.assert_close(factor.dense()[0], expected, rtol=1e-12, atol=1e-12)


def test_a_pair_of_which_one_half_is_unknown_is_unknown() -> None:
    inf, zero, some = torch.tensor([torch.inf]), torch.zeros(1), torch.tensor([0.5])
    for psi, gamma in ((inf, zero), (zero, inf), (inf, inf), (inf, some)):
        assert kronecker_residual(psi, gamma).item() == math.inf
    assert kronecker_residual(some, some).item() == pytest.approx(math.sqrt(0.5625))
