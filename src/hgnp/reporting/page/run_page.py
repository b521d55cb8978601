"""The page about runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgnp.errors import InputError
from hgnp.io.runs import Run, missing_measurements
from hgnp.reporting import run_charts
from hgnp.reporting.page import write_page
from hgnp.reporting.page.plots import figure_view
from hgnp.reporting.run_charts import metric_axis

CAPTIONS = {
    "metric_against_kept": "One point per pruning level: the last epoch at each κ. The last point of a finished run "
    "is the fine-tuned network, which may be more accurate than larger networks that were just pruned. Separate markers are "
    "snapshots, each fine-tuned separately.",
    "layer_widths": "Fraction of each layer's neurons that are left.",
    "radius_curvature": "Means over the steps of an epoch. Curvature above the bound B is penalised.",
    "penalised_blocks": "Fraction of an epoch's steps in which v lay in this layer's block.",
    "seconds": "Scoring, removal, training and validation included.",
}

SIZES = {"parameters": "parameters", "neurons": "neurons", "macs": "MACs per sample"}
MEASURES = {
    "loss": "validation loss",
    "parameters": "parameters",
    "neurons": "neurons",
    "macs": "MACs per sample",
    "sharpness": "sharpness",
    "latency_ms": "latency (ms per batch)",
}


def write_report(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """A page about one or several runs: outcome, charts, before and after, recipe."""
    if not runs:
        raise InputError("runs must hold at least one run, got none")
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    views = [run_view(run, f"run{number}") for number, run in enumerate(runs, 1)]
    return write_page("report.html", {"title": title, "runs": views}, path)


def run_view(run: Run, prefix: str) -> dict[str, Any]:
    figures = [
        figure_view(chart, prefix, CAPTIONS.get(getattr(chart, "key", ""), "")) for chart in run_charts.all_charts(run)
    ]
    return {
        "title": run.title,
        "state": run.state,
        "done": run.result is not None and bool(run.result.get("reached")),
        "lead": run_charts.sentence(run),
        "about": _about(run),
        "before_after": _before_after(run),
        "before_after_note": _note(run),
        "snapshots_header": [
            "requested κ (%)",
            "kept (%)",
            metric_axis(run.metric).heading,
            *SIZES.values(),
            "epochs",
            "folder",
        ],
        "snapshots": [_snapshot(run, row) for row in run.snapshots],
        "figures": figures,
        "recipe": [(name, _plain(value)) for name, value in run.recipe.items()],
        "facts": _facts(run),
    }


def _about(run: Run) -> str:
    seed = "no seed" if run.seed is None else f"seed {run.seed}"
    seconds = sum(float(row.get("seconds") or 0) for row in run.rows)
    parts = [
        f"Method {run.method}",
        seed,
        f"{len(run.rows)} epochs",
        f"{_duration(seconds)} on {run.hardware}",
    ]
    resumed = ((run.result or {}).get("parts") or 1) - 1
    if resumed:
        parts.append(f"resumed {resumed} time{'s' if resumed > 1 else ''}")
    return ", ".join(parts) + "."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _before_after(run: Run) -> list[list[str]]:
    before, after = ((run.result or {}).get(side) or {} for side in ("before", "after"))
    axis = metric_axis(run.metric)
    was, now = before.get("metric"), after.get("metric")
    rows = [[axis.heading, axis.show(was), axis.show(now), _change(was, now, axis.percent)]]
    for key, label in MEASURES.items():
        rows.append([label, _plain(before.get(key)), _plain(after.get(key)), _ratio(before.get(key), after.get(key))])
    return [row for row in rows if row[1:3] != ["–", "–"]]


def _snapshot(run: Run, row: Mapping[str, Any]) -> list[str]:
    sizes = [_plain(row.get(key)) for key in (*SIZES, "epochs", "path")]
    return [
        f"{100 * row['asked']:.4g}",
        f"{100 * row['kept']:.2f}",
        metric_axis(run.metric).show(row["metric"]),
        *sizes,
    ]


def _change(before: Any, after: Any, percent: bool) -> str:
    if not _numbers(before, after):
        return ""
    difference = f"{100 * (after - before):+.2f} points" if percent else f"{after - before:+.4g}"
    return difference.replace("-", "−")


def _ratio(before: Any, after: Any) -> str:
    return f"× {after / before:.3g}" if _numbers(before, after) and before > 0 else ""


def _note(run: Run) -> str:
    how = (run.result or {}).get("latency") or {}
    threads = "1 thread" if how.get("threads") == 1 else f"{how.get('threads')} threads"
    timed = f" Latency: batch {how.get('batch')}, {threads}, {how.get('device')}." if how else ""
    lacking = "".join(f" {line[0].upper()}{line[1:]}." for line in missing_measurements(run.result or {}))
    when = (
        "“Before pruning”: after the warm-up, when the first neurons are removed. It has trained for fewer epochs then."
    )
    return f"{when}{timed}{lacking}"


def _facts(run: Run) -> list[tuple[str, str]]:
    info = run.info
    facts = [(name, _plain(info.get(name))) for name in ("name", "device", "threads", "start")]
    facts += [(name, _plain(value)) for name, value in (info.get("versions") or {}).items()]
    facts += [(name.replace("_", " "), _plain(value)) for name, value in (info.get("features") or {}).items()]
    return facts


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
