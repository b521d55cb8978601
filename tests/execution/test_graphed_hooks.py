"""Steps from graphs beside hooks, and derivatives of q that are not finite. Graphs are stood in for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from curvature_cases import gradients
from graphed_cases import Net, Stand, prepared, replays, stand_in
from hgnp.execution.graphed import Graphed
from hgnp.flatness import step_and_state


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))


@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"]
)
def test_module_hooks_are_called_in_every_step(register: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, calls = Net().double(), []
    getattr(net.b, register)(lambda *_: calls.append(None))
    _, graphed, _ = prepared(net, curvature="hessian")
    for _ in range(4):
        calls.clear()
        graphed.backward(*batch())
        assert calls
    assert graphed.refused == "a replay calls no module hooks"


def test_steps_are_captured_once_the_hooks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net = Net().double()
    handle = net.b.register_forward_hook(lambda *_: None)
    _, graphed, _ = prepared(net)
    for hooked in (True, False):
        if not hooked:
            handle.remove()
        graphed.begin_epoch()
        with replays() as replayed:
            for _ in range(3):
                graphed.backward(*batch())
        assert graphed.refused == ("a replay calls no module hooks" if hooked else None)
        assert bool(replayed) is not hooked


def test_a_hook_that_is_new_in_an_epoch_gets_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the paper's order a loss whose gradient waits for the penalty's is not taken for one that came from a graph."""
    stand_in(monkeypatch)
    found = []
    for hook in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        flat, graphed, _ = prepared(net, mu=0.0, bound=-1.0, direction_from="this_batch")
        graphed.backward(*batch())
        if hook:
            net.a.weight.register_hook(lambda grad: 2 * grad)
        flat.mu = 0.05
        graphed.backward(*batch())
        found.append(gradients(net))
    plain, hooked = found
    torch.testing.assert_close(hooked, plain | {"a.weight": 2 * plain["a.weight"]}, rtol=1e-9, atol=1e-12)


class Power(nn.Module):
    """Its third derivative is not finite at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() ** 2.5


def powers() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), Power(), nn.Linear(6, 3)).double()
    net[2].requires_grad_(False)
    with torch.no_grad():
        net[0].weight[0], net[0].bias[0] = 0.0, 0.0
    return net


@pytest.mark.parametrize("executor", ["eager", "graphed"])
def test_an_inactive_penalty_whose_derivative_is_not_finite_leaves_the_gradient_of_the_loss(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0·∞ would be NaN."""
    stand_in(monkeypatch)
    torch.manual_seed(1)
    x, y = torch.randn(8, 4).double(), torch.arange(8) % 3
    net = powers()
    flat = hgnp.Flatness(net, mu=1.0, bound=1e6, curvature="hessian", refresh_every=2)
    Stand.graphed = graphed = Graphed(*step_and_state(flat))
    backward: Any = flat.backward if executor == "eager" else graphed.backward
    other = copy.deepcopy(net)
    for _ in range(5):
        net.zero_grad()
        backward(x, y)
        other.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        torch.testing.assert_close(gradients(net), gradients(other), rtol=1e-9, atol=1e-12)
    assert graphed.refused is None
    assert 0 < flat.curvature < 1e6
    net.zero_grad()
    flat.bound = -1.0
    flat.backward(x, y)  # the penalty is active
    assert not all(grad.isfinite().all() for grad in gradients(net).values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_inactive_penalty_whose_derivative_is_not_finite_on_a_gpu() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4).double().cuda(), (torch.arange(8) % 3).cuda()
    net = powers().cuda()
    flat = hgnp.Flatness(net, mu=1.0, bound=1e6, curvature="hessian")
    for _ in range(3):
        net.zero_grad()
        flat.backward(x, y)
        assert all(grad.isfinite().all() for grad in gradients(net).values())
