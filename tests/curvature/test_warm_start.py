"""Eigenpairs that start from the last batch's, against dense decompositions, while small smooth networks train."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature_cases import top_dense
from hgnp import Flatness
from hgnp.curvature.autodiff.forward import Forward
from hgnp.curvature.collector import FactorCollector
from hgnp.curvature.factors import Patches, find_blocks

SHAPES = {"mlp": (8,), "cnn": (2, 6, 6)}


def smooth(kind: str) -> nn.Sequential:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(54, 5),
    )  # fmt: skip


def radii(net: nn.Module, x: torch.Tensor, y: torch.Tensor, kfac_approx: str) -> dict[str, float]:
    """λ^Ψ λ^Γ of every block."""
    collector = FactorCollector(
        find_blocks(net), len(x), kfac_approx=kfac_approx, scale_invariant=False, keep_calls=False
    )
    with Forward(observer=collector):
        loss = F.cross_entropy(net(x), y)
    collector.collect(loss, None, 1.0)
    tops = {
        name: [top_dense(m.factor()).value for m in (collector.psi[name], collector.gamma[name])]
        for name in collector.psi
    }
    return {name: float((psi * gamma).max()) for name, (psi, gamma) in tops.items()}


@pytest.mark.parametrize("kfac_approx", ["reduce", "expand"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("samples", [16, 64])
def test_the_penalised_pair_of_a_small_network_is_its_batchs_own(kfac_approx: str, kind: str, samples: int) -> None:
    """Powers from the last batch's vectors were up to 31 % short of the top eigenvalue here."""
    for seed in range(2):
        torch.manual_seed(seed)
        net, teacher = smooth(kind).double(), smooth(kind).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        flat = Flatness(net, mu=1e-2, bound=0.1, direction_from="this_batch", kfac_approx=kfac_approx)
        for _ in range(8):
            x = torch.randn(samples, *SHAPES[kind]).double()
            y = teacher(x).argmax(1)
            true = radii(net, x, y, kfac_approx)
            optimizer.zero_grad()
            flat.backward(x, y)
            assert flat.block is not None
            assert flat.radius == pytest.approx(true[flat.block], rel=2e-3)
            assert true[flat.block] == pytest.approx(max(true.values()), rel=2e-3)
            assert flat.residual < 0.05
            optimizer.step()


def test_the_number_of_products_depends_on_the_layer_only() -> None:
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}

    def warm(samples: int, channels: int, groups: int = 1) -> int:
        inputs = torch.zeros(samples, channels * groups, 5, 5)
        return Patches([inputs], [options], torch.Size([groups, channels, 3, 3]), groups, 1.0, True).warm_products

    assert warm(1, 3) == warm(50, 3) == 5
    assert warm(1, 64) == warm(50, 64) == warm(1, 1, 64) == 2
