"""A derivative that PyTorch does not have is refused by name. These tests fail if PyTorch changes how it says so."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import hgnp
from hgnp.flatness import step_and_state


class Second(torch.autograd.Function):
    """cos(x). Its derivative is zeta(x + 3, 1), which PyTorch cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.special.zeta(x + 3, torch.ones_like(x))


class First(torch.autograd.Function):
    """sin(x), twice differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * Second.apply(x)


class Once(First):
    """sin(x), with a derivative that is a constant to PyTorch."""

    backward = staticmethod(once_differentiable(First.backward))


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = First) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x))


def test_a_third_derivative_that_pytorch_lacks_is_refused_by_name() -> None:
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.rand(6, 4).double(), torch.arange(6) % 3
    flat = hgnp.Flatness(net, mu=1.0, bound=-1e6, flatness="paper")
    with pytest.raises(hgnp.HgnpError, match=r"differentiate twice more, got: .*zeta.* is not implemented"):
        flat.backward(x, y)


@pytest.mark.parametrize("options", [{}, {"flatness": "paper"}, {"curvature": "hessian"}], ids=str)
def test_a_function_marked_once_differentiable_is_refused_before_the_first_step(options: Any) -> None:
    """Its curvature would be zero in silence."""
    net, x, y = Net(Once), torch.rand(6, 4), torch.arange(6) % 3
    flat = hgnp.Flatness(net, bound=-1.0, **options)
    with pytest.raises(hgnp.HgnpError, match=r"layer 'layer': OnceBackward after it must have a second derivative"):
        flat.backward(x, y)
    assert all(p.grad is None for p in net.parameters())


def test_sharpness_refuses_a_function_marked_once_differentiable() -> None:
    with pytest.raises(hgnp.HgnpError, match=r"must be twice differentiable, got an autograd.Function marked"):
        hgnp.sharpness(Net(Once), [(torch.rand(6, 4), torch.arange(6) % 3)])


@pytest.mark.parametrize("operation", ["pdist", "segment_reduce"])
def test_pytorch_says_of_a_missing_derivative_that_it_is_not_implemented(operation: str) -> None:
    """One lacks a formula, the other is not differentiable as a whole: PyTorch raises two kinds of errors."""
    x = torch.rand(3, 2, dtype=torch.double, requires_grad=True)
    out = F.pdist(x) if operation == "pdist" else torch.segment_reduce(x, "sum", lengths=torch.tensor([3]))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        grad.sum().backward()


class Prototypes(nn.Module):
    """Distances to prototypes. torch.cdist can be differentiated once for so few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.prototypes = nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.features(x), self.prototypes)


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conv(x)).mT).transpose(0, 1).log_softmax(-1)  # (positions, samples, letters)


def ctc(output: Tensor, target: Tensor) -> Tensor:
    lengths = [torch.full((output.shape[1],), n) for n in (output.shape[0], target.shape[1])]
    return F.ctc_loss(output, target, *lengths)


class Checkpointed(nn.Module):
    """The middle layer runs again in the backward pass."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(checkpoint(lambda h: torch.tanh(self.b(h)), h, use_reentrant=self.reentrant))


X, Y = torch.rand(6, 4), torch.arange(6) % 3
SEQUENCES, WORDS = torch.rand(6, 4, 9), torch.randint(1, 5, (6, 2))
TWICE_MORE = r"^net and loss must have .* differentiate twice more, got: .*{}.* is not implemented; use mu=0"
REFUSED: dict[str, Any] = {
    "distances, hessian": (Prototypes, X, Y, {"curvature": "hessian"}, TWICE_MORE.format("cdist")),
    "distances, paper": (Prototypes, X, Y, {"flatness": "paper"}, TWICE_MORE.format("cdist")),
    "distances, ggn": (
        Prototypes, X, Y, {}, r"got cdist, which has no forward derivative in PyTorch; nor has it what .* so use mu=0"
    ),
    "CTC": (Letters, SEQUENCES, WORDS, {"loss": ctc}, TWICE_MORE.format("ctc_loss")),
    "CTC, paper": (Letters, SEQUENCES, WORDS, {"loss": ctc, "flatness": "paper"}, TWICE_MORE.format("ctc_loss")),
    "checkpoint": (Checkpointed, X, Y, {"direction_over": "network"}, r"^direction_over must be 'block' for a network with"),
    "reentrant checkpoint": (
        functools.partial(Checkpointed, reentrant=True), X, Y, {}, r"^layer 'a' must not be before a reentrant checkpoint"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_or_loss_that_pytorch_differentiates_once_is_refused_in_one_line(case: str) -> None:
    make, x, y, options, message = REFUSED[case]
    flat = hgnp.Flatness(make(), bound=-1.0, **options)
    with pytest.raises(hgnp.HgnpError, match=message) as caught:
        flat.backward(x, y)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["distances, ggn", "distances, paper", "CTC", "checkpoint"])
def test_a_run_is_refused_before_its_first_step(case: str, tmp_path: Path) -> None:
    make, x, y, options, message = REFUSED[case]
    options = dict(options)
    loss, bundle = options.pop("loss", F.cross_entropy), options.pop("flatness", options or "default")
    recipe = hgnp.Recipe(keep=1.0, finetune_epochs=1, flatness=bundle, seed=0, measure="none")
    net = make()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(hgnp.HgnpError, match=message):
        hgnp.prune(net, [(x, y)], loss=loss, recipe=recipe, out=tmp_path / "run", verbose=False)
    assert not (tmp_path / "run").exists()
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    plain = dataclasses.replace(recipe, mu=0.0)
    assert hgnp.prune(net, [(x, y)], loss=loss, recipe=plain, out=tmp_path / "run", verbose=False).history


class Late(nn.Module):
    """v begins in the last layer, whose inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.prototypes, self.last = nn.Linear(4, 5), nn.Parameter(torch.randn(6, 5)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(1e3 * torch.cdist(self.first(1e-3 * x), self.prototypes))


@pytest.mark.parametrize("bundle", ["default", "paper"])
def test_a_run_is_refused_for_a_layer_that_v_may_move_to_late(bundle: str) -> None:
    net = Late()
    flat = hgnp.Flatness(net, flatness=bundle)
    flat.backward(X, Y)
    assert flat.block == "last"
    recipe = hgnp.Recipe(keep=1.0, finetune_epochs=1, flatness=bundle, measure="none")
    with pytest.raises(hgnp.HgnpError, match="cdist"):
        hgnp.prune(Late(), [(X, Y)], recipe=recipe, verbose=False)


def test_a_run_whose_v_stays_after_a_checkpointed_part_is_not_refused() -> None:
    recipe = hgnp.Recipe(keep=1.0, finetune_epochs=1, measure="none", seed=0)
    torch.manual_seed(0)
    assert hgnp.prune(Checkpointed(), [(X, Y)], recipe=recipe, verbose=False).history


class Branched(nn.Module):
    """Returns something beside the output, by a layer whose derivatives PyTorch lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.beside, self.prototypes = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), torch.cdist(self.beside(x), self.prototypes)


def test_a_layer_that_the_loss_does_not_depend_on_is_no_reason_to_refuse_a_run() -> None:
    recipe = hgnp.Recipe(keep=1.0, finetune_epochs=1, bound=-1.0, measure="none", seed=0)
    run = hgnp.prune(Branched(), [(X, Y)], recipe=recipe, output=lambda out: out[0], verbose=False)
    assert run.history[0]["blocks"] == {"body": 1.0}


def test_a_run_that_may_never_use_the_penalty_is_not_refused() -> None:
    recipe = hgnp.Recipe(keep=1.0, finetune_epochs=1, method="hybrid", threshold=0.0, measure="none", seed=0)
    assert hgnp.prune(Late(), [(X, Y)], recipe=recipe, verbose=False).history


class RunningLoss(nn.Module):
    """Cross-entropy of outputs without their running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * output.detach().mean(0))
        return F.cross_entropy(output - self.mean, target)


def test_the_check_before_a_run_leaves_the_buffers_of_the_loss_alone() -> None:
    loss = RunningLoss()
    step, state = step_and_state(hgnp.Flatness(nn.Linear(4, 3), loss=loss, curvature="hessian"))
    step.check_derivatives(state, X, Y)
    assert not loss.mean.any()


def test_the_check_before_a_run_leaves_network_hooks_and_random_numbers_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    calls: list[Tensor] = []
    net[0].weight.register_hook(calls.append)
    flat = hgnp.Flatness(net)
    before, random = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    step, state = step_and_state(flat)
    step.check_derivatives(state, X, Y)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert calls == []
    assert all(p.grad is None for p in net.parameters())


def test_sharpness_refuses_what_pytorch_differentiates_once() -> None:
    with pytest.raises(hgnp.HgnpError, match=r"^net and loss must be twice differentiable, got: .*cdist"):
        hgnp.sharpness(Prototypes(), [(X, Y)])


def test_scores_refuse_a_third_derivative_that_pytorch_lacks() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), Net()).double()
    flat = hgnp.Flatness(net, bound=-1e6, flatness="paper")
    with pytest.raises(hgnp.HgnpError, match=TWICE_MORE.format("zeta")):
        hgnp.sensitivity(net, hgnp.Neurons(net, X.double()), [(X.double(), Y)], flatness=flat)
