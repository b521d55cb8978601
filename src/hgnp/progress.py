"""What is seen of a run while it goes on: a bar on a terminal, one plain line per epoch elsewhere, or nothing."""

import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """What a run tells, in this order: start, then steps and epochs, with notes anywhere, then stop."""

    def start(self, info: Mapping[str, Any]) -> None:
        """`info`: run.json's content, with `epochs_done` and `out`."""

    def step(self, epoch: int, step: int, steps: int | None, loss: float | None) -> None:
        """A few times a second at most."""

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        """`row`: a line of metrics.jsonl; `left`: seconds until the run ends, as far as can be said."""

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Silent:
    def start(self, info: Mapping[str, Any]) -> None: ...

    def step(self, epoch: int, step: int, steps: int | None, loss: float | None) -> None: ...

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Lines(Silent):
    """A plain line an epoch, out at once: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._metric = "metric"

    def start(self, info: Mapping[str, Any]) -> None:
        self._metric = info.get("metric") or self._metric
        self.note(opening(info))

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        values = [f"{name} {value}" for name, value in figures(row, self._metric)]
        times = [f"{row['seconds']:.1f} s"] + ([f"{duration(left)} left"] if left else [])
        self.note("  ".join([f"epoch {row['epoch']:>3} {row['phase']:<8}", *values, *times]))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar(Silent):
    """A bar over the epoch's steps, with what the last epoch came to; on stderr, so that stdout stays clean."""

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
        self.note(opening(info))
        self._task = self._bars.add_task(f"epoch {info.get('epochs_done', 0)}", total=None, figures="")
        self._bars.start()

    def step(self, epoch: int, step: int, steps: int | None, loss: float | None) -> None:
        shown = "" if loss is None else f"loss {loss:.4f}  "
        self._show(f"epoch {epoch}", step, steps, shown + self._last)

    def epoch(self, row: Mapping[str, Any], left: float | None) -> None:
        known = [f"{name} {value}" for name, value in figures(row, self._metric) if name != "loss"]
        self._last = "  ".join(known + ([f"{duration(left)} left"] if left else []))
        self._show(f"epoch {row['epoch']} {row['phase']}", 1, 1, f"loss {number(row['loss'])}  {self._last}")

    def note(self, text: str) -> None:
        self._bars.console.print(escape(text), highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bars.stop()

    def _show(self, description: str, step: int, steps: int | None, text: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, description=description, completed=step, total=steps, figures=text)


def opening(info: Mapping[str, Any]) -> str:
    """One line that says what runs, where, and from where it resumes."""
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


def figures(row: Mapping[str, Any], metric: str) -> list[tuple[str, str]]:
    """What matters of an epoch, by name; what is not known is left out."""
    shown = [("loss", number(row["loss"]))]
    if row.get("metric") is not None:
        shown.append((metric, score(row["metric"], metric)))
    shown.append(("kept", f"{row['kept']:.1%}"))
    if row.get("radius") is not None:
        shown.append(("radius", f"{row['radius']:.3g}"))
    return shown


def score(value: float, metric: str) -> str:
    """Accuracy as a percentage, any other metric as a number."""
    return f"{value:.2%}" if metric == "accuracy" else f"{value:.4g}"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
