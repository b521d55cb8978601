"""The page that compares runs."""

import os
from pathlib import Path
from typing import Any

from hgnp.reporting import comparison_charts
from hgnp.reporting.compare import BaselineComparison, ComparedExperiment, Comparison, Group, SnapshotPoint
from hgnp.reporting.composed import LABEL, formula
from hgnp.reporting.curves import summarise_crossings
from hgnp.reporting.hybrid import FEATURES
from hgnp.reporting.page import write_page
from hgnp.reporting.page.plots import figure_view
from hgnp.reporting.run_charts import metric_axis

CAPTIONS = {
    "metric_against_kept": "Bands: ± one standard deviation over seeds. Separate markers: snapshots, each fine-tuned "
    "separately.",
    "relative_difference": "Above zero: better than the baseline. Dotted vertical lines: crossings, if at most three.",
}


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """A page that compares runs: curves, differences, areas, crossings, the hybrid and its limitations."""
    return write_page("comparison.html", comparison_view(comparison), path)


def comparison_view(comparison: Comparison) -> dict[str, Any]:
    model = comparison.model
    return {
        "experiments": [
            _experiment(experiment, f"experiment{number}")
            for number, experiment in enumerate(comparison.experiments, 1)
        ],
        "hybrid": any(experiment.composed_hybrid for experiment in comparison.experiments),
        "limitations": comparison.limitations,
        "formula": f"The threshold: {formula(model)}.",
        "least_squares": model.least_squares,
        "sample_features": [name.replace("_", " ") for name in FEATURES],
        "samples": [
            [
                sample.name,
                f"{100 * sample.threshold:.1f}",
                f"{100 * model.predict(sample.features):.1f}",
                *(f"{sample.features[name]:,}" for name in FEATURES),
            ]
            for sample in model.samples
        ],
        "path": [[", ".join(step.features) or "none", f"{step.penalty:.3g}"] for step in model.path],
        "runs": [
            [
                run.title,
                run.method,
                "–" if run.seed is None else str(run.seed),
                f"{100 * run.rows[-1]['kept']:.1f}" if run.rows else "–",
                metric_axis(run.metric).show(run.curve()[-1][1]) if run.curve() else "–",
                run.state,
            ]
            for run in comparison.runs
        ],
    }


def _experiment(experiment: ComparedExperiment, prefix: str) -> dict[str, Any]:
    axis = metric_axis(experiment.metric)
    unit = " (%)" if axis.percent else ""
    pairs = {pair.label: pair for pair in experiment.pairs}
    return {
        "title": experiment.title,
        "sentences": _sentences(experiment),
        "summary_header": [
            "group",
            "runs",
            f"mean {experiment.metric}{unit}",
            "area",
            "area gain (%)",
            "crossings with baseline, κ",
            f"final {experiment.metric}{unit}",
            "training time per run (s)",
            "hardware",
        ],
        "summary": [
            *(_summary(experiment, group, pairs.get(group.label)) for group in experiment.groups),
            *_composed(experiment),
        ],
        "figures": [
            figure_view(figure, prefix, CAPTIONS.get(figure.key, ""))
            for figure in comparison_charts.all_charts(experiment)
        ],
        "levels_caption": f"{experiment.metric.capitalize()}{unit} at κ, mean ± standard deviation over seeds",
        "levels_header": ["group", *(f"{100 * level:.4g} %" for level in experiment.levels)],
        "levels": [
            *(_levels(experiment, group) for group in experiment.groups if group.curve is not None),
            *(
                [[LABEL, *(axis.show(experiment.composed_at(level)) for level in experiment.levels)]]
                if _composed(experiment)
                else []
            ),
        ],
        "snapshots_header": ["group", "requested κ (%)", "kept (%)", f"{experiment.metric}{unit}", "runs"],
        "snapshots": [_snapshot(experiment, group, point) for group in experiment.groups for point in group.snapshots],
        "composed_hybrid": experiment.composed_hybrid.sentences if experiment.composed_hybrid else None,
        "notes": experiment.notes,
    }


def _sentences(experiment: ComparedExperiment) -> list[str]:
    if experiment.range is None:
        return []
    low, high = experiment.range
    sentences = [
        f"Compared over κ from {low:.1%} to {high:.1%}; the baseline is {experiment.baseline}. Area: under the curve of "
        f"{experiment.metric} against κ, both as fractions (trapezoidal rule). Area gain: relative to the baseline's area."
    ]
    return [*sentences, " ".join(map(_crossed, experiment.pairs))]


def _crossed(pair: BaselineComparison) -> str:
    """A single crossing says which group is ahead below it; several mean that the curves are close."""
    if not pair.crossings:
        return f"{pair.label} and {pair.baseline} do not cross."
    if len(pair.crossings) > 1:
        return f"{pair.label} and {pair.baseline} cross {len(pair.crossings)} times."
    side = "ahead of" if pair.crossings[0].ahead_below else "behind"
    return f"Below κ = {pair.crossings[0].kept:.1%} {pair.label} is {side} {pair.baseline}."


def _summary(experiment: ComparedExperiment, group: Group, pair: BaselineComparison | None) -> list[str]:
    gain = "baseline" if group.label == experiment.baseline else "–"
    if pair is not None and pair.gain is not None:
        gain = f"{pair.gain:+.2f}".replace("-", "−")
    crossed = summarise_crossings([f"{crossing.kept:.1%}" for crossing in pair.crossings]) if pair else "–"
    used, all_runs = group.curve.count if group.curve else 0, len(group.runs)
    runs = str(used) if used == all_runs else f"{used} of {all_runs}"
    area = "–" if group.area is None else f"{group.area:.4f}"
    mean = metric_axis(experiment.metric).show(group.mean_metric)
    final = _spread(experiment.metric, group.final, group.final_spread)
    return [group.label, runs, mean, area, gain, crossed, final, f"{group.seconds:,.1f}", group.hardware]


def _composed(experiment: ComparedExperiment) -> list[list[str]]:
    """The composed hybrid's row of the summary, if there is a threshold."""
    composed, over = experiment.composed_hybrid, experiment.composed_gain
    if composed is None or composed.area is None or experiment.range is None:
        return []
    low, high = experiment.range
    shown = "–" if over is None else f"{over:+.2f}".replace("-", "−")
    mean = metric_axis(experiment.metric).show(composed.area / (high - low))
    return [[f"{LABEL}, κ ≤ {composed.threshold:.1%}", "–", mean, f"{composed.area:.4f}", shown, *"––––"]]


def _levels(experiment: ComparedExperiment, group: Group) -> list[str]:
    curve = group.curve
    assert curve is not None
    return [
        group.label,
        *(_spread(experiment.metric, curve.at(level), curve.spread_at(level)) for level in experiment.levels),
    ]


def _snapshot(experiment: ComparedExperiment, group: Group, point: SnapshotPoint) -> list[str]:
    metric = _spread(experiment.metric, point.mean, point.spread)
    return [group.label, f"{100 * point.asked:.4g}", f"{100 * point.kept:.2f}", metric, str(point.count)]


def _spread(metric: str, mean: float | None, spread: float | None) -> str:
    axis = metric_axis(metric)
    return axis.show(mean) + ("" if spread is None else f" ± {axis.show(spread)}")
