"""Tangents that an operation hides are told from tangents that are zero up to rounding, whatever their size and precision."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES
from curvature_cases import begin_step, ggn_quotient, gradients, hessian_quotient
from hgnp import Flatness, Neurons, sensitivity
from hgnp.curvature.autodiff.linearity import Linearity
from hgnp.curvature.factors import find_blocks
from hgnp.flatness import step_and_state

PRECISIONS = ("float64", "float32", "bfloat16")


@contextlib.contextmanager
def running(precision: str) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        yield


def at(flat: Flatness, block: str) -> Flatness:
    """The next step penalises this block."""
    flat.load_state_dict(flat.state_dict() | {"block": block})
    return flat


def linear(inputs: Callable[[], Tensor]) -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Linear(12, 10),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )
    return net, inputs()


def conv() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return net, torch.rand(16, 3, 8, 8) / 255


HEALTHY = {
    "small inputs": lambda: linear(lambda: 1e-2 * torch.randn(32, 12)),
    "far from zero": lambda: linear(lambda: 500 + torch.randn(32, 12)),
    "constant samples": lambda: linear(lambda: torch.randn(1, 12).expand(32, 12).clone()),
    "zeros": lambda: linear(lambda: torch.zeros(32, 12)),
    "pictures divided twice": conv,
}


@pytest.mark.parametrize("options", [{}, {"direction_from": "this_batch"}, {"kfac_approx": "expand"}], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_tangent_that_norms_cancel_is_not_taken_for_a_lost_one(kind: str, precision: str, options: Any) -> None:
    """v is nearly a shift of what goes into a norm: the output's tangent is rounding error, and nothing is wrong."""
    for seed in range(3):
        torch.manual_seed(seed)
        net, x = HEALTHY[kind]()
        net, x = (net.double(), x.double()) if precision == "float64" else (net, x)
        y = torch.randint(0, 4, (len(x),))
        flat = Flatness(net, bound=-1.0, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for block in ("0", "3", "0"):
            with running(precision):  # a warning is an error in these tests
                flat.backward(x, y)
                at(flat, block).backward(x, y)
            optimizer.step()
            optimizer.zero_grad()
        assert flat.curvature == flat.curvature
        assert all(not route.startswith("hessian") for route in flat.routes.values())


@pytest.mark.parametrize("seed", range(3))
def test_training_in_bfloat16_far_from_zero_does_not_diverge(seed: int) -> None:
    """A channel that varies by less than the spacing of its numbers would have a tangent of rounding error times 1/√ε."""
    torch.manual_seed(seed)
    net, x = HEALTHY["far from zero"]()
    y = torch.randint(0, 4, (len(x),))
    flat = Flatness(net, bound=-1.0, mu=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        with running("bfloat16"):
            loss = flat.backward(x, y)
        assert loss < 3
        optimizer.step()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_operation_of_the_zoo_hides_a_tangent(name: str, training: bool) -> None:
    case = CASES[name]
    net = case.net().train(training)
    args, kwargs = case.inputs()
    with Linearity(find_blocks(net)) as mode:
        z = net(*args, **kwargs)
    mode.end(z)
    assert mode.lost == {}


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.by, None


class Hidden(nn.Module):
    """x·by out of sight, alone or added to x."""

    def __init__(self, by: float, *, beside: bool = False, only: str = "") -> None:
        super().__init__()
        self.by, self.beside, self.only = by, beside, only

    def forward(self, x: Tensor) -> Tensor:
        if self.only == ("evaluation" if self.training else "training"):
            return x
        y = Times.apply(x, self.by)
        return x + y if self.beside else y


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.function = torch.jit.script(doubled)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def doubled(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def net_with(hidden: nn.Module, norms: str) -> nn.Module:
    before = [nn.BatchNorm1d(5)] if "before" in norms else []
    after = [nn.BatchNorm1d(5)] if "after" in norms else []
    return nn.Sequential(nn.Linear(4, 5), *before, hidden, *after, nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("norms", ["", "before", "after", "before and after"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("by", [1e-8, 1e-3, 1.0, 1e4])
def test_a_hidden_operation_is_named_and_its_block_takes_the_hessian(
    by: float, beside: bool, norms: str, precision: str
) -> None:
    torch.manual_seed(0)
    net = net_with(Hidden(by, beside=beside), norms)
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    net, x = (net.double(), x.double()) if precision == "float64" else (net, x)
    other = Flatness(net, bound=-1.0, curvature="hessian")
    flat = Flatness(net, bound=-1.0)
    with running(precision):
        other.backward(x, y)
        at(other, "0").backward(x, y)
        begin_step(flat, x, y)
        with pytest.warns(UserWarning, match=r"layer '0': Gauss–Newton cannot follow TimesBackward"):
            at(flat, "0").backward(x, y)
    assert flat.curvature == pytest.approx(other.curvature, rel=1e-6 if precision == "float64" else 0.1, abs=1e-6)
    assert flat.routes["0"] == "hessian, as Gauss–Newton cannot follow TimesBackward"
    last = find_blocks(net)[-1].name
    assert not flat.routes[last].startswith("hessian")
    at(flat, last).backward(x, y)  # nothing is after it


def test_scripted_code_is_noticed_too() -> None:
    net = net_with(Scripted(), "before").double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    flat = Flatness(net, bound=-1.0)
    begin_step(flat, x, y)
    with pytest.warns(UserWarning, match=r"layer '0': Gauss–Newton cannot follow \w+"):
        at(flat, "0").backward(x, y)


class Parts(nn.Module):
    """FNet's mixing layer, in several spellings."""

    def __init__(self, spelling: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.spelling = nn.Linear(4, 5), nn.Linear(5, 3), spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spelling(self.first(x)))


def assigned(x: Tensor) -> Tensor:
    y = torch.zeros_like(x, dtype=torch.complex128)
    y.real = x  # y is no tensor that depends on the layer until now
    return y.real * 2


@pytest.mark.parametrize("options", [{}, {"direction_over": "network"}], ids=str)
@pytest.mark.parametrize("part", ["real", "imag"])
def test_the_parts_of_a_transform_have_the_derivative_of_the_functions_that_take_them(part: str, options: Any) -> None:
    """torch.view_as_real is a function of PyTorch, .real an attribute."""
    torch.manual_seed(0)
    net = Parts(lambda x: getattr(torch.fft.fft(x), part)).double()
    plain = Parts(lambda x: torch.view_as_real(torch.fft.fft(x))[..., 0 if part == "real" else 1]).double()
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    flats = Flatness(net, mu=0.3, bound=-1.0, **options), Flatness(plain, mu=0.3, bound=-1.0, **options)
    for flat in flats:
        flat.backward(x, y)
        flat.net.zero_grad()
        (flat if options else at(flat, "first")).backward(x, y)
    assert flats[0].curvature == pytest.approx(ggn_quotient(plain, flats[0].direction, x, y).item(), rel=1e-9)
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-9, atol=1e-12)


def test_a_part_that_is_assigned_is_noticed_as_lost() -> None:
    torch.manual_seed(0)
    net = Parts(assigned).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    flat = Flatness(net, bound=-1.0)
    begin_step(flat, x, y)
    with pytest.warns(UserWarning, match=r"layer 'first': Gauss–Newton cannot follow \w+"):
        at(flat, "first").backward(x, y)
    assert flat.curvature == pytest.approx(hessian_quotient(net, flat.direction, x, y).item(), rel=1e-9)


@pytest.mark.parametrize("read", [lambda x: x.data, lambda x: x.grad_fn and x.detach()], ids=["data", "detach"])
def test_data_of_a_tensor_depends_on_nothing(read: Callable[[Tensor], Tensor]) -> None:
    net = Parts(lambda x: read(x) * x)
    with Linearity(find_blocks(net)) as mode:
        z = net(torch.randn(6, 4))
    assert mode.end(z) == {"first": None, "last": None}  # a product of a constant and x
    assert mode.lost == {}


def test_a_block_that_is_first_penalised_late_warns_once_and_the_run_continues() -> None:
    torch.manual_seed(0)
    net = net_with(Hidden(2.0), "after").double()
    flat = Flatness(net, bound=-1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
            if step:
                at(flat, "0" if step > 2 else "4")
            optimizer.zero_grad()
            flat.backward(x, y)
            optimizer.step()
    assert [str(each.message)[:9] for each in told] == ["layer '0'"]


def test_scores_inspect_the_network_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    net = net_with(Hidden(1.0, only="evaluation"), "").double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    with torch.no_grad():
        net[0].weight.mul_(1e-2)
        net[-1].weight.mul_(1e2)
    flat = Flatness(net, bound=-1.0)
    flat.backward(x, y)
    assert not any(route.startswith("hessian") for route in flat.routes.values())
    step, state = step_and_state(flat)
    v = state.direction.along(find_blocks(net)[0], state.direction.pairs["0"].state())
    net.eval()
    with pytest.warns(UserWarning, match=r"layer '0': Gauss–Newton cannot follow TimesBackward"):
        step.objective(state, x, y, mu=flat.mu, direction=v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sensitivity(net, Neurons(net, x), [(x, y)], flatness=flat)


class Catches(nn.Module):
    """Catches whatever its norm raises, and does without it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, norm = self.first(x), self.norm
        with contextlib.suppress(Exception):
            h = torch.batch_norm(h, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False)
        return self.last(h)


def test_an_unsupported_operation_is_refused_even_if_the_network_catches_errors() -> None:
    net = Catches()
    with pytest.raises(ValueError, match=r"must call norms by torch.nn.functional, got torch.*batch_norm"):
        Flatness(net, mu=1.0).backward(torch.randn(16, 6), torch.arange(16) % 4)


TRANSFORMS = {
    "rfft and irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * torch.tensor([1, 2j, 3]), n=5),
    "fft2 and views": lambda x: torch.view_as_real(torch.fft.fft2(x).conj().resolve_conj()).sum(-1),
    "hfft": lambda x: torch.fft.hfft(torch.fft.ihfft(x), n=5) + torch.fft.fftshift(x),
}


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_fourier_transforms_are_linear(transform: Any, curvature: Any) -> None:
    torch.manual_seed(0)
    net = Parts(transform).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    flat = Flatness(net, bound=-1.0, curvature=curvature)
    flat.backward(x, y)
    at(flat, "first").backward(x, y)
    assert flat.routes == {"first": "exact", "last": "exact"}
    assert flat.curvature == pytest.approx(ggn_quotient(net, flat.direction, x, y).item(), rel=1e-9)
    assert flat.curvature == pytest.approx(hessian_quotient(net, flat.direction, x, y).item(), rel=1e-9)
