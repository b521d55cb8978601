"""A stand-in for CUDA graphs in tests of `Graphed`: work that is done again at every replay."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hgnp
from hgnp.curvature.autodiff.passes import Pass
from hgnp.curvature.step import State, StepStatistics
from hgnp.execution import graphed as graphed_module
from hgnp.execution.captured import Captured, Versions
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import GraphSequence
from hgnp.flatness import step_and_state


@contextlib.contextmanager
def preserved_versions(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Changes inside the block do not count for autograd."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:  # one by one: PyTorch 2.6 takes no more
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        yield


class Undone(TorchDispatchMode):
    """At the end of the block, tensors from before it have the values that they had: a capture computes nothing. `buffers` are
    given, as PyTorch does not say that a norm writes them."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._before = {id(tensor): (tensor, tensor.clone()) for tensor in buffers}
        self._made: dict[int, Any] = {}
        """Storages that were made in the block; they are held, so that no other has their id."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(op._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given):
                    if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._made:
                        self._before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = op(*args, **kwargs)
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        new = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._made |= {storage._cdata: storage for storage in new if storage._cdata not in known}
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        tensors = [tensor for tensor, _ in self._before.values()]
        with torch.no_grad(), preserved_versions(tensors):
            for tensor, value in self._before.values():
                tensor.copy_(value)
        self._before, self._made = {}, {}


class Again:
    """Does the work at every replay, in the state that it was captured in, into the memory of the first time.

    As with a graph, a replay leaves `State` alone: what the work left there is memory of this graph, which graphs that were
    captured from there on read.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.graphed: Graphed = Stand.graphed
        state = self.graphed.state
        self.work, self.choice, self.pairs = work, state.direction.choice, state.direction.pairs
        given, statistics = state.current, state.statistics
        Stand.recording = True
        try:
            with Undone(self.graphed.net.buffers()):
                self.result = self._work()
        finally:
            Stand.recording = False
        self.left, self.made = self._under_way(), None if state.current is given else state.current
        self.reads = _maker(given, again=state.current is not given)
        self.statistics = None if state.statistics is statistics else state.statistics
        self.next = state.direction.choice
        Stand.graphs.add(self)

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
        direction.choice, direction.pairs = self.choice, self.pairs
        state.current, state.collector, state.penalized, state.loss_differentiated = (
            (None, None, None, False) if self.reads is None else self.reads.left
        )
        net.zero_grad(set_to_none=True)
        result = self._work()
        if self.made is not None:  # a replay fills the pass of the capture in place
            vars(self.made).update(vars(state.current))
            state.current = self.made
        self.left = self._under_way()
        if self.result is not None:
            self.result.copy_(result)
        if state.statistics is not held[0]:
            own, new = _tensors(self.statistics), _tensors(state.statistics)
            with preserved_versions(own):
                for tensor, value in zip(own, new, strict=True):
                    tensor.copy_(value)
        if direction.choice is not self.choice:
            self.next.index.number.copy_(direction.choice.index.number)  # type: ignore[union-attr]
        direction.pairs = self.pairs
        state.statistics, direction.choice, state.loss, under_way = held
        state.current, state.collector, state.penalized, state.loss_differentiated = under_way
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad


def _tensors(statistics: StepStatistics | None) -> list[Tensor]:
    assert statistics is not None
    penalized = statistics.penalized
    return [statistics.curvature, penalized.radius, penalized.residuals, *penalized.vectors]


def _maker(given: Pass | None, *, again: bool) -> Again | None:
    """The graph whose memory the pass is; where it is gone through `again`, the one of its tape."""
    if given is None:
        return None
    for graph in Stand.graphs:
        own = graph.made
        if own is not None and ((own.tape is given.tape and own.q is None) if again else own is given):
            return graph
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
    """In place of `CaptureContext`."""

    graphs: ClassVar["weakref.WeakSet[Again]"] = weakref.WeakSet()
    """All that there are."""

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

    def forget(self, *, release: bool = False) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch, stand: type[Stand] = Stand) -> None:
    """Steps of a `Graphed` on the CPU come from such graphs."""
    monkeypatch.setattr(graphed_module, "CaptureContext", stand)
    monkeypatch.setattr(Versions, "restore", lambda _: None)  # what is done again has saved tensors as they are
    monkeypatch.setattr("hgnp.curvature.autodiff.passes.capturing", lambda: Stand.capturing)
    monkeypatch.setattr("hgnp.execution.process_group.between_graphs", lambda work: None if Stand.recording else work())


class Replay(NamedTuple):
    """A piece of a step, and the state of the executor that replayed it."""

    piece: str
    state: State


@contextlib.contextmanager
def replays() -> Iterator[list[Replay]]:
    """Collects the pieces that are replayed within, from CUDA graphs or what stands in for them."""
    found: list[Replay] = []
    replay = Captured.replay

    def recorded(captured: Captured, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
        found.append(Replay(captured.key.piece, state))
        return replay(captured, state, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captured, "replay", recorded)
        yield found


@contextlib.contextmanager
def graph_replays() -> Iterator[list[GraphSequence]]:
    """Collects the CUDA graphs that are replayed within: of steps, the optimizer and validation."""
    found: list[GraphSequence] = []
    replay = GraphSequence.replay

    def recorded(graphs: GraphSequence) -> None:
        found.append(graphs)
        replay(graphs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSequence, "replay", recorded)
        yield found


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
