"""An optimizer's step from a graph is the optimizer's step. Without a GPU the graph is stood in for by work that is done again
at every replay."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphed_cases import graph_replays
from hgnp.execution.graphs import CaptureContext, CaptureError
from hgnp.execution.optimizer import GraphedOptimizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Stand:
    """In place of `CaptureContext`: nothing is computed when the graph is made."""

    device = torch.device("cpu")

    def __init__(self, optimizer: torch.optim.Optimizer, able: bool = True) -> None:
        self.optimizer, self.able, self.captures, self.replays = optimizer, able, 0, 0

    def capture(self, work: Callable[[], Any]) -> tuple["Stand", Any]:
        if not self.able:
            raise CaptureError("it cannot")
        self.captures += 1
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        assert all(isinstance(rate, torch.Tensor) for rate in self.rates)
        return self, None

    def replay(self) -> None:
        self.replays += 1
        groups = self.optimizer.param_groups
        known = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate.item()
        self.optimizer.step()
        for group, rate in zip(groups, known, strict=True):
            group["lr"] = rate


def made(device: str, **options: Any) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(device)
    parts = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters(), "weight_decay": 0.1}]
    return net, torch.optim.SGD(parts, **{"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "fused": True} | options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"momentum": 0.0}])
def test_graphed_optimizer_steps_equal_eager_ones(device: str, options: dict[str, Any]) -> None:
    net, optimizer = made(device, **options)
    other, plain = made(device, **options)
    capture: Any = CaptureContext(torch.device(device)) if device == "cuda" else Stand(optimizer)
    graphed = GraphedOptimizer(capture)
    left = [(parameter, torch.empty_like(parameter)) for parameter in net.parameters()]
    for number in range(24):
        if number == 12:  # as a schedule that changes more than the rate, in between
            for each in (optimizer, plain):
                each.param_groups[1].update(weight_decay=0.2)
        if number == 18:  # the optimizer's tensors lie elsewhere, as after an epoch in which a user put back its state
            for each in (optimizer, plain):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
            graphed.forget()
        for each in (optimizer, plain):
            each.param_groups[0]["lr"] = 0.1 * (1 - number / 24)
        for (parameter, grad), twin in zip(left, other.parameters(), strict=True):
            grad.copy_(torch.randn(parameter.shape))
            parameter.grad, twin.grad = grad, grad.clone()
        before = getattr(capture, "replays", 0)
        with graph_replays() as found:
            graphed.step(optimizer, left)
        replayed = bool(found) or getattr(capture, "replays", 0) > before
        assert replayed is (number not in (0, 12, 18))
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        plain.step()
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"], rtol=1e-6, atol=1e-6)


OWN = ["a step of its own", "one around a scheduler's", "one within a scheduler's"]


@pytest.mark.parametrize("why", ["gradients", "not fused", "a hook", *OWN, "another", "float64", "able"])
def test_where_it_would_not_be_the_same_it_is_left_alone(why: str) -> None:
    net, optimizer = made("cpu", **({"fused": None} if why == "not fused" else {}))
    calls: list[int] = []
    if why == "float64":
        net.double()
    elif why == "another":
        optimizer = torch.optim.AdamW(net.parameters())  # type: ignore[assignment]
    elif why == "a hook":
        optimizer.register_step_post_hook(lambda *_: calls.append(0))
    elif why == "a step of its own":
        own = optimizer.step
        optimizer.step = lambda *_: (calls.append(0), own())  # type: ignore[method-assign]
    elif why == "one around a scheduler's":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        wrapped = optimizer.step
        optimizer.step = functools.wraps(wrapped)(lambda *_: (calls.append(0), wrapped()))  # type: ignore[method-assign]
    elif why == "one within a scheduler's":
        plain = type(optimizer).step
        told = types.MethodType(lambda self, *_: (calls.append(0), plain(self)), optimizer)
        optimizer.step = told  # type: ignore[method-assign]
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stand = Stand(optimizer, able=why != "able")
    graphed = GraphedOptimizer(stand)  # type: ignore[arg-type]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    left = None if why == "gradients" else [(p, p.grad) for p in net.parameters() if p.grad is not None]
    before = copy.deepcopy(net.state_dict())
    for _ in range(4):
        graphed.step(optimizer, left)
    assert stand.captures == stand.replays == 0
    assert len(calls) == (4 if why in ("a hook", *OWN) else 0)
    for name, tensor in net.state_dict().items():
        assert not torch.equal(tensor, before[name])


def test_a_scheduler_does_not_stand_in_the_way() -> None:
    net, optimizer = made("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stand = Stand(optimizer)
    graphed = GraphedOptimizer(stand)  # type: ignore[arg-type]
    left = [(parameter, torch.ones_like(parameter)) for parameter in net.parameters()]
    for parameter, grad in left:
        parameter.grad = grad
    for _ in range(3):
        graphed.step(optimizer, left)
    scheduler.step()
    graphed.step(optimizer, left)
    assert (stand.captures, stand.replays) == (1, 3)
    assert [rate.item() for rate in stand.rates] == pytest.approx([0.01, 0.03])


def test_a_parameter_that_leaves_the_optimizer_drops_the_graph() -> None:
    net, optimizer = made("cpu")
    stand = Stand(optimizer)
    graphed = GraphedOptimizer(stand)  # type: ignore[arg-type]
    left = [(parameter, torch.ones_like(parameter)) for parameter in net.parameters()]
    for parameter, grad in left:
        parameter.grad = grad
    for _ in range(3):
        graphed.step(optimizer, left)
    assert (stand.captures, stand.replays) == (1, 2)
    optimizer.param_groups[0]["params"].remove(net[0].weight)  # by its identity: it is the first
    graphed.step(optimizer, left)
    assert (stand.captures, stand.replays) == (1, 2)  # the graph would step it still
    graphed.step(optimizer, left)
    assert (stand.captures, stand.replays) == (2, 3)
