"""The order of what a step from graphs does: what is under way before the host waits. Graphs are stood in for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hgnp
from engine_cases import Again, Net, Stand, prepared
from hgnp.curvature.seen import Seen
from hgnp.execution.graphed import Engine
from hgnp.execution.graphs import kind_of
from hgnp.training import engine as engines
from hgnp.training.batches import Ahead


def test_pieces_are_captured_at_their_second_time_and_q_before_its_block_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "Capture", Stand)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    flat = hgnp.Flatness(net, mu=0.05, bound=-1.0, direction_from="this_batch")
    Stand.engine = engine = Engine(flat)
    engine.backward(x, y)
    assert not engine._graphs
    engine.backward(x, y)
    assert {key[0] for key in engine._graphs} == {"look", "q", "term"}
    order: list[str] = []
    replay, name = Again.replay, flat.v.name

    def replayed(again: Again) -> None:
        order.append(next(key[0] for key, captured in engine._graphs.items() if captured.graph is again))
        replay(again)

    def named() -> str | None:
        order.append("name")
        return name()

    monkeypatch.setattr(Again, "replay", replayed)
    engine.backward(x, y)
    first = list(order)
    assert first == ["look", "q", "term"]
    order.clear()
    monkeypatch.setattr(flat.v, "name", named)
    engine._go_on = _telling(engine._go_on, order)  # type: ignore[method-assign]
    engine.backward(x, y)
    rest = order[order.index("go on") :]
    assert rest.index("q") < rest.index("name") < rest.index("term")


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_the_next_batch_is_fetched_before_the_host_waits(direction_from: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Capture", Stand)
    monkeypatch.setattr("hgnp.curvature.autodiff.passes.Pass.acts", lambda *_: True)  # as on a GPU, where nobody knows
    torch.manual_seed(0)
    batches = [(torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))) for _ in range(6)]
    _, engine, _ = prepared(Net().double(), bound=-1.0, direction_from=direction_from)
    order: list[str] = []
    q = Seen.q.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Seen, "q", property(lambda seen: order.append("q") or q(seen)))
    ahead = Ahead(batches)

    def fetch() -> Any:
        order.append("fetch")
        return ahead.fetch()

    engine.begin_epoch()
    engine.fetch = fetch
    kinds = []
    monkeypatch.setattr(engines, "kind_of", lambda batch, _: kinds.append(batch[0]) or kind_of(batch, engine.device))
    for x, y in ahead:
        order.append("step")
        engine.backward(x, y)
    steps = " ".join(order).split("step")
    # as it is: a network may draw from the streams that loaders do
    assert all("fetch" not in step for step in steps[:2])
    assert [step.split() for step in steps[-2:]] == [["fetch", "q"]] * 2
    assert [id(x) for x in kinds] == [id(x) for x, _ in batches]  # each is looked at once


@pytest.mark.parametrize(("bound", "back"), [(-1.0, "open"), (1e9, "closed")])
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_the_way_back_is_chosen_once_q_is_known(
    bound: float, back: str, refresh_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a captured step keeps nothing of its pass: other graphs may have the memory."""
    monkeypatch.setattr(engines, "Capture", Stand)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    flat = hgnp.Flatness(net, mu=0.05, bound=bound, refresh_every=refresh_every)
    Stand.engine = engine = Engine(flat)
    for _ in range(9):
        engine.backward(x, y)
    order: list[str] = []
    replay = Again.replay

    def replayed(again: Again) -> None:
        order.append(next(key[0] for key, captured in engine._graphs.items() if captured.graph is again))
        replay(again)

    monkeypatch.setattr(Again, "replay", replayed)
    for _ in range(3):
        engine.backward(x, y)
    assert order == ["ahead", back] * 3
    assert flat.found is None


def _telling(go_on: Callable[..., Tensor], order: list[str]) -> Callable[..., Tensor]:
    def told(*args: Any) -> Tensor:
        order.append("go on")
        return go_on(*args)

    return told
