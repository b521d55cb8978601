"""The order of what a step from graphs does: what is under way before the host waits. Graphs are stood in for."""

from typing import Any

import pytest
import torch

from graphed_cases import Net, Stand, prepared, replays, stand_in
from hgnp.curvature.step import StepStatistics, make_step
from hgnp.execution.graphed import Graphed
from hgnp.execution.graphs import shape_key
from hgnp.training.data import Prefetcher


def test_pieces_are_captured_at_their_second_time_and_q_before_its_block_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    step, state = make_step(net, mu=0.05, bound=-1.0, direction_from="this_batch")
    Stand.graphed = graphed = Graphed(step, state)
    direction = graphed.state.direction
    name = direction.name
    with replays() as replayed:
        graphed.backward(x, y)
        assert not replayed
        graphed.backward(x, y)
        assert {replay.piece for replay in replayed} == {"loss", "q", "penalty"}
        replayed.clear()
        graphed.backward(x, y)
        assert [replay.piece for replay in replayed] == ["loss", "q", "penalty"]
        replayed.clear()
        before: list[int] = []

        def named() -> str | None:
            if not Stand.capturing:  # in a graph it is known
                before.append(len(replayed))
            return name()

        monkeypatch.setattr(direction, "name", named)
        graphed.backward(x, y)
    assert [replay.piece for replay in replayed] == ["loss", "q", "penalty"]
    assert before == [2]


@pytest.mark.parametrize("direction_from", ["last_batch", "this_batch"])
def test_the_next_batch_is_fetched_before_the_host_waits(direction_from: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    batches = [(torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))) for _ in range(6)]
    _, graphed, _ = prepared(Net().double(), bound=-1.0, direction_from=direction_from)
    order: list[str] = []
    q = StepStatistics.q.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(StepStatistics, "q", property(lambda seen: order.append("q") or q(seen)))
    ahead = Prefetcher(batches)

    def fetch() -> Any:
        order.append("fetch")
        return ahead.fetch()

    graphed.begin_epoch()
    graphed.fetch = fetch
    kinds = []
    monkeypatch.setattr(
        "hgnp.execution.graphed.shape_key", lambda batch, _: kinds.append(batch[0]) or shape_key(batch, graphed.device)
    )
    for x, y in ahead:
        order.append("step")
        graphed.backward(x, y)
    steps = " ".join(order).split("step")
    # as it is: a network may draw from the streams that loaders do
    assert all("fetch" not in step for step in steps[:2])
    assert [step.split() for step in steps[-2:]] == [["fetch", "q"]] * 2
    assert [id(x) for x in kinds] == [id(x) for x, _ in batches]  # each is looked at once


@pytest.mark.parametrize(("bound", "back"), [(-1.0, "active"), (1e9, "inactive")])
@pytest.mark.parametrize("refresh_every", [1, 3])
def test_the_backward_pass_is_chosen_once_q_is_known(
    bound: float, back: str, refresh_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a captured step keeps nothing of its pass: other graphs may have the memory."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    step, state = make_step(net, mu=0.05, bound=bound, refresh_every=refresh_every)
    Stand.graphed = graphed = Graphed(step, state)
    for _ in range(9):
        graphed.backward(x, y)
    with replays() as replayed:
        for _ in range(3):
            graphed.backward(x, y)
    assert [replay.piece for replay in replayed] == ["forward", back] * 3
    assert graphed.state.current is None


@pytest.mark.parametrize("choices", [{"flatness": "paper"}, {"direction_from": "this_batch"}], ids=str)
def test_in_the_paper_s_order_the_network_runs_once(choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """q is taken from the tape of the first pass, also in the graph that was captured for the penalty."""
    stand_in(monkeypatch)
    torch.manual_seed(0)
    net = Net().double()
    _, graphed, _ = prepared(net, bound=-1.0, **choices)
    x, y = torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))
    calls: list[None] = []
    forward = net.forward
    monkeypatch.setattr(net, "forward", lambda x: calls.append(None) or forward(x))
    graphed.backward(x, y)
    calls.clear()
    graphed.backward(x, y)
    assert len(calls) == 2  # captured, and replayed
    calls.clear()
    graphed.backward(x, y)
    assert len(calls) == 1
