"""Writes pages, tables and figures about run folders: `hgnp report`, `hgnp compare` and `hgnp paper`."""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hgnp.errors import InputError
from hgnp.io import runs
from hgnp.io.atomic import write_csv, write_json
from hgnp.reporting import comparison_charts, curves, figures, run_charts
from hgnp.reporting.charts import MissingChart
from hgnp.reporting.compare import ComparedExperiment, Comparison, compare_runs
from hgnp.reporting.composed import LABEL, Choice
from hgnp.reporting.page.comparison_page import write_comparison
from hgnp.reporting.page.paper_page import write_paper
from hgnp.reporting.page.run_page import write_report
from hgnp.reporting.paper import figures as paper_figures
from hgnp.reporting.paper.report import PaperReport, paper_report
from hgnp.reporting.paper.reported import EXPERIMENTS
from hgnp.reporting.paper.results import scan

Folder = str | os.PathLike[str]


def report(folders: Sequence[Folder], out: Folder | None = None) -> Path:
    """Write `out`/page.html and its figures (PNG, SVG, CSV); for one run `out` is its own folder unless given."""
    read = _read(folders)
    if out is None and len(read) > 1:
        raise InputError(f"out must be a folder for the page of {len(read)} runs, got none; give --out DIR")
    out = read[0].folder if out is None else Path(out)
    if len(read) > 1 or out.resolve() != read[0].folder:
        _not_a_run(out)
    page = write_report(read, out / "page.html")
    for number, run in enumerate(read, 1):
        folder = out / "figures" / ("" if len(read) == 1 else f"{number}-{_file_name(run.title)}")
        figures.save([figure for figure in run_charts.all_charts(run) if not isinstance(figure, MissingChart)], folder)
        figures.save_outcome(run, folder / "outcome.png")
        figures.save_outcome(run, folder / "outcome.svg")
    return page


def compare(
    folders: Sequence[Folder],
    out: Folder,
    *,
    baseline: str | None = None,
    threshold: Choice = "fit",
    names: Sequence[str] | None = None,
) -> Comparison:
    """Write `out`/page.html, comparison.json, summary.csv, curves.csv, snapshots.csv (if there are any) and figures; see
    `compare_runs`. `names`: the label of each run's method."""
    _not_a_run(Path(out))
    read = _read(folders)
    if names is not None:
        read = [dataclasses.replace(run, label=name) for run, name in zip(read, names, strict=True)]
    comparison, out = compare_runs(read, baseline=baseline, threshold=threshold), Path(out)
    write_comparison(comparison, out / "page.html")
    write_json(out / "comparison.json", as_dict(comparison, out))
    _tables(comparison, out)
    for number, experiment in enumerate(comparison.experiments, 1):
        folder = (
            out / "figures" / ("" if len(comparison.experiments) == 1 else f"{number}-{_file_name(experiment.title)}")
        )
        figures.save(comparison_charts.all_charts(experiment), folder)
    return comparison


def paper(results: Folder, out: Folder | None = None) -> tuple[PaperReport, Path]:
    """Write page.html, rows.csv, paper.json and figures about the runs below `results` into `out`, by default results/page."""
    results = Path(results)
    out = results / "page" if out is None else Path(out)
    _not_a_run(out)
    made = paper_report(scan(results))
    write_paper(made, out / "page.html")
    write_json(out / "paper.json", paper_as_dict(made))
    rows = [row.as_dict() for row in made.rows]
    write_csv(out / "rows.csv", list(rows[0]), [list(row.values()) for row in rows])
    charts = [
        make(made.results, experiment)
        for experiment in EXPERIMENTS
        for make in (paper_figures.relative, paper_figures.accuracy)
    ]
    figures.save(
        [chart for chart in (*charts, paper_figures.ablation(made.results)) if not isinstance(chart, MissingChart)],
        out / "figures",
    )
    return made, out


def paper_as_dict(made: PaperReport) -> dict[str, Any]:
    """Counts, rows and groups with their deviations, in JSON types; folders relative to the results."""
    root = made.results.folder.resolve()
    return {
        "counts": made.counts,
        "rows": [row.as_dict() | {"deviations": list(row.deviations)} for row in made.rows],
        "groups": [
            {
                "experiment": group.experiment.key,
                "group": group.title,
                "runs": [Path(os.path.relpath(run.folder, root)).as_posix() for run in group.runs],
                "unfinished": [Path(os.path.relpath(run.folder, root)).as_posix() for run in group.unfinished],
                "deviations": [dataclasses.asdict(each) for each in group.deviations],
            }
            for group in made.results.groups
        ],
    }


def as_dict(comparison: Comparison, out: Folder) -> dict[str, object]:
    """The comparison in JSON types; κ, metrics and areas as fractions, gains in percent.

    Folders are relative to `out`, so that published files contain no absolute paths.
    """
    model = comparison.model
    return {
        "experiments": [dataclasses.asdict(experiment) for experiment in comparison.experiments],
        "model": {**dataclasses.asdict(model), "error": model.error, "error_of_mean": model.error_of_mean},
        "limitations": list(comparison.limitations),
        "runs": [
            {
                "folder": Path(os.path.relpath(run.folder, out)).as_posix(),
                "method": run.method,
                "seed": run.seed,
                "state": run.state,
            }
            for run in comparison.runs
        ],
    }


def _read(folders: Sequence[Folder]) -> list[runs.Run]:
    if not folders:
        raise InputError("folders must name at least one run, got none")
    read = [runs.read(folder) for folder in folders]
    for number, run in enumerate(read):
        if any(run.folder == other.folder for other in read[:number]):
            raise InputError(f"folders must be distinct, got {run.folder} twice")
    return read


def _not_a_run(out: Path) -> None:
    """Refuses a file, and a run's own folder, whose page must not be overwritten."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out must be a folder, got {out}, which is a file; choose another")
    if (out / "run.json").exists():
        raise InputError(f"out must not be the folder of a run, got {out}; choose another")


SUMMARY = (
    "experiment",
    "group",
    "method",
    "runs",
    "kept_low",
    "kept_high",
    "area",
    "mean_metric",
    "gain_percent",
    "crossings",
    "final",
    "final_standard_deviation",
    "seconds",
    "hardware",
    "threshold",
    "threshold_source",
    "gain_over_taylor_percent",
)


def _tables(comparison: Comparison, out: Path) -> None:
    summary, points, snapshots = [], [], []
    for experiment in comparison.experiments:
        summary += [[row.get(name) for name in SUMMARY] for row in _summary(experiment)]
        for group in experiment.groups:
            if group.curve is not None:
                spread = group.curve.spread or (None,) * len(group.curve.kept)
                values = zip(group.curve.kept, group.curve.mean, spread, strict=True)
                points += [[experiment.title, group.label, group.curve.count, *point] for point in values]
            snapshots += [
                [experiment.title, group.label, each.count, each.asked, each.kept, each.mean, each.spread]
                for each in group.snapshots
            ]
    write_csv(out / "summary.csv", list(SUMMARY), summary)
    write_csv(out / "curves.csv", ["experiment", "group", "runs", "kept", "mean", "standard_deviation"], points)
    if snapshots:
        columns = ["experiment", "group", "runs", "asked", "kept", "mean", "standard_deviation"]
        write_csv(out / "snapshots.csv", columns, snapshots)


def _summary(experiment: ComparedExperiment) -> Iterator[dict[str, Any]]:
    """One row per group, and one for the composed hybrid."""
    low, high = experiment.range or (None, None)
    common = {"experiment": experiment.title, "kept_low": low, "kept_high": high}
    pairs = {pair.label: pair for pair in experiment.pairs}
    taylor = next((group.area for group in experiment.groups if group.method == "taylor"), None)

    def gain(area: float | None, other: float | None) -> float | None:
        return None if area is None or other is None else curves.gain(area, other)

    for group in experiment.groups:
        pair = pairs.get(group.label)
        yield common | {
            "group": group.label,
            "method": group.method,
            "runs": len(group.runs),
            "area": group.area,
            "mean_metric": group.mean_metric,
            "gain_percent": pair.gain if pair else None,
            "crossings": " ".join(f"{crossing.kept:.6g}" for crossing in pair.crossings) if pair else "",
            "final": group.final,
            "final_standard_deviation": group.final_spread,
            "seconds": group.seconds,
            "hardware": group.hardware,
            "threshold": group.threshold,
            "threshold_source": None if group.threshold is None else "recipe",
            "gain_over_taylor_percent": None if group.method == "taylor" else gain(group.area, taylor),
        }
    composed = experiment.composed_hybrid
    if composed is not None and composed.area is not None and low is not None and high is not None:
        yield common | {
            "group": LABEL,
            "method": LABEL,
            "area": composed.area,
            "mean_metric": composed.area / (high - low),
            "gain_percent": experiment.composed_gain,
            "threshold": composed.threshold,
            "threshold_source": composed.source,
            "gain_over_taylor_percent": composed.over_taylor,
        }


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "-", title).strip("-.") or "run"
