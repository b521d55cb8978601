"""Progress of a run: lines, a bar, or nothing."""

import io
from typing import Any

import pytest
from rich.console import Console

from hgnp.progress import BarProgress, LineProgress, Progress, SilentProgress, format_duration

INFO = {
    "name": "demo", "model": "Net", "method": "hgnp", "device": "cpu", "metric": "accuracy", "start": "random weights",
    "at_start": {"parameters": 1234, "neurons": 56, "macs": 7}, "epochs_done": 2, "out": "runs/[x]",
}  # fmt: skip
ROW: dict[str, Any] = {
    "epoch": 2, "phase": "prune", "loss": 0.123456, "metric": 0.9876, "kept": 0.345, "radius": 1.23456, "seconds": 1.5,
}  # fmt: skip


def play(progress: Progress, row: dict[str, Any], left: float | None) -> None:
    progress.start(INFO)
    progress.batch(2, 1, 21, 0.5)
    progress.epoch(row, left)
    progress.note("the page was [written]")
    progress.stop()


def test_line_progress_prints_one_line_per_epoch() -> None:
    stream = io.StringIO()
    play(LineProgress(stream), ROW, 75.0)
    assert stream.getvalue().splitlines() == [
        "demo: hgnp, 1,234 parameters, 56 neurons, cpu, from random weights, resumed after 2 epochs, in runs/[x]",
        "epoch   2 prune     loss 0.1235  accuracy 98.76%  kept 34.5%  radius 1.23  1.5 s  1 min 15 s left",
        "the page was [written]",
    ]


def test_line_progress_leaves_out_unknown_figures() -> None:
    stream = io.StringIO()
    play(LineProgress(stream), {**ROW, "loss": None, "metric": None, "radius": None}, None)
    assert stream.getvalue().splitlines()[1] == "epoch   2 prune     loss not finite  kept 34.5%  1.5 s"


def test_metrics_other_than_accuracy_are_not_percentages() -> None:
    stream = io.StringIO()
    lines = LineProgress(stream)
    lines.start({**INFO, "metric": "psnr"})
    lines.epoch({**ROW, "metric": 31.41592}, None)
    assert "psnr 31.42" in stream.getvalue()


def test_line_progress_prints_to_stdout_and_silent_progress_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    play(SilentProgress(), ROW, None)
    assert capsys.readouterr().out == ""
    play(LineProgress(), ROW, None)
    assert capsys.readouterr().out.count("\n") == 3


def test_the_bar_shows_the_same_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    play(BarProgress(Console(file=stream, force_terminal=True, width=150, color_system=None)), ROW, 75.0)
    shown = stream.getvalue()
    for part in ("demo: hgnp, 1,234 parameters", "in runs/[x]", "epoch 2", "loss 0.1235", "accuracy 98.76%", "kept 34.5%",
                 "radius 1.23", "1 min 15 s left", "the page was [written]"):  # fmt: skip
        assert part in shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
