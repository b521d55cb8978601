"""The result of a run as a table: before and after, the target, the files."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hgnp.io.runs import missing_measurements
from hgnp.progress import format_duration, format_metric

FILES = {
    "model.safetensors": "the pruned network, for hgnp.load",
    "page.html": "HTML page of the run",
    "result.json": "the result as JSON",
    "metrics.jsonl": "one line per epoch",
    "config.yaml": "configuration; hgnp run config.yaml repeats the run",
}
UNITS = {"params": "parameters", "neurons": "neurons", "macs": "MACs"}


def print_result(result: Mapping[str, Any], *, out: Path, console: Console) -> None:
    """Print `result`, the content of result.json."""
    table = Table("", "before pruning", "after", "after / before", box=None, padding=(0, 2), header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, before, after, ratio in rows(result):
        table.add_row(escape(name), before, after, ratio)
    console.print(table)
    for line in missing_measurements(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if result.get("snapshots"):
        console.print(snapshots(result))
    console.print(f"\n{summary_line(result)}", highlight=False, markup=False, soft_wrap=True)
    for name, what in FILES.items():
        if (out / name).is_file():
            console.print(f"  {out / name}  ({what})", highlight=False, markup=False, soft_wrap=True)


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    metric = result["metric"]
    latency = result.get("latency") or {}
    how = f" (batch {latency['batch']}, {_threads(latency)})" if latency else ""
    shown = {
        "metric": (metric, lambda value: format_metric(value, metric)),
        "parameters": ("parameters", lambda value: f"{value:,}"),
        "neurons": ("neurons", lambda value: f"{value:,}"),
        "macs": ("MACs", lambda value: f"{value:,}"),
        "latency_ms": (f"ms{how}", lambda value: f"{value:.2f}"),
        "sharpness": ("sharpness", lambda value: f"{value:.3g}"),
    }
    lines = []
    for key, (name, write) in shown.items():
        before, after = result["before"].get(key), result["after"].get(key)
        if before is None and after is None:
            continue
        ratio = f"{after / before:.1%}" if before and after is not None else ""
        if key == "latency_ms" and ratio and before > after > 0:
            ratio = f"{ratio} ({before / after:.1f}× as fast)"
        lines.append((name, "–" if before is None else write(before), "–" if after is None else write(after), ratio))
    return lines


def snapshots(result: Mapping[str, Any]) -> Table:
    """A table of the networks at intermediate κ, each fine-tuned separately."""
    unit = UNITS.get(result["target"]["kind"], result["target"]["kind"])
    table = Table(box=None, padding=(0, 2), header_style="bold", title="\nfine-tuned snapshots", title_justify="left")
    for name in (f"{unit} requested", "kept", escape(result["metric"]), "parameters", "neurons", "MACs"):
        table.add_column(name, justify="right")
    table.add_column("folder")
    for row in result["snapshots"]:
        metric = "–" if row["metric"] is None else format_metric(row["metric"], result["metric"])
        sizes = [f"{row[key]:,}" for key in ("parameters", "neurons", "macs")]
        table.add_row(f"{row['asked']:.2%}", f"{row['got']:.2%}", metric, *sizes, escape(str(row["path"])))
    return table


def summary_line(result: Mapping[str, Any]) -> str:
    """One line: whether the run reached its target, epochs, time."""
    target = result["target"]
    unit = UNITS.get(target["kind"], target["kind"])
    left = f"{target['got']:.2%} of the {unit} kept, {target['asked']:.2%} requested"
    verdict = (
        "target reached" if result["reached"] else f"target NOT reached ({result.get('stopped') or 'unknown reason'})"
    )
    parts = f", resumed {_many(result['parts'] - 1, 'time')}" if result.get("parts", 1) > 1 else ""
    return f"{verdict}: {left}; {_many(result['epochs'], 'epoch')}, {format_duration(result['seconds'])}{parts}"


def _threads(latency: Mapping[str, Any]) -> str:
    if not str(latency.get("device", "cpu")).startswith("cpu"):
        return str(latency["device"])
    return _many(latency["threads"], "thread")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def print_catalog(heading: str, listed: Mapping[str, str]) -> None:
    """Print names and descriptions: a table on a terminal, else separated by tabs."""
    if not sys.stdout.isatty():
        for name, about in listed.items():
            print(f"{name}\t{about}")
        return
    table = Table(heading, "description", box=None, padding=(0, 2, 1, 0))
    table.columns[0].no_wrap = True
    for name, about in listed.items():
        table.add_row(name, about)
    Console().print(table)
