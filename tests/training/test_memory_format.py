"""Steps run channels last where the rule says so, and compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.progress import SilentProgress
from hgnp.train import prune_and_report
from hgnp.training import memory_format
from train_cases import Net, StopError, loaders, made, recipe, stripes


class Flat(nn.Module):
    """Reads pictures by a view of their memory or, with `reshape`, in any format; wide enough for the rule."""

    def __init__(self, *, reshape: bool, width: int = memory_format.MIN_CHANNELS) -> None:
        super().__init__()
        self.reshape = reshape
        self.first, self.inner = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, width, 2, padding=1)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(width * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.inner(torch.relu(self.first(x)))))
        return self.last(x.flatten(1) if self.reshape else x.view(len(x), -1))


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def narrow_counts_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_format, "MIN_CHANNELS", 1)


def channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def trajectory(**given: Any) -> list[dict[str, Any]]:
    """Of a run in float64 with an optimizer that has been used before and goes through memory as it lies."""
    net = made().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.003, fused=True)
    net(torch.randn(4, 1, 6, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    (x, y), (u, v) = stripes(32), stripes(6, seed=2)
    train = DataLoader(TensorDataset(x.double(), y), batch_size=16, shuffle=True)
    mine = recipe(keep=0.5, warmup_epochs=1, finetune_epochs=1, **given)

    def on_epoch(state: Any) -> None:
        assert channels_last(state.net.b.weight) == (mine.execution == "auto")

    return hgnp.prune(net, train, [(u.double(), v)], recipe=mine, optimizer=optimizer, on_epoch=on_epoch).history


@pytest.mark.parametrize(
    "given",
    [{"mu": 0.01, "bound": 0.0}, {"mu": 0.01, "flatness": "paper"}, {"method": "sam"}, {"method": "taylor"}],
    ids=["hgnp", "paper", "sam", "taylor"],
)
@pytest.mark.usefixtures("narrow_counts_as_wide")
def test_channels_last_gives_the_same_trajectory(given: dict[str, Any]) -> None:
    found, expected = trajectory(execution="auto", **given), trajectory(execution="eager", **given)
    assert sum(row["removed"] > 0 for row in found) > 1
    for one, other in zip(found, expected, strict=True):
        assert one["widths"] == other["widths"]
        assert one["blocks"] == other["blocks"]
        for name in ("loss", "val_loss", "metric", "curvature", "radius"):
            if other[name] is not None:  # plain training has no curvature
                assert one[name] == pytest.approx(other[name], rel=1e-9), name


@pytest.mark.usefixtures("narrow_counts_as_wide")
def test_weights_and_momenta_are_channels_last_during_the_run_only() -> None:
    seen = []

    def on_epoch(state: Any) -> None:
        seen.append([channels_last(t) for t in (net.b.weight, optimizer.state[net.b.weight]["momentum_buffer"])])

    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    hgnp.prune(net, *loaders(), recipe=recipe(), optimizer=optimizer, on_epoch=on_epoch)
    assert seen
    assert all(each == [True, True] for each in seen)
    assert net.b.weight.is_contiguous()
    assert optimizer.state[net.b.weight]["momentum_buffer"].is_contiguous()


@pytest.mark.parametrize("found", [torch.contiguous_format, torch.channels_last])
@pytest.mark.usefixtures("narrow_counts_as_wide")
def test_weights_have_their_original_memory_format_after_a_run_that_fails(found: torch.memory_format) -> None:
    net = made()
    net.to(memory_format=found)  # type: ignore[call-overload]
    with pytest.raises(ArithmeticError, match="the loss is"):
        hgnp.prune(net, *loaders(), recipe=recipe(lr=1e30))
    assert net.b.weight.is_contiguous(memory_format=found)


def test_a_resumed_run_keeps_its_memory_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def go(out: Path, stop_in: int | None = None) -> hgnp.Result:
        def on_epoch(state: Any) -> None:
            assert channels_last(state.net.b.weight)
            if state.epoch == stop_in:
                raise StopError

        def optimizer(p: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(p, lr=0.003, fused=True)

        mine = recipe(mu=0.01, bound=0.0)
        return hgnp.prune(made(), *loaders(), recipe=mine, optimizer=optimizer, out=out, resume=True, on_epoch=on_epoch)

    with monkeypatch.context() as patch:
        patch.setattr(memory_format, "MIN_CHANNELS", 1)
        whole = go(tmp_path / "whole")
        with pytest.raises(StopError):
            go(tmp_path / "pieces", 1)
    with pytest.raises(StopError):  # by the rule, a network as narrow as this one would now keep its memory format
        go(tmp_path / "pieces", 3)
    pieces = go(tmp_path / "pieces")
    for one, other in zip(pieces.history, whole.history, strict=True):
        timeless = {"seconds": 0, "train_seconds": 0}
        assert one | timeless == other | timeless
    assert pieces.model.b.weight.is_contiguous()
    assert json.loads((tmp_path / "pieces/run.json").read_text())["execution"] == {"memory_format": "channels_last"}
    ours, theirs = (hgnp.load(tmp_path / name, Net()).state_dict() for name in ("pieces", "whole"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_network_that_cannot_be_copied_keeps_its_memory_format() -> None:
    class Single(Flat):
        def __deepcopy__(self, memo: object) -> "Single":
            raise MemoryError("no room")

    told = Notes()
    assert prune_and_report(Single(reshape=True), *loaders(), recipe=recipe(keep=0.5), progress=told).reached
    assert told.texts[0] == "the memory format is unchanged, as a step with channels last failed: no room"


@pytest.mark.parametrize(
    ("reshape", "width", "last"),
    [
        (True, memory_format.MIN_CHANNELS, True),
        (False, memory_format.MIN_CHANNELS, False),
        (True, memory_format.MIN_CHANNELS - 1, False),
    ],
    ids=["wide", "wide, with a view", "narrow"],
)
def test_wide_networks_run_channels_last_if_their_code_can(reshape: bool, width: int, last: bool) -> None:
    seen = []

    def on_epoch(state: Any) -> bool:
        seen.append(state.net.inner.weight.is_contiguous(memory_format=torch.channels_last))
        return True

    torch.manual_seed(0)
    for execution, expected in (("auto", last), ("eager", False)):
        net = Flat(reshape=reshape, width=width)
        told = Notes()
        prune_and_report(
            net, *loaders(), recipe=recipe(keep=0.5, execution=execution), on_epoch=on_epoch, progress=told
        )
        assert seen.pop() == expected
        failed = [
            text
            for text in told.texts
            if text.startswith("the memory format is unchanged, as a step with channels last failed: ")
        ]
        assert len(failed) == (execution == "auto" and not reshape)
