"""The loss's curvature along u, and the Fisher draws, against the dense Hessian at the output."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hgnp import Flatness
from hgnp.curvature.losses import loss_curvature, normaliser, total

torch.manual_seed(0)
W = torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64)
INDEX = torch.tensor([0, 2, 1, -100, 2])
SOFT = torch.rand(5, 3, dtype=torch.float64)
MAP = torch.randint(0, 3, (5, 2, 2))
BITS = torch.randint(0, 2, (5, 3)).double()
CASES = {
    "cross-entropy": (F.cross_entropy, INDEX.abs() % 3, (5, 3)),
    "ignored": (F.cross_entropy, INDEX, (5, 3)),
    "ignored by choice": (nn.CrossEntropyLoss(ignore_index=2), MAP[:, 0, 0], (5, 3)),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), INDEX, (5, 3)),
    "weighted": (functools.partial(F.cross_entropy, weight=W), INDEX, (5, 3)),
    "weighted, smoothed": (functools.partial(F.cross_entropy, weight=W, label_smoothing=0.3), INDEX, (5, 3)),
    "soft labels": (functools.partial(F.cross_entropy, weight=W, label_smoothing=0.1), SOFT, (5, 3)),
    "a map": (functools.partial(F.cross_entropy, weight=W), MAP, (5, 3, 2, 2)),
    "mse": (F.mse_loss, torch.randn(5, 3, dtype=torch.float64), (5, 3)),
    "mse module": (nn.MSELoss(), torch.randn(5, 2, 3, dtype=torch.float64), (5, 2, 3)),
    "bce": (F.binary_cross_entropy_with_logits, BITS, (5, 3)),
    "rows that are positions": (F.cross_entropy, torch.tensor([0, 1, 2, 0, 1, 1, 0, 2, 2, 0]), (10, 3)),
    "mse of positions": (F.mse_loss, torch.randn(10, 3, dtype=torch.float64), (10, 3)),
    "bce of positions": (F.binary_cross_entropy_with_logits, BITS.repeat(2, 1), (10, 3)),
    "bce, weights": (nn.BCEWithLogitsLoss(weight=W, pos_weight=W.flip(0)), BITS, (5, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_quotient_is_that_of_the_dense_hessian(case):
    loss, target, shape = CASES[case]
    z, u = torch.randn(2, *shape, dtype=torch.float64)
    H = torch.autograd.functional.hessian(lambda flat: loss(flat.view(shape), target), z.flatten())
    want = u.flatten() @ H @ u.flatten()
    torch.testing.assert_close(loss_curvature(loss).quotient(z, u, target), want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_hessian_as_their_second_moment(case):
    """g = N·cotangent has E[g gᵀ] = N·(the sample's part of the Hessian of the mean loss). There are five samples in all cases,
    in one or two rows."""
    loss, target, shape = CASES[case]
    z = torch.randn(shape, dtype=torch.float64)
    H = torch.autograd.functional.hessian(lambda flat: loss(flat.view(shape), target), z.flatten())
    generator = torch.Generator().manual_seed(1)
    curvature = loss_curvature(loss)
    draws = torch.stack([curvature.draw(z, target, 5, generator).flatten() for _ in range(6000)]) * 5
    moment = draws.T @ draws / len(draws)
    per_entry = H.shape[0] // 5
    blocks = torch.block_diag(*[torch.ones(per_entry, per_entry, dtype=torch.float64)] * 5)
    assert (moment * blocks - 5 * H).norm() < 0.06 * 5 * H.norm()


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("fisher_type", ["mc", "empirical"])
def test_lambda_of_a_sequence_is_the_same_with_its_positions_as_rows(fisher_type, loss, kfac_approx):
    torch.manual_seed(0)
    x = torch.randn(8, 6, 5, dtype=torch.float64)
    labels = torch.randint(0, 3, (8, 6)) if loss is F.cross_entropy else torch.rand(8, 6, 3, dtype=torch.float64)
    apart = (lambda z: z.transpose(1, 2)) if loss is F.cross_entropy else (lambda z: z)
    found = []
    for output, target in ((apart, labels), (lambda z: z.flatten(0, 1), labels.flatten(0, 1))):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        options = {"fisher_type": fisher_type, "direction_from": "this_batch", "kfac_approx": kfac_approx}
        flat = Flatness(net, loss=loss, bound=-1.0, output=output, **options)
        flat.backward(x, target)
        found.append((flat.radius, flat.curvature, flat.block))
    assert found[0] == (pytest.approx(found[1][0], rel=1e-9), pytest.approx(found[1][1], rel=1e-9), found[1][2])


def test_losses_that_are_not_known():
    assert loss_curvature(F.l1_loss) is None
    assert loss_curvature(lambda z, y: z.sum()) is None
    assert loss_curvature(functools.partial(F.mse_loss, weight=W)) is None


@pytest.mark.parametrize("case", CASES)
def test_the_mean_is_a_total_over_a_normaliser_and_both_add_up_over_batches(case):
    loss, target, shape = CASES[case]
    z = torch.randn(shape, dtype=torch.float64)
    parts = list(zip(z.split(2), target.split(2), strict=True))
    totals = sum(total(loss, *part) for part in parts)
    normalisers = sum(normaliser(loss, *part) for part in parts)
    torch.testing.assert_close(totals / normalisers, loss(z, target), rtol=1e-13, atol=0)
    torch.testing.assert_close(normalisers, normaliser(loss, z, target), rtol=1e-13, atol=0)


def test_nothing_is_counted_where_every_label_is_ignored():
    z, target = torch.randn(5, 3), torch.full((5,), -100)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(weight=W.float(), label_smoothing=0.1)):
        assert (total(loss, z, target), normaliser(loss, z, target)) == (0, 0)
    assert (total(F.l1_loss, z, z), normaliser(F.l1_loss, z, z)) == (None, None)
