"""What graphs, and captures that fail, hold in memory; as in test_engine.py, without a GPU."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hgnp
from engine_cases import Again, Net, Stand, prepared
from hgnp.curvature import eigen
from hgnp.execution.graphed import Engine
from hgnp.execution.graphs import Capture, RefusedError, Replayed
from hgnp.training import engine as engines


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))


@pytest.mark.parametrize("refused", [1, 2, 3])
@pytest.mark.parametrize("refresh_every", [1, 2])
def test_a_step_whose_way_back_cannot_be_captured_is_made_once(
    refused: int, refresh_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the captures took is let go before: it may be memory that they were refused for."""
    passes: list[weakref.ref[Any]] = []

    class Unable(Stand):
        captures = 0

        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            self.captures += 1
            if self.captures == refused:
                raise RefusedError("it cannot")
            made = super().capture(work)
            passes.append(weakref.ref(self.engine.flatness.found))  # type: ignore[union-attr]
            return made

    found = []
    for stand in (Unable, Stand):
        monkeypatch.setattr(engines, "Capture", stand)
        torch.manual_seed(0)
        flat, engine, optimizer = prepared(Net().double(), bound=-1.0, refresh_every=refresh_every)
        run = flat.run

        def as_it_is(*args: Any, run: Callable[..., Tensor] = run, **options: Any) -> Tensor:
            assert not any(kept() for kept in passes)
            return run(*args, **options)

        monkeypatch.setattr(flat, "run", as_it_is)
        for _ in range(7):
            optimizer.zero_grad(set_to_none=True)
            engine.backward(*batch())
            optimizer.step()
        assert engine.refused == ("it cannot" if stand is Unable else None)
        assert bool(engine._graphs) is (stand is Stand)
        found.append(flat.net.state_dict())
    assert len(passes) == refused - 1
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def captures_do(monkeypatch: pytest.MonkeyPatch, around: Callable[[], Any]) -> None:
    """Stands in for what PyTorch does around the work of a capture."""
    for name in ("Stream", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: around())


def test_a_capture_that_failed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    captures_do(monkeypatch, contextlib.nullcontext)
    taken: list[weakref.ref[Tensor]] = []

    def work() -> None:
        made = torch.zeros(3)
        taken.append(weakref.ref(made))
        raise ValueError("too large")

    with contextlib.suppress(RefusedError):
        Capture(torch.device("meta")).capture(work)
    assert taken[0]() is None


def test_the_error_that_came_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves undone makes the end of the capture fail as well."""

    @contextlib.contextmanager
    def unjoined() -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capturing stream has unjoined work")

    captures_do(monkeypatch, unjoined)

    def work() -> None:
        raise ValueError("modified in place")

    with pytest.raises(RefusedError, match="modified in place"):
        Capture(torch.device("meta")).capture(work)
    with pytest.raises(RefusedError, match="unjoined work"):
        Capture(torch.device("meta")).capture(lambda: None)


def test_work_that_cannot_be_captured_is_done_without_what_the_capture_took() -> None:
    taken: list[weakref.ref[Tensor]] = []

    class Unable(Stand):
        def capture(self, work: Callable[[], Any]) -> tuple[Again, Any]:
            made = work()
            taken.append(weakref.ref(made))
            raise RefusedError("it cannot")

    def double(x: Tensor) -> Tensor:
        assert not any(made() is not None for made in taken)
        return 2 * x

    replayed = Replayed(double, Net(), Unable(torch.device("cpu")))  # type: ignore[arg-type]
    for _ in range(3):
        assert replayed(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(taken) == 1


def test_a_step_from_graphs_does_not_look_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would wait meanwhile."""
    monkeypatch.setattr(engines, "Capture", Stand)
    torch.manual_seed(0)
    flat, engine, _ = prepared(Net().double(), bound=1e9, refresh_every=3)
    x, y = batch()
    for _ in range(9):
        engine.backward(x, y)
    looked: list[None] = []
    monkeypatch.setattr(flat.v, "block", lambda: looked.append(None))
    monkeypatch.setattr(Again, "replay", lambda again: None)
    for _ in range(3):
        engine.backward(x, y)
    assert not looked


def test_what_was_seen_outlasts_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps at rest show nothing of their own, and share the memory."""
    monkeypatch.setattr(engines, "Capture", Stand)
    torch.manual_seed(0)
    flat = hgnp.Flatness(Net().double(), mu=0.05, bound=-1.0)
    Stand.engine = engine = Engine(flat)
    for _ in range(3):
        engine.backward(*batch())
    before = flat.residual, {name: part.clone() for name, part in flat.direction.items()}
    for captured in engine._graphs.values():
        if captured.seen is not None:
            for tensor in (captured.seen.residuals, *captured.seen.direction):
                tensor.fill_(torch.nan)
    torch.testing.assert_close((flat.residual, flat.direction), before, rtol=0, atol=0)


def test_constants_that_graphs_read_are_kept() -> None:
    """However many other sides there are."""
    first = weakref.ref(eigen.arbitrary(1, torch.double, torch.device("cpu")))
    for side in range(1, 200):
        eigen.arbitrary(side, torch.double, torch.device("cpu"))
    assert first() is not None
