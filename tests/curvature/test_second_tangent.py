"""The Hessian along v by second-order tangents: against dense Hessians, finite differences and the two reverse passes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hgnp
from curvature_cases import Series, central, gradients, hessian_quotient, shaken
from hgnp.curvature.autodiff.forward import Forward, UnsupportedOperationError
from hgnp.curvature.autodiff.hessian import Hessian
from hgnp.curvature.autodiff.norms import BatchNormSecond, batch_norm
from hgnp.curvature.autodiff.passes import Passes
from hgnp.curvature.autodiff.second_tangent import SecondTangent
from hgnp.curvature.autodiff.tangent import load_jvp
from hgnp.curvature.autodiff.tape import Tape
from hgnp.curvature.factors import find_blocks
from hgnp.curvature.losses import BinaryCrossEntropy, CrossEntropy, LossCurvature, SquaredError
from hgnp.reducer import LOCAL

if torch.__version__ < "2.8":
    pytest.skip("the Hessian takes reverse passes before PyTorch 2.8", allow_module_level=True)


class Mixed(nn.Module):
    """Pooling, padding, a sum, a join, products of two tensors that depend on the first layer, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.after = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, affine=False)
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = F.max_pool2d(F.pad(self.after(self.second(x)) + x, (1, 1, 1, 1)), 2).relu_()
        y = y * self.gate(y.mean((2, 3)))[:, :, None, None] / 2
        left, right = y.flatten(2).chunk(2, 2)
        correlation = left @ left.mT
        joined = torch.cat([left.mean(2), right.sum(2) - 1, correlation.sum(1).T.T], 1)
        return self.head(F.dropout(joined, 0.5, training=False))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Linear(4, 3),
        ),
        (4,),
    ),
    "series": (Series, (4,)),
    "mixed": (Mixed, (2, 5, 5)),
}


def case(name: str, training: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = NETS[name]
    torch.manual_seed(0)
    net = shaken(make().double()).train(training)
    return net, torch.randn(6, *shape).double(), torch.arange(6) % 3


def along(net: nn.Module, layer: str) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in net.named_parameters() if name.startswith(f"{layer}.")}


def quotient(
    route: str,
    net: nn.Module,
    direction: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Any = F.cross_entropy,
    curvature: LossCurvature | None = None,
) -> Tensor:
    """q by a route, alone or beside the values of an earlier pass."""
    tangents = [(net.get_parameter(name), part) for name, part in direction.items()]
    mode = (
        Hessian(tangents, observer=None) if "reverse" in route else SecondTangent(tangents, curvature or CrossEntropy())
    )
    if "tape" in route:
        assert isinstance(mode, SecondTangent)
        tape = Tape()
        with Forward(tape=tape):
            z = net(x)
        value = loss(z, y)
        assert tape.tangent(mode, z) is not None
    else:
        with mode:
            z = net(x)
        value = loss(z, y)
    return mode.quotient(value, z, y)


LAYERS = [
    ("norms", "0"),
    ("norms", "3"),
    ("norms", "6"),
    ("series", "twice"),
    *(("mixed", each) for each in ("first", "second", "gate")),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("route", ["forward", "forward by tape"])
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_q_is_that_of_the_dense_hessian_and_its_gradient_that_of_two_reverse_passes(
    name: str, layer: str, route: str, training: bool
) -> None:
    net, x, y = case(name, training)
    direction = along(net, layer)
    found = {}
    for each in (route, "reverse"):
        own = copy.deepcopy(net)
        q = quotient(each, own, direction, x, y)
        q.backward()
        found[each] = q.detach(), gradients(own)
    torch.testing.assert_close(found[route], found["reverse"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[route][0], hessian_quotient(net, direction, x, y), rtol=1e-10, atol=1e-12)


def test_the_gradient_is_that_of_finite_differences_on_a_smooth_network() -> None:
    """Without kinks: products and norms alone."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    net = shaken(nn.Sequential(*layers).double())
    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    direction = along(net, "0")
    quotient("forward", net, direction, x, y).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        change = torch.randn_like(parameter)

        def moved(h: float, name: str = name, change: Tensor = change) -> float:
            own = copy.deepcopy(net)
            own.get_parameter(name).data.add_(change, alpha=h)
            return quotient("forward", own, direction, x, y).item()

        expected, found = central(moved, 1e-3), (parameter.grad * change).sum().item()
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize(
    ("loss", "curvature", "make"),
    [
        (F.mse_loss, SquaredError(), lambda y: F.one_hot(y, 3).double()),
        (F.binary_cross_entropy_with_logits, BinaryCrossEntropy(), lambda y: F.one_hot(y, 3).double()),
        (
            nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
            CrossEntropy(ignore_index=1, label_smoothing=0.1),
            lambda y: y,
        ),
    ],
)
def test_pytorchs_losses(loss: Any, curvature: LossCurvature, make: Callable[[Tensor], Tensor]) -> None:
    net, x, y = case("norms")
    direction = along(net, "0")
    found = quotient("forward", net, direction, x, make(y), loss, curvature)
    torch.testing.assert_close(
        found.detach(), hessian_quotient(net, direction, x, make(y), loss), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 6), (4, 3, 5, 5)])
@pytest.mark.parametrize("curved", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norms_second_derivative_and_adjoints_are_those_of_nested_forward_derivatives(
    shape: tuple[int, ...], curved: bool, affine: bool
) -> None:
    load_jvp()  # it warns the first time
    torch.manual_seed(0)
    s, ds, dds = (torch.randn(shape).double().requires_grad_() for _ in range(3))
    weights = [torch.randn(3).double().requires_grad_() for _ in range(2)] if affine else []

    def tangent(s: Tensor, ds: Tensor) -> Tensor:
        return torch.func.jvp(norm, (s,), (ds,))[1]

    def norm(s: Tensor) -> Tensor:
        return batch_norm(s, None, None, *(weights or (None, None)), True, 0.1, 0.1)

    second = dds if curved else torch.zeros_like(dds)
    expected = norm(s), tangent(s, ds), torch.func.jvp(tangent, (s, ds), (ds, second))[1]
    of = *((s, ds, dds) if curved else (s, ds)), *weights
    found = BatchNormSecond.apply(
        s, ds, dds if curved else None, *(weights or (None, None)), None, None, 0.1, 0.1, None
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangents = [torch.randn(shape).double() for _ in range(3)]
    for given in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):  # an adjoint may be missing
        chosen = [[each[number] for number in given] for each in (found, expected, cotangents)]
        of_given = of if 1 in given or 2 in given else (s, *weights)
        if curved and 2 not in given:
            of_given = tuple(each for each in of_given if each is not dds)
        ours, theirs = (
            torch.autograd.grad(
                outputs, of_given, chosen[2], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for outputs in chosen[:2]
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_channel_that_varies_by_less_than_its_precision_has_no_second_derivative() -> None:
    torch.manual_seed(0)
    s = torch.stack([500 + 0.1 * torch.randn(64), torch.randn(64)], 1).bfloat16()
    ds, dds = torch.randn(64, 2).bfloat16(), torch.randn(64, 2).bfloat16()
    _, tangent, second = BatchNormSecond.apply(s, ds, dds, None, None, None, None, 0.1, 1e-5, None)
    assert not tangent[:, 0].any()
    assert not second[:, 0].any()
    assert second[:, 1].all()


@pytest.mark.parametrize(("offset", "deviation", "tolerance"), [(300.3, 1.0, 1e-5), (3.3, 0.0, 1e-3)])
def test_a_rounded_mean_leaves_nothing_in_the_second_derivative(
    offset: float, deviation: float, tolerance: float
) -> None:
    """PyTorch's sum over channels that come last is rounded the most. A channel that is constant has the largest inv."""
    torch.manual_seed(0)
    s = (offset + deviation * torch.randn(16, 2, 9, 9)).contiguous(memory_format=torch.channels_last)
    ds, dds = torch.randn_like(s), torch.randn_like(s)
    found, exact = (
        BatchNormSecond.apply(s.to(kind), ds.to(kind), dds.to(kind), None, None, None, None, 0.1, 1e-5, None)[2]
        for kind in (torch.float, torch.double)
    )
    assert (found - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.LayerNorm(5), nn.Dropout(inplace=True)])
def test_what_has_no_rule_is_refused(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)).double()
    with pytest.raises(UnsupportedOperationError, match="must have second derivatives along v that hgnp knows, got"):
        quotient("forward", net, along(net, "0"), torch.randn(6, 4).double(), torch.arange(6) % 3)


def routes_taken(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    taken: list[type] = []
    for kind in (Hessian, SecondTangent):

        def quotient(self: Any, *args: Any, own: Any = kind.quotient) -> Tensor:
            taken.append(type(self))
            result: Tensor = own(self, *args)
            return result

        monkeypatch.setattr(kind, "quotient", quotient)
    return taken


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("options", [{"flatness": "paper"}, {"curvature": "hessian"}])
@pytest.mark.parametrize(
    ("activation", "loss", "expected"),
    [
        (nn.ReLU, F.cross_entropy, SecondTangent),
        (nn.Tanh, F.cross_entropy, Hessian),
        (nn.ReLU, own_loss, Hessian),  # one's own loss may depend on the network by itself
    ],
)
def test_flatness_takes_second_order_tangents_where_it_can(
    activation: type[nn.Module], loss: Any, expected: type, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), activation(), nn.Linear(5, 3)).double()
    flat = hgnp.Flatness(net, loss=loss, mu=0.1, bound=-10.0, **options)
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    flat.backward(x, y)
    flat.load_state_dict(flat.state_dict() | {"block": "0"})
    tracked = net[1]
    assert isinstance(tracked, nn.BatchNorm1d)
    assert tracked.num_batches_tracked is not None
    steps = int(tracked.num_batches_tracked)
    taken = routes_taken(monkeypatch)
    flat.backward(x, y)
    assert set(taken) == {expected}
    assert int(tracked.num_batches_tracked) == steps + 1  # the trial of a block leaves buffers alone


class Written(nn.Module):
    """Runs `code` between two layers, of which the first is the only block."""

    def __init__(self, code: Callable[["Written", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.code = nn.Linear(4, 6), nn.Linear(6, 3).requires_grad_(False), code
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(self.code(self, x))  # type: ignore[no-any-return]


def hooked(net: Written, x: Tensor) -> Tensor:
    h = net.a(x)
    h.register_hook(lambda g: g * 0.5)
    return h * h  # type: ignore[no-any-return]


CODE: dict[str, Callable[[Written, Tensor], Tensor]] = {
    "weight of a norm": lambda net, x: F.batch_norm(
        net.a(x).relu(), torch.zeros(6).double(), torch.ones(6).double(), net.a.weight.sum(1)
    ),
    "detach_": lambda net, x: (net.a(x) * 1).detach_() * net.a(x),
    "hook": hooked,
    "view(dtype)": lambda net, x: net.a(x).view(torch.float64) + net.a(x) * net.a(x),
    "checkpoint": lambda net, x: checkpoint(lambda h: h.relu() * h, net.a(x), use_reentrant=False),
    "view of an expanded tangent": lambda net, x: (net.a(x).mean(1, keepdim=True) + torch.ones(6)).view(-1).view(-1, 6),
    "view of a transposed tangent": lambda net, x: (torch.ones(9, 6) + net.a(x).T.contiguous().T).view(-1).view(-1, 6),
    "another path": lambda net, x: net.a(x).tanh() if net.calls > 6 else net.a(x).relu(),
}


@pytest.mark.parametrize("options", [{"flatness": "paper"}, {"curvature": "hessian"}])
@pytest.mark.parametrize("code", CODE)
def test_every_step_has_the_q_and_gradient_of_reverse_passes(
    code: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    found = []
    for forward in (True, False):
        net = Written(CODE[code]).double()
        flat = hgnp.Flatness(net, mu=1.0, bound=-100.0, **options)
        if not forward:
            monkeypatch.setattr(Passes, "has_second_tangents", lambda *_: False)
        steps = []
        for _ in range(3):
            net.zero_grad()
            net.calls = 4 + len(steps) * 4 if code == "another path" else 0  # the last step takes it
            loss = flat.backward(x, y)
            steps.append((loss, flat.curvature, flat.radius, gradients(net)))
        found.append(steps)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_batch_on_another_path_updates_statistics_once_and_keeps_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.norm, self.c, self.smooth = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), False
            self.c.requires_grad_(False)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1  # assigned, not changed in place
            x = self.norm(self.a(x))
            return self.c(x.tanh() if self.smooth else x.relu())  # type: ignore[no-any-return]

    x, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    found = []
    for forward in (True, False):
        net = Net().double()
        flat = hgnp.Flatness(net, mu=1.0, bound=-100.0, curvature="hessian")
        if not forward:
            monkeypatch.setattr(Passes, "has_second_tangents", lambda *_: False)
        flat.backward(x, y)
        net.smooth = True
        net.zero_grad()
        flat.backward(x, y)  # refreshes v from what it collects
        found.append((flat.curvature, flat.direction, gradients(net), dict(net.named_buffers())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_the_losss_weights_are_those_of_the_step() -> None:
    net, x, y = case("norms")
    direction, loss = along(net, "0"), nn.CrossEntropyLoss(weight=torch.ones(3).double())
    passes = Passes(net, loss, None, gauss_newton=False, reducer=LOCAL)
    block = next(each for each in find_blocks(net) if each.name == "0")
    tangents = [(net.get_parameter(name), part) for name, part in direction.items()]
    for weight in ([1.0, 1.0, 1.0], [5.0, 1.0, 0.1]):
        loss.weight = torch.tensor(weight).double()
        q = passes.with_curvature(block, tangents, x, y, None).q
        assert q is not None
        torch.testing.assert_close(q.detach(), hessian_quotient(net, direction, x, y, loss), rtol=1e-10, atol=1e-12)


def test_max_pooling_of_a_tensor_without_samples_beside_an_earlier_pass() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Conv1d(2, 4, 3, padding=1), nn.Linear(8, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.max_pool2d(self.a(x), (2, 2)).flatten(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(5, 2, 8).double(), torch.arange(5) % 3
    flat = {}
    for curvature in ("ggn", "hessian"):
        flat[curvature] = hgnp.Flatness(copy.deepcopy(net), mu=0.1, bound=-10.0, flatness="paper", curvature=curvature)
        flat[curvature].backward(x, y)
    assert flat["ggn"].curvature == pytest.approx(flat["hessian"].curvature, rel=1e-10)  # piecewise linear


@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_an_input_far_from_zero_costs_no_more_digits_than_reverse_passes(offset: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y, direction = offset + torch.randn(64, 4).double(), torch.arange(64) % 3, along(net, "0")
    found = {}
    for route in ("forward", "reverse"):
        for kind in (torch.double, torch.float):
            own = copy.deepcopy(net).to(kind)
            q = quotient(route, own, {name: each.to(kind) for name, each in direction.items()}, x.to(kind), y)
            q.backward()
            found[route, kind] = torch.cat([grad.double().flatten() for grad in gradients(own).values()])
    errors = {
        route: (found[route, torch.float] - found[route, torch.double]).norm() / found[route, torch.double].norm()
        for route in ("forward", "reverse")
    }
    assert errors["forward"] < 20 * errors["reverse"] + 1e-5
