"""The library computes what `hgnp.reference` states: one step, and whole runs, in float64."""

import copy
from collections.abc import Iterator
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp import reference
from hgnp.curvature.eigen import arbitrary, top_of_each
from hgnp.curvature.factors import Dense, Factor, Patches

Batch = tuple[Tensor, Tensor]


def cnn(block: str = "11") -> nn.Sequential:
    """A network whose K-FAC radius is largest in this block: the last layer, or the convolution in the middle."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU(),
        nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(72, 10), nn.BatchNorm1d(10), nn.Softplus(), nn.Linear(10, 3),
    ).double()  # fmt: skip
    if block == "3":
        with torch.no_grad():
            net[4].weight *= 4
            net[11].weight *= 2
    return net


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    nested = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), nested).double()


def data(*shape: int, batches: int = 3, samples: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(samples, *shape, generator=generator, dtype=torch.float64) for _ in range(batches)]
    return [(x, (x.flatten(1)[:, :3] + 0.5 * x.flatten(1)[:, 2:5]).argmax(1)) for x in inputs]


# One step


@pytest.mark.parametrize("block", ["3", "11"])
def test_the_objective_of_a_batch_is_the_references_and_leaves_no_trace(block: str) -> None:
    net, ((x, y),) = cnn(block), data(2, 8, 8, batches=1)
    expected = reference.penalized_loss(copy.deepcopy(net), x, y, mu=0.3, bound=-10.0)
    flat = hgnp.Flatness(net, flatness="paper", mu=0.3, bound=-10.0)
    before, random = copy.deepcopy((net.state_dict(), flat.state_dict())), torch.get_rng_state()
    found = flat.objective(x, y)
    torch.testing.assert_close((net.state_dict(), flat.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(found, expected.objective, rtol=1e-6, atol=0)
    assert found.item() > expected.loss.item() + 1  # the penalty has a part in it
    found.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_the_objective_without_a_penalty_is_the_loss() -> None:
    net, ((x, y),) = mlp(), data(5, batches=1)
    loss = F.cross_entropy(net(x), y)
    torch.testing.assert_close(hgnp.Flatness(net, mu=0.0).objective(x, y), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(hgnp.Flatness(net, bound=1e6).objective(x, y), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("block", ["3", "11"])
def test_a_step_of_flatness_is_the_references(block: str) -> None:
    net = cnn(block)
    ours = copy.deepcopy(net)
    ((x, y),) = data(2, 8, 8, batches=1)
    found = reference.penalized_loss(net, x, y, mu=0.3, bound=-10.0)
    found.objective.backward()

    flat = hgnp.Flatness(ours, flatness="paper", mu=0.3, bound=-10.0)
    for _ in range(40):  # its eigenvectors come closer with every step
        ours.zero_grad()
        loss = flat.backward(x, y)
    assert flat.block == found.block == block
    assert float(loss) == pytest.approx(float(found.loss), rel=1e-12)
    assert flat.radius == pytest.approx(float(found.radius), rel=1e-9)
    assert flat.curvature == pytest.approx(float(found.curvature), rel=1e-7)
    torch.testing.assert_close(found.objective.detach(), found.loss + 0.3 * (found.curvature + 10))
    theirs = torch.cat([part.flatten() for part in flat.direction.values()])
    v = torch.cat([part.flatten() for part in found.direction])
    assert abs(float(theirs @ v)) == pytest.approx(1, abs=1e-9)
    for parameter, other in zip(net.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-8)


def test_the_references_gradient_agrees_with_finite_differences_of_pytorchs_own_forward() -> None:
    net = cnn("3")
    ((x, y),) = data(2, 8, 8, batches=1)
    found = reference.penalized_loss(net, x, y, mu=0.3, bound=-2.0)
    assert found.block == "3"
    assert found.curvature > -1  # the penalty is active wherever L is sampled
    found.objective.backward()
    along = dict(zip(net[3].parameters(), found.direction, strict=True))
    generator = torch.Generator().manual_seed(2)
    d = {p: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in net.parameters()}

    @torch.no_grad()
    def objective(e: float, h: float = 1e-3) -> float:
        """L at W + e·d, with q from C at five points along v."""
        values = []
        for k in (-2, -1, 0, 1, 2):
            weights = {
                name: p + e * d[p] + (k * h * along[p] if p in along else 0) for name, p in net.named_parameters()
            }
            values.append(float(F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)))
        q = (-values[0] + 16 * values[1] - 30 * values[2] + 16 * values[3] - values[4]) / (12 * h * h)
        return values[2] + 0.3 * max(0.0, q + 2)

    assert objective(0.0) == pytest.approx(float(found.objective.detach()), rel=1e-6)
    e = 2e-4
    slope = (8 * (objective(e) - objective(-e)) - (objective(2 * e) - objective(-2 * e))) / (12 * e)
    penalized = sum(float((p.grad * d[p]).sum()) for p in d)
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    plain = sum(float((p.grad * d[p]).sum()) for p in d)
    assert abs(slope - plain) > 0.1 * abs(slope)  # the penalty has its part in it
    assert slope == pytest.approx(penalized, rel=1e-5)


def test_a_step_leaves_the_buffers_that_pytorch_would() -> None:
    net, plain = cnn(), cnn()
    ((x, y),) = data(2, 8, 8, batches=1)
    reference.penalized_loss(net, x, y)
    plain(x)
    torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))


# Whole runs


def library_solver(net: nn.Sequential) -> reference.Eigensolver:
    """The library's solver as the reference's, which asks for Ψ and Γ of one layer after the other. With R = √F, F = RᵀR is
    Ψ of a 1 × 1 convolution that reads R's rows, and convolutions have their own number of products."""
    kinds = cycle(kind for layer in reference.chain(net).values() for kind in (type(layer), None))

    def solve(matrix: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        factor = as_patches(matrix) if next(kinds) is nn.Conv2d else Dense(matrix.unsqueeze(0))
        begin = arbitrary(len(matrix), matrix.dtype, matrix.device) if start is None else start.unsqueeze(0)
        (pair,) = top_of_each([factor], [begin], cold=start is None)
        return pair.value[0], pair.vector[0]

    return solve


def as_patches(matrix: Tensor) -> Factor:
    values, vectors = torch.linalg.eigh(matrix)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    rows = root[:, :, None, None]
    return Patches([rows], [options], torch.Size([1, len(root), 1, 1]), groups=1, count=1.0, bias=False)


def living(net: nn.Sequential, masks: reference.Masks) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers without the entries of pruned neurons."""
    rows: Tensor | None = None
    layers = reference.chain(net)
    before = {reader: name for name, reader in pairwise(layers)}
    for module_name, module in net.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            part = tensor.detach()
            if module_name in layers:
                rows = masks[module_name].bool() if module_name in masks else None
                if name == "weight" and module_name in before:
                    columns = masks[before[module_name]].bool()
                    part = part.view(len(part), len(columns), -1)[:, columns].reshape(len(part), -1, *part.shape[2:])
            yield f"{module_name}.{name}", part if rows is None or part.dim() == 0 else part[rows]


PLAN: dict[str, Any] = {"warmup_epochs": 3, "prune_every": 2, "neurons_per_round": 4, "finetune_epochs": 2}


@pytest.mark.parametrize(
    ("make", "shape", "options", "lr", "blocks"),
    [
        (mlp, (5,), {"keep": 0.4, "mu": 0.05, "bound": 0.2}, 0.05, {"0", "2.0", "2.2"}),
        (lambda: cnn("3"), (2, 8, 8), {"keep": 0.25, "mu": 0.01, "bound": -1.0}, 0.01, {"3", "8"}),
    ],
    ids=["mlp", "cnn"],
)
def test_a_run_of_prune_is_the_references(
    make: Any, shape: tuple[int, ...], options: dict[str, float], lr: float, blocks: set[str]
) -> None:
    net, ours, batches = make(), make(), data(*shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    rounds = reference.prune(net, batches, optimizer, **options, **PLAN, eigensolver=library_solver(net))

    recipe = hgnp.Recipe(**options, **PLAN, flatness="paper", schedule="constant", lr=lr, measure="none")
    rows = hgnp.prune(ours, batches, recipe=recipe, verbose=False).history
    assert len(rounds) >= 3
    assert {block for row in rows for block in row["blocks"] if row["active"]} >= blocks
    assert [each.epoch for each in rounds] == [row["epoch"] for row in rows if row["removed"]]
    for each in rounds:
        assert rows[each.epoch]["widths"] == {name: int(m.sum()) for name, m in each.masks.items()}
        assert rows[each.epoch]["kept"] == pytest.approx(each.kept, rel=1e-12)
    for name, tensor in living(net, rounds[-1].masks):
        torch.testing.assert_close(tensor, ours.state_dict()[name], rtol=1e-10, atol=1e-10)
    x = batches[0][0]
    torch.testing.assert_close(net.eval()(x), ours.eval()(x), rtol=1e-10, atol=1e-10)


def test_scores_are_those_of_sensitivity() -> None:
    net = cnn("3")
    ((x, y),) = data(2, 8, 8, batches=1)
    flat = hgnp.Flatness(net, flatness="paper", mu=0.3, bound=-2.0)
    ours = hgnp.sensitivity(net, hgnp.Neurons(net, x[:2]), [(x, y)], flatness=flat)
    masks = {name: torch.ones(n, dtype=torch.float64) for name, n in (("0", 6), ("3", 8), ("8", 10))}
    found = reference.sensitivity(net, x, y, masks, mu=0.3, bound=-2.0)
    torch.testing.assert_close(found, dict(ours), rtol=1e-6, atol=1e-8)
    plain = reference.sensitivity(net, x, y, masks, mu=0.0)
    assert (found["3"] - plain["3"]).abs().max() > 1e-2  # the penalty has its part in them
    assert net.training


def test_a_pruned_neuron_is_not_scored_and_not_counted() -> None:
    net = cnn()
    ((x, y),) = data(2, 8, 8, batches=1)
    masks = {name: torch.ones(n, dtype=torch.float64) for name, n in (("0", 6), ("3", 8), ("8", 10))}
    assert reference.parameters_left(net, masks) == sum(p.numel() for p in net.parameters())
    masks["3"][2] = 0
    scores = reference.sensitivity(net, x, y, masks)
    assert scores["3"][2] == 0
    assert float(scores["3"].norm()) == pytest.approx(1)
    assert ("3", 2) not in reference.least_important_first(scores, masks)
    smaller = copy.deepcopy(net)
    neurons = hgnp.Neurons(smaller, x[:2])
    neurons.remove({"3": [2]})
    assert reference.parameters_left(net, masks) == sum(p.numel() for p in smaller.parameters())


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


shared = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("net", "shape", "keep", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4))), (4,), 0.5, "nn.Sequential .* got 1: Residual"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), (4,), 0.5, "got 1: Dropout; use hgnp.prune"),
        (nn.Sequential(shared, nn.Tanh(), shared), (4,), 0.5, "each layer once, got 2: Linear"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4), 0.5, "one group"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (3, 4), 0.5, r"\(samples, features\), got \(12, 3, 4\)"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 4)), (4,), 0.5,
         "BatchNorm with running statistics, .* got 1: BatchNorm1d"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (4,), 0.1, "keep must be at least 0.3250, .* got 0.1"),
    ],
)  # fmt: skip
def test_what_the_reference_does_not_cover_is_refused(
    net: nn.Sequential, shape: tuple[int, ...], keep: float, message: str
) -> None:
    before, optimizer = copy.deepcopy(net.state_dict()), torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [(torch.zeros(12, *shape), torch.zeros(12, dtype=torch.long))]
    with pytest.raises(ValueError, match=message):
        reference.prune(net, batches, optimizer, keep=keep, **PLAN)
    torch.testing.assert_close(net.state_dict(), before)


def test_one_value_per_channel_is_refused_as_by_pytorch() -> None:
    norm = nn.BatchNorm1d(4)
    for batch_norm in (reference.batch_norm, torch.nn.functional.batch_norm):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            batch_norm(torch.zeros(1, 4), norm.running_mean, norm.running_var, None, None, True, 0.1, 1e-5)
    assert bool(norm.running_var.isfinite().all())


class Calls(nn.Module):
    """Calls layer a as often as it is told."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.a, self.out, self.times = nn.Linear(4, 4), nn.Linear(4, 3), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.a(x))
        return self.out(x)


@pytest.mark.parametrize("times", [0, 2])
def test_a_layer_that_is_not_called_once_is_refused(times: int) -> None:
    with pytest.raises(ValueError, match=f"a pass must call layer 'a' once, got {times} calls; use hgnp.Flatness"):
        reference.penalized_loss(Calls(times), torch.randn(5, 4), torch.arange(5) % 3)


def test_a_dead_layer_has_scores_of_zero() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        net[2].bias.fill_(-100.0)
    masks = {"0": torch.ones(6).double(), "2": torch.ones(5).double()}
    scores = reference.sensitivity(net, torch.randn(8, 4).double(), torch.arange(8) % 3, masks)
    assert all(torch.equal(score, torch.zeros_like(score)) for score in scores.values())
