"""In whichever memory format and with however many threads steps run on a CPU, they compute the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.progress import Silent
from hgnp.training import run, ways
from hgnp.training.ways import Choice, Way
from train_cases import Net, loaders, made, recipe, stripes

WAYS = [Way(form, threads) for form in ("contiguous", "channels_last") for threads in (1, 2)]


class Flat(nn.Module):
    """Reads pictures by a view of their memory or, with `reshape`, in any format; wide enough for the rule."""

    def __init__(self, *, reshape: bool, width: int = ways.WIDE) -> None:
        super().__init__()
        self.reshape = reshape
        self.first, self.inner = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, width, 2, padding=1)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(width * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.inner(torch.relu(self.first(x)))))
        return self.last(x.flatten(1) if self.reshape else x.view(len(x), -1))


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def force(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    monkeypatch.setattr(run, "choose", lambda *_: Choice(way))


def trajectory(**given: Any) -> list[dict[str, Any]]:
    """Of a run in float64 with an optimizer that has been used before and goes through memory as it lies."""
    net = made().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003, fused=True)
    net(torch.randn(4, 1, 6, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    (x, y), (u, v) = stripes(32), stripes(6, seed=2)
    train = DataLoader(TensorDataset(x.double(), y), batch_size=16, shuffle=True)
    mine = recipe(keep=0.5, warmup_epochs=1, finetune_epochs=1, **given)
    return hgnp.prune(net, train, [(u.double(), v)], recipe=mine, optimizer=optimizer).history


@pytest.mark.parametrize(
    "given",
    [{"mu": 0.01, "bound": 0.0}, {"mu": 0.01, "flatness": "paper"}, {"method": "sam"}, {"method": "taylor"}],
    ids=["hgnp", "paper", "sam", "taylor"],
)
def test_the_same_trajectory(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trajectory(execution="eager", **given)
    for way in WAYS[3:] if given == {"method": "taylor"} else WAYS[::2]:  # two threads wait long on a machine at work
        force(monkeypatch, way)
        same(trajectory(execution="measured", **given), expected)


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert sum(row["removed"] > 0 for row in found) > 1
    for one, other in zip(found, expected, strict=True):
        assert one["widths"] == other["widths"]
        assert one["blocks"] == other["blocks"]
        for name in ("loss", "val_loss", "metric", "curvature", "radius"):
            if other[name] is not None:  # plain training has no curvature
                assert one[name] == pytest.approx(other[name], rel=1e-9), name


@pytest.mark.usefixtures("two_threads")
def test_a_way_is_taken_for_the_run_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def on_epoch(state: Any) -> None:
        momentum = optimizer.state[net.b.weight]["momentum_buffer"]
        layouts = [t.is_contiguous(memory_format=torch.channels_last) for t in (net.b.weight, momentum)]
        seen.append((torch.get_num_threads(), *layouts))

    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    force(monkeypatch, Way("channels_last", 1))
    hgnp.prune(net, *loaders(), recipe=recipe(), optimizer=optimizer, on_epoch=on_epoch)
    assert set(seen) == {(1, True, True)}
    assert torch.get_num_threads() == 2
    assert net.b.weight.is_contiguous()
    assert optimizer.state[net.b.weight]["momentum_buffer"].is_contiguous()

    net = made()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    force(monkeypatch, Way("contiguous", 1))
    with pytest.raises(ArithmeticError, match="the loss is"):
        hgnp.prune(net, *loaders(), recipe=recipe(lr=1e30))
    assert torch.get_num_threads() == 2
    assert net.b.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_resumed_run_takes_the_way_it_began_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def go(out: Path, stop_in: int | None = None) -> hgnp.Result:
        def on_epoch(state: Any) -> None:
            if state.epoch == stop_in:
                raise StopError

        def optimizer(p: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(p, lr=0.003, fused=True)

        mine = recipe(execution="measured", mu=0.01, bound=0.0)
        return hgnp.prune(made(), *loaders(), recipe=mine, optimizer=optimizer, out=out, resume=True, on_epoch=on_epoch)

    force(monkeypatch, Way("channels_last", 1))
    whole = go(tmp_path / "whole")
    for stop_in in (1, 3):
        with pytest.raises(StopError):
            go(tmp_path / "pieces", stop_in)
        monkeypatch.setattr(run, "choose", lambda *_: pytest.fail("measured again"))
    pieces = go(tmp_path / "pieces")
    for one, other in zip(pieces.history, whole.history, strict=True):
        timeless = {"seconds": 0, "train_seconds": 0}
        assert one | timeless == other | timeless
    assert pieces.model.b.weight.is_contiguous()
    assert json.loads((tmp_path / "pieces/run.json").read_text())["execution"]["memory_format"] == "channels_last"
    ours, theirs = (hgnp.load(tmp_path / name, Net()).state_dict() for name in ("pieces", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("two_threads")
def test_the_fastest_is_taken_told_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ways, "SECONDS", 0.1)
    sizes = []
    timed = ways.side_by_side

    def watched(calls: Any, **options: Any) -> Any:
        sizes.append(len(calls))
        return timed(calls, **options)

    def net() -> Flat:
        torch.manual_seed(0)
        return Flat(reshape=True, width=12)

    monkeypatch.setattr(ways, "side_by_side", watched)
    told = Notes()
    mine = recipe(execution="measured", keep=0.5)
    first = hgnp.prune(net(), *loaders(), recipe=mine, out=tmp_path / "a", _progress=told)
    info = json.loads((tmp_path / "a/run.json").read_text())
    way = Way(info["execution"]["memory_format"], info["execution"]["threads"])
    assert sizes == [4]
    assert info["execution"]["step_ms"].keys() == {str(way) for way in WAYS}
    assert info["execution"]["step_ms"][str(way)] == min(info["execution"]["step_ms"].values())
    assert info["threads"] == way.threads
    assert told.texts[0].startswith(f"steps run {way}, as measured midway: {way} ")
    force(monkeypatch, way)  # what was drawn at random for measuring is not missed
    again = hgnp.prune(net(), *loaders(), recipe=mine)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in first.history]


def test_what_is_measured_is_a_network_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    step = ways._step

    def watched(net: Any, *rest: Any) -> Any:
        sizes.append([net.a.out_channels, net.b.out_channels, net.c.out_features])
        return step(net, *rest)

    monkeypatch.setattr(ways, "SECONDS", 0.0)
    monkeypatch.setattr(ways, "_step", watched)
    hgnp.prune(made(), *loaders(), recipe=recipe(execution="measured", keep=0.25))
    assert [sum(size) for size in sizes] == [36, 36]  # of 48; 24 are a quarter of the parameters


def test_ways_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "SECONDS", 0.0)
    told = Notes()
    net = Flat(reshape=False, width=12)
    result = hgnp.prune(net, *loaders(), recipe=recipe(execution="measured", keep=0.5), _progress=told)
    assert result.reached
    assert told.texts[0].startswith("channels last is left out: ")
    assert "view size is not compatible" in told.texts[0]
    assert told.texts[1].startswith("steps run contiguous with ")

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ways, "side_by_side", refuse)
        told = Notes()
        assert hgnp.prune(
            made(), *loaders(), recipe=recipe(execution="measured", measure="auto"), _progress=told
        ).reached
        assert told.texts == ["steps run as found, as measuring failed: no room"]

    monkeypatch.setattr(nn.Module, "__deepcopy__", refuse, raising=False)
    told = Notes()
    assert hgnp.prune(made(), *loaders(), recipe=recipe(execution="measured", measure="auto"), _progress=told).reached
    assert told.texts == [
        "nothing is measured, as net cannot be copied and pruned: no room",
        "latency is not measured, as net cannot be copied: no room",
    ]


@pytest.mark.parametrize(
    ("reshape", "width", "last"),
    [(True, ways.WIDE, True), (False, ways.WIDE, False), (True, ways.WIDE - 1, False)],
    ids=["wide", "wide, with a view", "narrow"],
)
def test_the_rule(reshape: bool, width: int, last: bool) -> None:
    seen = []

    def on_epoch(state: Any) -> bool:
        seen.append(state.net.inner.weight.is_contiguous(memory_format=torch.channels_last))
        return True

    torch.manual_seed(0)
    for engine, expected in (("auto", last), ("eager", False)):
        net = Flat(reshape=reshape, width=width)
        told = Notes()
        hgnp.prune(net, *loaders(), recipe=recipe(keep=0.5, execution=engine), on_epoch=on_epoch, _progress=told)
        assert seen.pop() == expected
        failed = [
            text for text in told.texts if text.startswith("steps run as found, as a step with channels last failed: ")
        ]
        assert len(failed) == (engine == "auto" and not reshape)
