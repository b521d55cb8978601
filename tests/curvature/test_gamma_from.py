"""Γ from the penalised loss: g_l = ∂L/∂s_l, the paper's letter, along the v of the batch before."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from curvature_cases import convnet, images

LAYERS = ("0", "2", "4")


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches(samples: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 3, generator=draw).double(), torch.randint(3, (samples,), generator=draw))
        for _ in range(2)
    ]


def forward(parameters: dict[str, Tensor], x: Tensor, shifts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, with `shifts` added to the layers' outputs s_l, and the layers' inputs."""
    read = {}
    for name in LAYERS:
        read[name] = x
        s = x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"] + shifts[name]
        x = s if name == LAYERS[-1] else torch.tanh(s)
    return x, read


def dense(
    net: nn.Module, v: dict[str, Tensor], x: Tensor, y: Tensor, *, mu: float, curvature: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Ψ and Γ of each layer, Γ from the derivatives of C + μ·q by shifts of s_l; v is held fixed."""
    parameters = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}
    shifts = {
        name: torch.zeros(len(x), len(parameters[f"{name}.bias"]), dtype=x.dtype, requires_grad=True) for name in LAYERS
    }

    def slope(output: Tensor) -> Tensor:
        """The derivative of a number along v, to be differentiated."""
        return sum(
            (g * v[name]).sum() for name, g in zip(v, grad(output, [parameters[name] for name in v]), strict=True)
        )  # type: ignore[return-value]

    def grad(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, inputs, create_graph=True)

    z, read = forward(parameters, x, shifts)
    loss = F.cross_entropy(z, y)
    if curvature == "ggn":
        cotangent = torch.zeros_like(z, requires_grad=True)
        (u,) = grad(slope((z * cotangent).sum()), [cotangent])
        p = z.softmax(1)
        q = ((p * u * u).sum(1) - (p * u).sum(1) ** 2).mean()
    else:
        q = slope(slope(loss))
    gradients = torch.autograd.grad(loss + mu * q, list(shifts.values()))
    factors = {}
    for (name, a), g in zip(read.items(), gradients, strict=True):
        a, g = torch.cat([a.detach(), torch.ones(len(x), 1, dtype=x.dtype)], 1), len(x) * g
        factors[name] = a.T @ a / len(x), g.T @ g / len(x)
    return factors


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_next_direction_is_that_of_dense_factors_of_the_penalised_loss(
    curvature: str, samples: int, scale: float
) -> None:
    net, (first, second), mu = made(), batches(samples), 0.5
    flat = hgnp.Flatness(net, mu=mu, bound=-10.0, curvature=curvature, gamma_from="penalized_loss")
    flat.backward(*first, scale=scale)
    factors = dense(net, flat.direction, *first, mu=mu, curvature=curvature)
    plain = dense(net, flat.direction, *first, mu=0.0, curvature=curvature)
    flat.backward(*second)
    assert flat.block is not None
    tops = {name: [torch.linalg.eigh(factor) for factor in both] for name, both in factors.items()}
    radii = {name: float(psi[0][-1] * gamma[0][-1]) for name, (psi, gamma) in tops.items()}
    assert flat.block == max(radii, key=lambda name: radii[name])
    exact = 1e-9 if samples == 1 else 1e-4  # of one sample factors have rank one, and a single power is enough
    assert flat.radius == pytest.approx(radii[flat.block], rel=exact)
    psi, gamma = (vectors[:, -1] for _, vectors in tops[flat.block])
    found = flat.direction
    both = torch.cat([found[f"{flat.block}.weight"], found[f"{flat.block}.bias"].unsqueeze(1)], 1)
    assert abs(float(gamma @ both @ psi)) == pytest.approx(1.0, rel=exact)
    without = float(torch.linalg.eigvalsh(plain[flat.block][0])[-1] * torch.linalg.eigvalsh(plain[flat.block][1])[-1])
    assert abs(radii[flat.block] / without - 1) > 0.01  # the penalty is seen in Γ


@pytest.mark.parametrize("by", ["backward", "loss"])
def test_gamma_has_mu_itself_where_the_penalty_is_in_one_of_several_steps(by: str) -> None:
    """The step's own penalty is weighted by penalty_every·μ."""
    radii, mu = [], 0.5
    for every in (1, 4):
        net, (first, second) = made(), batches(6)
        flat = hgnp.Flatness(net, mu=mu, bound=-10.0, gamma_from="penalized_loss", penalty_every=every)
        for batch in (first, *[first] * (every - 1), second):
            if by == "backward":
                flat.backward(*batch)
            else:
                flat.loss(*batch).backward()
        radii.append((flat.block, flat.radius))
    assert radii[1] == (radii[0][0], pytest.approx(radii[0][1], rel=1e-10))


def test_without_an_active_penalty_gamma_is_that_of_the_loss() -> None:
    found = []
    for gamma_from in ("loss", "penalized_loss"):
        flat = hgnp.Flatness(convnet("batch"), bound=1e9, gamma_from=gamma_from)
        for _ in range(3):
            flat.backward(*images(6))
        found.append((flat.block, flat.radius, flat.curvature))
    assert found[0] == found[1]


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_gradients_along_the_same_direction_do_not_depend_on_where_gamma_comes_from(curvature: str, norm: str) -> None:
    grads = []
    for gamma_from in ("loss", "penalized_loss"):
        net = convnet(norm)
        hgnp.Flatness(net, mu=0.1, bound=-10.0, curvature=curvature, gamma_from=gamma_from).backward(*images(6))
        grads.append([p.grad for p in net.parameters()])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"direction_from": "this_batch"}, "direction_from='last_batch', got 'this_batch': v would need Γ of L"),
        ({"flatness": "paper"}, "direction_from='last_batch', got 'this_batch': v would need Γ of L"),
        ({"fisher_type": "mc"}, "fisher_type='empirical', got 'mc': labels are drawn for C alone"),
    ],
)
def test_what_is_circular_or_undefined_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hgnp.Flatness(made(), gamma_from="penalized_loss", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma_from"):
        hgnp.Recipe(keep=0.5, flatness={"gamma_from": "penalized_loss", **given})
