"""Sharpness and latency before and after a run: what is measured, how long it may take, and that it disturbs nothing."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.training import measure
from train_cases import Net, loaders, made
from train_cases import recipe as unmeasured

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


recipe = partial(unmeasured, measure="auto")


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any measurement is over time at once."""
    monkeypatch.setattr(measure, "TIME_SHARE", 0.0)
    monkeypatch.setattr(measure, "LEAST_SECONDS", 1e-9)


def test_sharpness_is_that_of_the_first_validation_samples() -> None:
    train, val = loaders()
    result = hgnp.prune(made(), train, val, recipe=recipe(measure="full"))
    x, y = next(iter(val))
    found = hgnp.sharpness(result.model, [(x, y)], tolerance=1e-6)
    assert result.after.sharpness == pytest.approx(found.eigenvalues[0], rel=2e-3)
    assert result.before.sharpness is not None
    assert result.before.latency_ms is not None
    assert result.latency is not None
    assert result.latency["repeats"] == 15
    assert result.before.missing == result.after.missing == {}


@pytest.mark.usefixtures("starved")
def test_a_number_that_takes_too_long_is_missing_with_a_reason(tmp_path: Path) -> None:
    result = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run")
    for facts in (result.before, result.after):
        assert facts.sharpness is None
        assert facts.latency_ms is None
        assert facts.missing == dict.fromkeys(("sharpness", "latency_ms"), measure.NO_TIME)
    assert result.latency is None
    again = hgnp.prune(made(), *loaders(), recipe=recipe(), out=tmp_path / "run", resume=True)
    assert again.before == result.before
    assert again.after == result.after
    full = hgnp.prune(made(), *loaders(), recipe=recipe(measure="full"))
    assert full.after.sharpness is not None
    assert full.after.latency_ms is not None


def test_the_time_limit_is_a_fraction_of_the_runs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []
    sharpness = measure.sharpness

    def watched(*args: Any, max_seconds: float, **options: Any) -> Any:
        allowed.append(max_seconds)
        return sharpness(*args, max_seconds=max_seconds, **options)

    monkeypatch.setattr(measure, "sharpness", watched)
    monkeypatch.setattr(measure, "LEAST_SECONDS", 1e-9)
    monkeypatch.setattr(measure, "TIME_SHARE", 100.0)
    result = hgnp.prune(made(), *loaders(), recipe=recipe())
    warmup = sum(row["seconds"] for row in result.history[:2])
    assert allowed == pytest.approx([100 * warmup, 100 * result.seconds])


def test_a_measurement_that_would_take_too_long_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("started")

    for name in ("TIME_SHARE", "LEAST_SECONDS", "MIN_LIMIT"):
        monkeypatch.setattr(measure, name, 1e-9)
    monkeypatch.setattr(measure, "sharpness", never)
    monkeypatch.setattr(measure, "time_interleaved", never)
    result = hgnp.prune(made(), *loaders(), recipe=recipe())
    assert set(result.after.missing) == {"sharpness", "latency_ms"}


def test_measure_none_measures_and_copies_nothing() -> None:
    class Single(Net):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            raise AssertionError("copied")

    torch.manual_seed(0)
    result = hgnp.prune(Single(), *loaders(), recipe=recipe(measure="none"))
    assert (result.after.sharpness, result.after.latency_ms, result.latency) == (None, None, None)
    assert result.before.missing == {"sharpness": 'measure is "none"', "latency_ms": 'measure is "none"'}


class Restless(Net):
    """Draws random numbers and counts its calls in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(F.dropout(x, 0.2, training=True) * (1 + 1e-6 * self.calls))


def test_measuring_does_not_change_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for how in ("full", "auto", "none"):
        if how == "auto":
            monkeypatch.setattr(measure, "LEAST_SECONDS", 1e-9)
        torch.manual_seed(0)
        net = Restless()
        history = hgnp.prune(net, *loaders(), recipe=recipe(measure=how), on_epoch=lambda s: s.epoch == 4).history
        found.append([{key: row[key] for key in ("loss", "val_loss", "widths")} for row in history])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("device", DEVICES)
def test_the_full_size_copy_waits_on_the_cpu_and_is_freed(device: str) -> None:
    class Own(Net):
        pass

    def others() -> list[nn.Module]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is Own and each is not net]

    seen: list[set[str]] = []

    def look(_: Any) -> None:
        seen.append({tensor.device.type for other in others() for tensor in other.state_dict().values()})

    torch.manual_seed(0)
    net = Own().to(device)
    result = hgnp.prune(net, *loaders(), recipe=recipe(execution="eager"), on_epoch=look)
    assert seen == [{"cpu"}] * result.epochs
    assert not others()


def test_a_network_that_refuses_a_batch_of_256_is_not_timed() -> None:
    class Narrow(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 64:
                raise RuntimeError("at most 64 samples fit\ninto this network")
            return super().forward(x)

    torch.manual_seed(0)
    result = hgnp.prune(Narrow(), *loaders(), recipe=recipe(measure="full"))
    assert result.reached
    assert result.after.latency_ms is None
    assert result.after.missing["latency_ms"] == "at most 64 samples fit"


def test_a_measurement_that_takes_too_long_is_not_started_before_the_first_epoch_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[float] = []
    monkeypatch.setattr(measure, "sharpness", lambda *args, max_seconds, **options: started.append(max_seconds))
    monkeypatch.setattr(measure, "LEAST_SECONDS", 1e-9)
    monkeypatch.setattr(measure, "MIN_LIMIT", 1e-9)
    result = hgnp.prune(made(), *loaders(), recipe=recipe(warmup_epochs=0))
    assert started == []
    assert result.before.missing["sharpness"] == measure.NO_TIME
