"""What graphs, and captures that fail, hold in memory; as in test_graphed.py, without a GPU."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hgnp
from graphed_cases import Again, Net, Stand, prepared, replays, stand_in
from hgnp.curvature import eigen
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import CaptureContext, CaptureError, GraphedFunction
from hgnp.flatness import step_and_state


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))


@pytest.mark.parametrize("refused", [1, 2, 3])
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_a_step_whose_backward_pass_cannot_be_captured_is_made_once(
    refused: int, refresh_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the captures took is let go before: it may be memory that they were refused for."""
    passes: list[weakref.ref[Any]] = []
    failed: list[bool] = []

    class Unable(Stand):
        captures = 0

        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            self.captures += 1
            if self.captures == refused:
                failed.append(True)
                raise CaptureError("it cannot")
            made = super().capture(work)
            passes.append(weakref.ref(self.graphed.state.current))
            return made

    found = []
    for stand in (Unable, Stand):
        stand_in(monkeypatch, stand)
        torch.manual_seed(0)
        flat, graphed, optimizer = prepared(Net().double(), bound=-1.0, refresh_every=refresh_every)
        forward = graphed.step.forward

        def released(*args: Any, forward: Callable[..., Any] = forward) -> Any:
            assert not failed or not any(kept() for kept in passes)
            return forward(*args)

        monkeypatch.setattr(graphed.step, "forward", released)
        with replays() as replayed:
            for _ in range(7):
                optimizer.zero_grad(set_to_none=True)
                graphed.backward(*batch())
                optimizer.step()
        assert graphed.refused == ("it cannot" if stand is Unable else None)
        assert bool(replayed) is (stand is Stand)
        found.append(flat.net.state_dict())
    assert len(passes) == refused - 1
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


class Recorder:
    """In place of PyTorch's functions for CUDA graphs and memory, on a device with a number of bytes free."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, free: int = 100, end: Callable[[], Any] = lambda: None
    ) -> None:
        self.free, self.reserved = free, 0
        self.calls: list[str] = []
        recorder = self

        class Graph:
            def capture_begin(self, *, pool: Any, **_: Any) -> None:
                recorder.calls.append(f"begin in {pool}")

            def capture_end(self) -> None:
                recorder.calls.append("end")
                end()

            def replay(self) -> None:
                pass

        handles = iter(range(1, 9))
        for name, stand in {
            "Stream": lambda *_, **__: None,
            "stream": lambda _: contextlib.nullcontext(),
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: f"pool {next(handles)}",
            "mem_get_info": lambda _: (self.free, 100),
            "memory_reserved": lambda _: self.reserved,
            "synchronize": lambda _: None,
            "empty_cache": lambda: self.calls.append("empty"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand)

    def capture(self, context: CaptureContext) -> list[str]:
        """What a capture calls."""
        self.calls.clear()
        context.capture(lambda: None)
        return list(self.calls)


def test_a_capture_that_failed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    taken: list[weakref.ref[Tensor]] = []

    def work() -> None:
        made = torch.zeros(3)
        taken.append(weakref.ref(made))
        raise ValueError("too large")

    with contextlib.suppress(CaptureError):
        CaptureContext(torch.device("meta")).capture(work)
    assert taken[0]() is None


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold pinned memory, whose release records an event on the stream that is being captured."""
    Recorder(monkeypatch)
    _, enabled = CaptureContext(torch.device("meta")).capture(gc.isenabled)
    assert not enabled
    assert gc.isenabled()


def test_the_first_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves undone makes the end of the capture fail as well."""

    ends: list[None] = []

    def unjoined() -> None:
        ends.append(None)
        if len(ends) != 1:  # the first is of the graph that holds the pool
            raise RuntimeError("capturing stream has unjoined work")

    Recorder(monkeypatch, end=unjoined)

    def work() -> None:
        raise ValueError("modified in place")

    context = CaptureContext(torch.device("meta"))
    with pytest.raises(CaptureError, match="modified in place"):
        context.capture(work)
    with pytest.raises(CaptureError, match="unjoined work"):
        context.capture(lambda: None)


def test_memory_of_graphs_is_kept_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Getting memory from the device for every capture takes longer than the capture."""
    cuda = Recorder(monkeypatch)
    context = CaptureContext(torch.device("meta"))
    assert cuda.capture(context) == ["begin in pool 1", "end"] * 2  # the first holds the pool
    context.forget()
    assert cuda.capture(context) == ["begin in pool 1", "end"]
    context.forget(release=True)
    assert cuda.capture(context) == ["begin in pool 2", "end"] * 2


def test_memory_of_graphs_is_released_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps that follow may need it, and a capture gets none of what PyTorch has cached."""
    cuda = Recorder(monkeypatch)
    context = CaptureContext(torch.device("meta"))
    cuda.capture(context)
    cuda.free, cuda.reserved = 40, 60
    context.forget()
    assert cuda.capture(context) == ["empty", *["begin in pool 2", "end"] * 2]


def test_work_that_cannot_be_captured_is_done_without_what_the_capture_took() -> None:
    taken: list[weakref.ref[Tensor]] = []

    class Unable(Stand):
        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            made = work()
            taken.append(weakref.ref(made))
            raise CaptureError("it cannot")

    def double(x: Tensor) -> Tensor:
        assert not any(made() is not None for made in taken)
        return 2 * x

    replayed = GraphedFunction(double, Net(), Unable(torch.device("cpu")))  # type: ignore[arg-type]
    for _ in range(3):
        assert replayed(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(taken) == 1


def test_a_step_from_graphs_does_not_look_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would wait meanwhile."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    _, graphed, _ = prepared(Net().double(), bound=1e9, refresh_every=3)
    x, y = batch()
    for _ in range(9):
        graphed.backward(x, y)
    looked: list[None] = []
    monkeypatch.setattr(graphed.state.direction, "block", lambda: looked.append(None))
    monkeypatch.setattr(Again, "replay", lambda again: None)
    for _ in range(3):
        graphed.backward(x, y)
    assert not looked


def test_what_was_seen_outlasts_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps at rest show nothing of their own, and share the memory."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    flat = hgnp.Flatness(Net().double(), mu=0.05, bound=-1.0)
    Stand.graphed = graphed = Graphed(*step_and_state(flat))
    for _ in range(3):
        graphed.backward(*batch())
    before = flat.residual, {name: part.clone() for name, part in flat.direction.items()}
    own = [again.statistics for again in Stand.graphs if again.graphed is graphed and again.statistics is not None]
    assert own
    for statistics in own:
        for tensor in (statistics.penalized.residuals, *statistics.penalized.vectors):
            tensor.fill_(torch.nan)
    torch.testing.assert_close((flat.residual, flat.direction), before, rtol=0, atol=0)


def test_frozen_parameters_have_no_memory_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be as large as they are."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net = Net().double()
    net.b = nn.Conv2d(8, 8, 5, padding=2).double().requires_grad_(False)  # of a shape that no other test has
    _, graphed, _ = prepared(net, bound=-1.0)
    with replays() as replayed:
        for _ in range(3):
            graphed.backward(*batch())
    assert replayed
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor]
    assert any(x.shape == net.a.weight.shape for x in tensors)
    assert not any(x.shape == net.b.weight.shape for x in tensors)


def test_constants_that_graphs_read_are_kept() -> None:
    """However many other sides there are."""
    first = weakref.ref(eigen.arbitrary(1, torch.double, torch.device("cpu")))
    for side in range(1, 200):
        eigen.arbitrary(side, torch.double, torch.device("cpu"))
    assert first() is not None


@pytest.mark.parametrize("choices", [{}, {"flatness": "paper"}, {"mu": 0.0}], ids=str)
def test_nothing_of_a_graph_s_memory_is_kept_in_the_state(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number would keep a segment of the pool."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    _, graphed, _ = prepared(Net().double(), **{"bound": -1.0} | choices)
    with replays() as replayed:
        for _ in range(4):
            graphed.backward(*batch())
    assert replayed
    state = graphed.state
    held = [state.loss] if state.statistics is None else [state.loss, state.statistics.curvature]
    for again in [again for again in Stand.graphs if again.graphed is graphed]:
        theirs = [again.result] if again.statistics is None else [again.result, again.statistics.curvature]
        pointers = {x.data_ptr() for x in theirs if x is not None}
        assert not pointers & {x.data_ptr() for x in held if x is not None}
    assert (state.current, state.collector, state.penalized) == (None, None, None)


def test_a_plain_step_that_fails_lets_its_pass_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net = Net().double()
    _, graphed, _ = prepared(net, mu=0.0)
    graphed.backward(*batch())  # operation by operation, as the first of its shape
    monkeypatch.setattr(graphed.step, "backward_and_refresh", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        graphed.backward(*batch())
    assert graphed.state.current is None
