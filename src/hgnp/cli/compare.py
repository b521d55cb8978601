"""`hgnp compare`: compare runs of several methods and seeds."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hgnp.errors import InputError

if TYPE_CHECKING:
    from hgnp.reporting.compare import ComparedExperiment, Comparison
    from hgnp.reporting.composed import Choice
    from hgnp.reporting.curves import Curve


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, of any methods and seeds.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder for page, tables and figures.")] = Path(
        "runs/comparison"
    ),
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Method or label to compare with. Default: taylor if present.")
    ] = None,
    new: Annotated[
        list[str] | None,
        typer.Option(
            "--new",
            metavar="KEY=VALUE",
            help="Feature of a new dataset, such as classes=10; repeatable. Recommends a method for it.",
        ),
    ] = None,
    threshold: Annotated[
        str,
        typer.Option(
            metavar="fit|paper|κ",
            help="κ at which the hybrid switches from Taylor to HGNP: fit (on the other experiments), paper "
            "(predicted from classes and training samples), or a number such as 0.48.",
        ),
    ] = "fit",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Compare runs of several methods. Accuracy against κ, the fraction of parameters kept; relative differences, areas under
    the curve, and the hybrid, which takes Taylor's networks at large κ and HGNP's at small κ."""
    from hgnp.reporting import hybrid, publish

    wanted = _features(new or [])
    comparison = publish.compare(runs, out, baseline=baseline, threshold=_threshold(threshold))
    stream = sys.stderr if as_json else sys.stdout
    show(comparison, stream)
    advice = hybrid.recommend(wanted, comparison.model) if new else None
    if advice is not None:
        print("\nfor the new dataset:", *advice.sentences, sep="\n  ", file=stream)
    print(
        f"\n{out / 'page.html'}  (HTML page; tables (CSV), comparison.json and figures/ are beside it)",
        file=stream,
    )
    if as_json:
        from hgnp.io.atomic import as_json as text

        recommendation = (
            None if advice is None else {"threshold": advice.threshold, "sentences": list(advice.sentences)}
        )
        print(text({**publish.as_dict(comparison, out), "recommendation": recommendation, "out": str(out)}))


def _threshold(given: str) -> "Choice":
    try:
        return float(given)
    except ValueError:
        return cast("Choice", given)  # validated by publish.compare


def _features(given: list[str]) -> dict[str, float]:
    from hgnp.errors import did_you_mean
    from hgnp.reporting.hybrid import FEATURES

    features: dict[str, float] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if name not in FEATURES:
            raise InputError(
                f"--new must be FEATURE=NUMBER, such as classes=10, got {each!r}{did_you_mean(name, FEATURES)}"
            )
        if not equals:
            raise InputError(f"--new must be FEATURE=NUMBER, such as classes=10, got {each!r}")
        try:
            features[name] = float(value)
        except ValueError:
            features[name] = math.nan
        if not math.isfinite(features[name]):
            raise InputError(f"--new {name} must be a finite number, got {value!r}")
    return features


def show(comparison: "Comparison", stream: Any) -> None:
    from rich.console import Console

    console = Console(file=stream, width=None if stream.isatty() else 140)
    for experiment in comparison.experiments:
        console.print(_table(experiment))
        if any(group.snapshots for group in experiment.groups):
            console.print(
                f"{experiment.metric} of fine-tuned snapshots, and the κ they reached", style="italic", markup=False
            )
            console.print(_snapshots(experiment))
        for note in (*(experiment.composed_hybrid.sentences if experiment.composed_hybrid else ()), *experiment.notes):
            console.print(note, markup=False, highlight=False)


def _table(experiment: "ComparedExperiment") -> Any:
    from rich.markup import escape
    from rich.table import Table

    from hgnp.progress import format_metric
    from hgnp.reporting.composed import LABEL
    from hgnp.reporting.curves import summarise_crossings

    pairs = {pair.label: pair for pair in experiment.pairs}
    levels = experiment.levels
    title = escape(f"{experiment.title}: {experiment.metric} at κ")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in (*(f"{level:.0%}" for level in levels), "area gain", "crosses at κ"):
        table.add_column(name, justify="right")
    for group in experiment.groups:
        pair = pairs.get(group.label)
        cells = ["–"] * len(levels)
        if group.curve is not None:
            cells = [_at(group.curve, level, experiment.metric) for level in levels]
        gain = "" if pair is None or pair.gain is None else f"{pair.gain:+.2f} %"
        crossed = "" if pair is None else summarise_crossings([f"{c.kept:.0%}" for c in pair.crossings])
        runs = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
        table.add_row(escape(f"{group.label}{runs}"), *cells, gain, crossed)
    if experiment.composed_hybrid is not None and experiment.composed_hybrid.threshold is not None:
        values = [experiment.composed_at(level) for level in levels]
        over = experiment.composed_gain
        cells = ["–" if value is None else format_metric(value, experiment.metric) for value in values]
        gain = "" if over is None else f"{over:+.2f} %"
        table.add_row(f"{LABEL}, κ ≤ {experiment.composed_hybrid.threshold:.1%}", *cells, gain, "")
    return table


def _snapshots(experiment: "ComparedExperiment") -> Any:
    from rich.markup import escape
    from rich.table import Table

    from hgnp.progress import format_metric

    values = sorted({point.asked for group in experiment.groups for point in group.snapshots}, reverse=True)
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for value in values:
        table.add_column(f"{100 * value:.4g}%", justify="right")
    for group in experiment.groups:
        points = {point.asked: point for point in group.snapshots}
        cells = []
        for value in values:
            point = points.get(value)
            spread = (
                f" ± {format_metric(point.spread, experiment.metric)}" if point and point.spread is not None else ""
            )
            cells.append(
                "–" if point is None else f"{format_metric(point.mean, experiment.metric)}{spread} ({point.kept:.1%})"
            )
        table.add_row(escape(group.label), *cells)
    return table


def _at(curve: "Curve", level: float, metric: str) -> str:
    from hgnp.progress import format_metric

    mean, spread = curve.at(level), curve.spread_at(level)
    return format_metric(mean, metric) + ("" if spread is None else f" ± {format_metric(spread, metric)}")
