"""`Flatness.loss` is the loss whose gradient `Flatness.backward` leaves, for a trainer that calls backward itself."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature_cases import central, convnet, ggn_quotient, gradients, hessian_quotient, images
from hgnp import Flatness, Neurons

QUOTIENTS = {"ggn": ggn_quotient, "hessian": hessian_quotient}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "refresh_every": {"refresh_every": 3},
    "skip_inactive": {"refresh_every": 3, "skip_inactive": True, "bound": 1e6},
    "inactive": {"bound": 1e6},
    "hessian": {"curvature": "hessian"},
    "mc": {"fisher_type": "mc"},
    "penalized_loss": {"gamma_from": "penalized_loss"},
    "penalized_loss, hessian": {"gamma_from": "penalized_loss", "curvature": "hessian"},
    "penalized_loss, inactive": {"gamma_from": "penalized_loss", "bound": 1e6},
    "empirical": {"ranking": "empirical"},
    "expand, scale invariant": {"kfac_approx": "expand", "scaling": "scale_invariant"},
    "mu=0": {"mu": 0.0},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    n = 5 + step % 3
    return torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (n,))


def by_backward(flat: Flatness, x: Tensor, y: Tensor) -> Tensor:
    return flat.backward(x, y)


def by_loss(flat: Flatness, x: Tensor, y: Tensor) -> Tensor:
    loss = flat.loss(x, y)
    loss.backward()
    return loss.detach()


def trained(given: dict[str, Any], way: Any, steps: int = 7) -> list[Any]:
    """What each step leaves: gradient, buffers, C or L, what was penalised, the eigenpairs, and the next random number."""
    net = convnet("batch", dropout=0.3)
    flat = Flatness(net, **({"mu": 0.2, "bound": -1.0} | given))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    left = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        value = way(flat, x, y)
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        found = {"block": flat.block, "curvature": flat.curvature, "radius": flat.radius, "C": value.item()}
        left.append((gradients(net), buffers, found, flat.state_dict(), torch.rand(1)))
        optimizer.step()
    return left


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_that_of_backward(case: str) -> None:
    given = {"mu": 0.2, "bound": -1.0} | CASES[case]
    expected, found = trained(given, by_backward), trained(given, by_loss)
    for want, have in zip(expected, found, strict=True):
        torch.testing.assert_close(have[0], want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(have[1], want[1], rtol=1e-12, atol=1e-12)
        numbers, others = have[2], want[2]
        penalty = 0.0 if numbers["block"] is None else given["mu"] * max(0.0, numbers["curvature"] - given["bound"])
        others["C"] += penalty
        assert numbers.pop("block") == others.pop("block")
        assert numbers == pytest.approx(others, rel=1e-11, nan_ok=True)
        torch.testing.assert_close(have[3]["pairs"], want[3]["pairs"], rtol=1e-9, atol=1e-11)
        for key in ("block", "age", "skipping"):
            assert have[3][key] == want[3][key]
        if want[3]["generator"] is not None:
            assert torch.equal(have[3]["generator"], want[3]["generator"])
        assert torch.equal(have[4], want[4])
    if case == "skip_inactive":
        assert any(step[3]["skipping"] for step in found)
    if case == "refresh_every":
        assert [step[3]["age"] for step in found] == [1, 2, 0, 1, 2, 0, 1]


def test_gamma_of_the_penalised_loss_is_not_that_of_the_loss() -> None:
    """Or the cases above would not tell the two apart."""
    radii = []
    for gamma_from in ("loss", "penalized_loss"):
        *_, last = trained({"gamma_from": gamma_from, "mu": 0.5}, by_loss, steps=2)
        radii.append(last[2]["radius"])
    assert abs(radii[1] / radii[0] - 1) > 0.01


@pytest.mark.parametrize("bound", [-1.0, 1e-3, 1e6])
@pytest.mark.parametrize("curvature", QUOTIENTS)
def test_value_and_gradient_are_those_of_the_dense_quotient_along_a_fixed_v(curvature: str, bound: float) -> None:
    net, (x, y), mu = convnet("batch"), images(6), 0.5
    flat = Flatness(net, mu=mu, bound=bound, curvature=curvature)
    flat.loss(*images(5))  # which leaves v
    net.zero_grad()
    loss = flat.loss(x, y)
    loss.backward()
    direction = flat.direction
    other = copy.deepcopy(net)
    where = {name: p.detach().clone() for name, p in other.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in where.items()}

    def value(h: float) -> float:
        with torch.no_grad():
            for name, p in other.named_parameters():
                p.copy_(where[name] + h * along[name])
        q = float(QUOTIENTS[curvature](other, direction, x, y))
        return F.cross_entropy(other(x), y).item() + mu * max(0.0, q - bound)

    assert loss.item() == pytest.approx(value(0.0), rel=1e-10)
    slope = sum(float((g * along[name]).sum()) for name, g in gradients(net).items())
    assert slope == pytest.approx(central(value, 1e-3), rel=1e-6)


@pytest.mark.parametrize("given", [{}, {"fisher_type": "mc"}, {"gamma_from": "penalized_loss"}], ids=str)
def test_v_does_not_depend_on_what_becomes_of_the_loss(given: dict[str, str]) -> None:
    """Scaled as by a GradScaler, divided for accumulation, differentiated twice or not at all."""

    def scaled(flat: Flatness, x: Tensor, y: Tensor) -> Tensor:
        (flat.loss(x, y) * 65536.0).backward()
        return torch.zeros(())

    def twice(flat: Flatness, x: Tensor, y: Tensor) -> Tensor:
        loss = flat.loss(x, y)
        loss.backward(retain_graph=True)
        loss.backward()
        return torch.zeros(())

    def never(flat: Flatness, x: Tensor, y: Tensor) -> Tensor:
        flat.loss(x, y)
        return torch.zeros(())

    expected, factors = None, {by_loss: 1.0, scaled: 65536.0, twice: 2.0, never: None}
    for way, factor in factors.items():
        net = convnet("batch")
        flat = Flatness(net, mu=0.2, bound=-1.0, **given)  # type: ignore[arg-type]
        for step in range(3):
            net.zero_grad()
            way(flat, *batch(step))
        pairs, grads = flat.state_dict()["pairs"], gradients(net)
        expected = (pairs, grads) if expected is None else expected
        torch.testing.assert_close(pairs, expected[0], rtol=0, atol=0)
        if factor is None:
            assert grads == {}
        else:
            want = {name: factor * g for name, g in expected[1].items()}
            torch.testing.assert_close(grads, want, rtol=1e-12, atol=1e-12 * factor)


def test_a_gradient_scaler_trains_with_it() -> None:
    """The scaler's own calls, in half precision."""
    torch.manual_seed(0)
    net = convnet("batch").float()
    flat, optimizer = Flatness(net, mu=0.01, bound=-1.0), torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x, y = images(8)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = flat.loss(x.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(loss.item())
    assert values[-1] < 0.8 * values[0]


def test_neurons_can_be_removed_between_steps() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, y = torch.randn(16, 6).double(), torch.randint(3, (16,))
    neurons, flat = Neurons(net, x), Flatness(net, bound=-1.0)
    for _ in range(2):
        flat.loss(x, y).backward()
    neurons.remove({"0": [1, 5], "2": [0]})
    net.zero_grad()
    flat.loss(x, y).backward()
    assert flat.curvature > 0
    assert {name: p.grad.shape for name, p in net.named_parameters() if p.grad is not None} == {
        name: p.shape for name, p in net.named_parameters()
    }


def test_a_batch_is_released_with_its_loss() -> None:
    net = convnet()
    flat = Flatness(net, bound=-1.0, ranking="empirical")
    x, y = images()
    seen = weakref.ref(x)
    loss = flat.loss(x, y)
    loss.backward()
    del x, loss
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("given", [{"direction_from": "this_batch"}, {"flatness": "paper"}], ids=str)
def test_the_papers_order_has_no_such_loss(given: dict[str, str]) -> None:
    net, (x, y) = convnet(), images()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"must be 'last_batch' for loss\(\), got 'this_batch'; call backward\(inputs"):
        Flatness(net, **given).loss(x, y)  # type: ignore[arg-type]
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("mu", [0.0, 0.1])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_says_so(off: Any, mu: float) -> None:
    with off(), pytest.raises(ValueError, match=r"gradients must be enabled, got torch.no_grad\(\)"):
        Flatness(convnet(), mu=mu).loss(*images())


def test_an_empty_batch_is_refused() -> None:
    x, y = images()
    with pytest.raises(ValueError, match="inputs must hold at least one sample, got an empty batch"):
        Flatness(convnet()).loss(x[:0], y[:0])


def test_a_scale_protects_gamma_from_underflow_and_leaves_the_loss_alone() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(512, 4), torch.arange(512) % 3
    found = {}
    for how in ("float32", "float16", "scaled"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        with torch.no_grad():
            net[4].weight.mul_(1e-4)
        net[4].requires_grad_(False)
        flat = Flatness(net, mu=1.0, bound=-1.0)
        for _ in range(3):
            with torch.autocast("cpu", torch.float16, enabled=how != "float32"):
                loss = flat.loss(x, y, scale=2.0**16 if how == "scaled" else 1.0)
        found[how] = flat.radius, float(loss.detach())
    assert found["scaled"][0] == pytest.approx(found["float32"][0], rel=0.02)
    assert found["float16"][0] < 0.5 * found["float32"][0]
    assert found["scaled"][1] == pytest.approx(found["float32"][1], rel=0.01)
