"""Progress of a run: a bar on a terminal, one plain line per epoch elsewhere, or nothing."""

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Receives a run's progress in this order: start, then batches and epochs, with notes anywhere, then stop."""

    def start(self, info: Mapping[str, Any]) -> None:
        """`info`: the content of run.json, with `epochs_done` and `out`."""

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float | None) -> None:
        """Called at most a few times per second."""

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        """`row`: a line of metrics.jsonl; `left`: estimated seconds until the run ends, if known."""

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def start(self, info: Mapping[str, Any]) -> None: ...

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float | None) -> None: ...

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class LineProgress(SilentProgress):
    """One plain line per epoch, flushed at once: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._metric = "metric"

    def start(self, info: Mapping[str, Any]) -> None:
        self._metric = info.get("metric") or self._metric
        self.note(opening_line(info))

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        values = [f"{name} {value}" for name, value in epoch_figures(row, self._metric)]
        times = [f"{row['seconds']:.1f} s"] + ([f"{format_duration(left)} left"] if left else [])
        self.note("  ".join([f"epoch {row['epoch']:>3} {row['phase']:<8}", *values, *times]))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class BarProgress(SilentProgress):
    """A bar over the epoch's batches, with the figures of the last epoch; on stderr, so that stdout stays clean."""

    def __init__(self, console: Console | None = None) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None
        self._metric = "metric"
        self._last = ""

    def start(self, info: Mapping[str, Any]) -> None:
        self._metric = info.get("metric") or self._metric
        self.note(opening_line(info))
        self._task = self._bars.add_task(f"epoch {info.get('epochs_done', 0)}", total=None, figures="")
        self._bars.start()

    def batch(self, epoch: int, batch: int, batches: int | None, loss: float | None) -> None:
        shown = "" if loss is None else f"loss {loss:.4f}  "
        self._show(f"epoch {epoch}", batch, batches, shown + self._last)

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        known = [f"{name} {value}" for name, value in epoch_figures(row, self._metric) if name != "loss"]
        self._last = "  ".join(known + ([f"{format_duration(left)} left"] if left else []))
        self._show(f"epoch {row['epoch']} {row['phase']}", 1, 1, f"loss {format_loss(row['loss'])}  {self._last}")

    def note(self, text: str) -> None:
        self._bars.console.print(escape(text), highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bars.stop()

    def _show(self, description: str, batch: int, batches: int | None, text: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, description=description, completed=batch, total=batches, figures=text)


def opening_line(info: Mapping[str, Any]) -> str:
    """One line: the network, the method, the device, the folder, and the epoch that the run resumes from."""
    start = info["at_start"]
    name = info.get("name") or info["model"]
    parts = [
        f"{name}: {info['method']}, {start['parameters']:,} parameters, {start['neurons']:,} neurons, {info['device']}"
    ]
    if info.get("start"):
        parts.append(f"from {info['start']}")
    if info.get("epochs_done"):
        parts.append(f"resumed after {info['epochs_done']} epochs")
    if info.get("out"):
        parts.append(f"in {info['out']}")
    return ", ".join(parts)


def epoch_figures(row: Mapping[str, Any], metric: str) -> list[tuple[str, str]]:
    """Loss, metric, κ and radius of an epoch as (name, text); unknown ones are left out."""
    shown = [("loss", format_loss(row["loss"]))]
    if row.get("metric") is not None:
        shown.append((metric, format_metric(row["metric"], metric)))
    shown.append(("kept", f"{row['kept']:.1%}"))
    if row.get("radius") is not None:
        shown.append(("radius", f"{row['radius']:.3g}"))
    return shown


def format_metric(value: float, metric: str) -> str:
    """Accuracy as a percentage, any other metric as a number."""
    return f"{value:.2%}" if metric == "accuracy" else f"{value:.4g}"


def format_loss(value: float | None) -> str:
    """A loss with four decimals; None stands for one that is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Such as "42 s", "3 min 05 s" or "1 h 07 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
