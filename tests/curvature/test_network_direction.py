"""v over the whole network: power iteration on the Gauss–Newton matrix, against the dense matrix."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from curvature_cases import LOSSES, Residual, Twice, central, convnet, flat_direction, images, loss_of_block, shaken
from hgnp import Flatness
from hgnp.errors import InputError

ACTIVE = -1e3
NETWORK: dict[str, Any] = {"direction_over": "network", "mu": 1.0, "bound": ACTIVE}


def dense(net: nn.Module, x: Tensor, y: Tensor, loss: Any = F.cross_entropy) -> Tensor:
    """Jᵀ(∂²C/∂z²)J over all parameters."""
    start, output, _ = loss_of_block(net, [name for name, _ in net.named_parameters()], x, y)
    J = torch.autograd.functional.jacobian(output, start).flatten(0, -2)
    z = output(start).detach()
    return J.T @ torch.autograd.functional.hessian(lambda flat: loss(flat.view(z.shape), y), z.flatten()) @ J


def settled(net: nn.Module, x: Tensor, y: Tensor, steps: int, **choices: Any) -> Flatness:
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    flat = Flatness(net, **NETWORK | choices)
    for _ in range(steps):
        flat.backward(x, y)
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
    net.zero_grad()
    return flat


@pytest.mark.parametrize("case", ["batch", "evaluation", "layer", "residual"])
def test_power_iteration_finds_the_top_eigenpair_of_the_dense_matrix(case: str) -> None:
    net = shaken(Residual().double()) if case == "residual" else convnet("layer" if case == "layer" else "batch")
    net.train(case != "evaluation")
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = LOSSES["smoothed"] if case == "evaluation" else F.cross_entropy
    x, y = images()
    flat = settled(net, x, y, 60, loss=loss)
    F_ = dense(net, x, y, loss)
    values, vectors = torch.linalg.eigh(F_)
    assert list(flat.direction) == [name for name, _ in net.named_parameters()]
    v = flat_direction(flat.direction)
    assert v.norm().item() == pytest.approx(1)
    assert flat.curvature == pytest.approx((v @ F_ @ v).item(), rel=1e-9)
    assert flat.curvature == pytest.approx(values[-1].item(), rel=1e-3)
    assert flat.radius == pytest.approx(values[-1].item(), rel=1e-3)
    assert abs(v @ vectors[:, -1]) > 0.99
    product = F_ @ v
    assert flat.residual == pytest.approx(((product - flat.curvature * v).norm() / flat.curvature).item(), abs=1e-2)
    assert flat.block == "network"
    assert flat.routes["network"].startswith("ggn, differs from the Hessian by: ")


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_gradient_of_the_penalty_equals_central_differences(mode: str) -> None:
    net = convnet("batch")
    net.train(mode == "training")
    x, y = images()
    flat = settled(net, x, y, 3, refresh_every=1000)
    state = flat.state_dict()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def q() -> float:
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
        flat.load_state_dict(state)
        net.zero_grad()
        flat.backward(x, y)
        return flat.curvature

    q()
    total = {name: p.grad.clone() for name, p in net.named_parameters()}
    flat.mu = 0.0
    net.zero_grad()
    flat.backward(x, y)
    found = {name: total[name] - p.grad for name, p in net.named_parameters()}
    flat.mu = 1.0
    size = max(gradient.norm() for gradient in found.values())
    for name, p in net.named_parameters():
        d, kept = torch.randn_like(p), p.detach().clone()

        def moved(t: float, p: Tensor = p, d: Tensor = d, kept: Tensor = kept) -> float:
            with torch.no_grad():
                p.copy_(kept + t * d)
            return q()

        want = central(moved, 2e-4)
        with torch.no_grad():
            p.copy_(kept)
        assert (found[name] * d).sum().item() == pytest.approx(want, abs=1e-6 * float(size), rel=1e-6), name


def test_v_continues_through_a_removal_and_from_its_state() -> None:
    net = convnet("batch")
    x, y = images()
    neurons, flat = hgnp.Neurons(net, x[:2]), settled(net, x, y, 5)
    before = {name: part.clone() for name, part in flat.direction.items()}
    flat.backward(x, y)
    neurons.remove({"0": [1]})  # with the grouped convolution after it
    state = flat.state_dict()
    vector = state["pairs"]["network"]["vector"]
    assert vector.numel() == sum(p.numel() for p in net.parameters())
    assert vector.norm().item() == pytest.approx(1)
    kept = [part.shape for part in before.values()]
    assert kept != [p.shape for p in net.parameters()]
    other = Flatness(net, **NETWORK)
    other.load_state_dict(state)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    seen = []
    for each in (flat, other):
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
        net.zero_grad()
        each.backward(x, y)
        each.backward(x, y)
        seen.append((each.curvature, each.radius, [p.grad.clone() for p in net.parameters()]))
    assert seen[0][:2] == seen[1][:2]
    torch.testing.assert_close(seen[0][2], seen[1][2], rtol=0, atol=0)
    scores = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat)
    plain = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat, mu=0.0)
    assert all(torch.isfinite(each).all() for each in scores.values())
    assert any(not torch.equal(scores[name], plain[name]) for name in scores)
    with pytest.raises(
        InputError, match="state must be of direction_over='network', got one of direction_over='block'"
    ):
        flat.load_state_dict(state | {"block": "0"})


def test_the_loss_to_be_differentiated_by_others_is_that_of_backward() -> None:
    x, y = images()
    found = []
    for by in ("backward", "loss"):
        net = convnet("batch")
        flat = Flatness(net, **NETWORK | {"mu": 0.1, "refresh_every": 2})
        for _ in range(4):
            net.zero_grad()
            if by == "backward":
                flat.backward(x, y)
            else:
                flat.loss(x, y).backward()
        found.append((flat.curvature, flat.radius, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "hessian"},
        {"flatness": "paper"},
        {"direction_from": "this_batch"},
        {"scaling": "scale_invariant"},
        {"kfac_approx": "expand"},
        {"fisher_type": "mc"},
        {"ranking": "empirical"},
        {"gamma_from": "penalized_loss"},
        {"loss": lambda output, target: F.cross_entropy(output, target)},
    ],
    ids=lambda given: ", ".join(given),
)
def test_choices_that_do_not_combine_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^direction_over='network' must come with \w+='\w+', got '\w+': .+$"):
        Flatness(convnet(), direction_over="network", **options)


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x)  # type: ignore[no-any-return]


def test_an_operation_that_hides_a_tangent_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    with pytest.raises(InputError, match=r"^direction_over must be 'block' for this network, .*TwiceBackward"):
        Flatness(net, **NETWORK).backward(x, y)


def test_an_overflow_of_half_precision_keeps_v() -> None:
    net = convnet("none").float()
    x, y = images()
    flat = Flatness(net, **NETWORK)
    flat.backward(x.float(), y)
    before = flat.state_dict()["pairs"]["network"]["vector"].clone()
    flat.backward(x.float(), y, scale=math.inf)
    assert torch.equal(flat.state_dict()["pairs"]["network"]["vector"], before)


def test_a_recipe_takes_it_and_refreshes_every_other_step() -> None:
    recipe = hgnp.Recipe(keep=0.5, flatness={"direction_over": "network"})
    assert recipe.resolved().refresh_every == 2
    with pytest.raises(InputError, match=r"^flatness\.direction_over='network' must come with curvature='ggn'"):
        hgnp.Recipe(keep=0.5, flatness={"flatness": "paper", "direction_over": "network"})


class Normalised(nn.Module):
    """weight_norm in plain operations: a length for each row, or for the whole weight."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def _length(self, u: Tensor) -> Tensor:
        return u.norm() if self.dim is None else u.norm(dim=1, keepdim=True)

    def forward(self, g: Tensor, u: Tensor) -> Tensor:
        return g * u / self._length(u)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._length(weight), weight


@pytest.mark.parametrize("dim", [0, None])
def test_a_weight_normalised_layer_has_the_derivatives_of_its_formula(dim: int | None) -> None:
    """PyTorch's own kernel has no forward derivative, and a wrong second one."""
    found = []
    x, y = images()
    for plain in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        if plain:
            nn.utils.parametrize.register_parametrization(net[1], "weight", Normalised(dim))
        else:
            nn.utils.parametrizations.weight_norm(net[1], dim=dim)
        with torch.no_grad():
            net[1].parametrizations.weight.original1.mul_(3.0)
        flat = settled(net, x, y, 4)
        flat.backward(x, y)
        found.append((flat.curvature, {name: p.grad.clone() for name, p in net.named_parameters()}))
    v = flat_direction(flat.direction)
    assert found[1][0] == pytest.approx((v @ dense(net, x, y) @ v).item(), rel=1e-9)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
