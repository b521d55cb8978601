"""A stand-in for CUDA graphs in tests of `Graphed`: work that is done again at every replay."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import hgnp
from hgnp.curvature.autodiff.passes import Pass
from hgnp.curvature.step import Statistics
from hgnp.execution import graphed as graphed_module
from hgnp.execution.captured import Versions
from hgnp.execution.graphed import Graphed
from hgnp.flatness import step_and_state


class Again:
    """Does the work at every replay, in the state that it was captured in, into the memory of the first time.

    As with a graph, a replay leaves `State` alone: what the work left there is memory of this graph, which graphs that were
    captured from there on read.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.graphed: Graphed = Stand.graphed
        state = self.graphed.state
        self.work, self.choice = work, state.direction.choice
        given = state.current
        kept = [tensor.clone() for tensor in self._memory()]
        Stand.recording = True
        try:
            self.result = self._work()
        finally:
            Stand.recording = False
        self.left, self.captured = self._under_way(), state.current
        self.reads = _maker(given, again=state.current is not given)
        self.statistics, self.next = state.statistics, state.direction.choice
        with _unsafe_preserve_version_counter(tuple(self._memory())):
            for tensor, value in zip(self._memory(), kept, strict=True):
                tensor.copy_(value)
        if state.current is not None and state.current is not given:
            Stand.makers.add(self)

    def _memory(self) -> list[Tensor]:
        return [*self.graphed.net.buffers(), *self.graphed._memory.tensors, *self.graphed._grad_memory.values()]

    def _under_way(self) -> tuple[Any, ...]:
        state = self.graphed.state
        return state.current, state.collector, state.penalized, state.loss_differentiated

    def _work(self) -> Any:
        Stand.capturing = True
        try:
            return self.work()
        finally:
            Stand.capturing = False

    def replay(self) -> None:
        state, net = self.graphed.state, self.graphed.net
        direction = state.direction
        held = state.statistics, direction.choice, state.loss, self._under_way()
        grads = [p.grad for p in net.parameters()]
        direction.choice, direction.pairs = self.choice, self.graphed._memory.pairs
        state.current, state.collector, state.penalized, state.loss_differentiated = (
            (None, None, None, False) if self.reads is None else self.reads.left
        )
        net.zero_grad(set_to_none=True)
        result = self._work()
        self.left = self._under_way()
        if self.result is not None:
            self.result.copy_(result)
        for captured in self.graphed._graphs.values():
            if captured.graph is self and captured.taped is not None:  # a replay fills it in place; this is a new one
                vars(captured).update(taped=state.current, versions=Versions((), ()))
        if state.statistics is not held[0]:
            own, new = _tensors(self.statistics), _tensors(state.statistics)
            with _unsafe_preserve_version_counter(tuple(own)):
                for tensor, value in zip(own, new, strict=True):
                    tensor.copy_(value)
        if direction.choice is not self.choice:
            self.next.index.number.copy_(direction.choice.index.number)  # type: ignore[union-attr]
        direction.pairs = self.graphed._memory.pairs
        state.statistics, direction.choice, state.loss, under_way = held
        state.current, state.collector, state.penalized, state.loss_differentiated = under_way
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad


def _tensors(statistics: Statistics | None) -> list[Tensor]:
    assert statistics is not None
    penalized = statistics.penalized
    return [statistics.curvature, penalized.radius, penalized.residuals, *penalized.vectors]


def _maker(given: Pass | None, *, again: bool) -> Again | None:
    """The graph whose memory the pass is; where it is gone through `again`, the one of its tape."""
    if given is None:
        return None
    for made in Stand.makers:
        own = made.left[0]
        if (own.tape is given.tape and own.q is None) if again else any(each is given for each in (own, made.captured)):
            return made
    raise AssertionError("a pass that no graph has made cannot be read by one")


class PerThread(type):
    """Ranks may be threads: each has its own of what follows."""

    _own = threading.local()

    @property
    def graphed(cls) -> Graphed:
        graphed: Graphed = cls._own.graphed
        return graphed

    @graphed.setter
    def graphed(cls, graphed: Graphed) -> None:
        cls._own.graphed = graphed

    @property
    def capturing(cls) -> bool:
        """Whether what runs now stands for a graph."""
        return getattr(cls._own, "capturing", False)

    @capturing.setter
    def capturing(cls, now: bool) -> None:
        cls._own.capturing = now

    @property
    def recording(cls) -> bool:
        """Whether it is captured now, so that ranks must not sum."""
        return getattr(cls._own, "recording", False)

    @recording.setter
    def recording(cls, now: bool) -> None:
        cls._own.recording = now


class Stand(metaclass=PerThread):
    """In place of `Capture`."""

    makers: ClassVar["weakref.WeakSet[Again]"] = weakref.WeakSet()
    """Those that a pass is the memory of."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def graphed(self) -> Graphed:
        return Stand.graphed

    def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
        made = Again(work)
        return made, made.result

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forget(self) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch, stand: type[Stand] = Stand) -> None:
    """Steps of a `Graphed` on the CPU come from such graphs."""
    monkeypatch.setattr(graphed_module, "Capture", stand)
    monkeypatch.setattr("hgnp.curvature.autodiff.passes.capturing", lambda: Stand.capturing)
    monkeypatch.setattr("hgnp.execution.process_group.between_graphs", lambda work: None if Stand.recording else work())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.nb = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        return self.out(torch.relu(self.nb(self.b(x)) + x).mean((2, 3)))


def prepared(net: nn.Module, mu: float = 0.05, **choices: Any) -> tuple[hgnp.Flatness, Graphed, torch.optim.SGD]:
    """A `Flatness`, a `Graphed` that shares its step and state, and an optimizer."""
    flat = hgnp.Flatness(net, mu=mu, **choices)
    Stand.graphed = graphed = Graphed(*step_and_state(flat))
    return flat, graphed, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
