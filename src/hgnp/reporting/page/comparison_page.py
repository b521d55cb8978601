"""The page that compares runs."""

import os
from pathlib import Path
from typing import Any

from hgnp.reporting import study_charts
from hgnp.reporting.compare import BaselineComparison, Comparison, Group, SnapshotPoint, Study
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
        "studies": [_study(study, f"study{number}") for number, study in enumerate(comparison.studies, 1)],
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


def _study(study: Study, prefix: str) -> dict[str, Any]:
    axis = metric_axis(study.metric)
    unit = " (%)" if axis.percent else ""
    pairs = {pair.label: pair for pair in study.pairs}
    return {
        "title": study.title,
        "sentences": _sentences(study),
        "summary_header": [
            "group",
            "runs",
            f"mean {study.metric}{unit}",
            "area",
            "area gain (%)",
            "crossings with baseline, κ",
            f"final {study.metric}{unit}",
            "training time per run (s)",
            "hardware",
        ],
        "summary": [*(_summary(study, group, pairs.get(group.label)) for group in study.groups), *_composed(study)],
        "figures": [
            figure_view(figure, prefix, CAPTIONS.get(figure.key, "")) for figure in study_charts.all_charts(study)
        ],
        "levels_caption": f"{study.metric.capitalize()}{unit} at κ, mean ± standard deviation over seeds",
        "levels_header": ["group", *(f"{100 * level:.4g} %" for level in study.levels)],
        "levels": [
            *(_levels(study, group) for group in study.groups if group.curve is not None),
            *([[LABEL, *(axis.show(study.composed_at(level)) for level in study.levels)]] if _composed(study) else []),
        ],
        "snapshots_header": ["group", "requested κ (%)", "kept (%)", f"{study.metric}{unit}", "runs"],
        "snapshots": [_snapshot(study, group, point) for group in study.groups for point in group.snapshots],
        "composed_hybrid": study.composed_hybrid.sentences if study.composed_hybrid else None,
        "notes": study.notes,
    }


def _sentences(study: Study) -> list[str]:
    if study.range is None:
        return []
    low, high = study.range
    sentences = [
        f"Compared over κ from {low:.1%} to {high:.1%}; the baseline is {study.baseline}. Area: under the curve of "
        f"{study.metric} against κ, both as fractions (trapezoidal rule). Area gain: relative to the baseline's area."
    ]
    return [*sentences, " ".join(map(_crossed, study.pairs))]


def _crossed(pair: BaselineComparison) -> str:
    """A single crossing says which group is ahead below it; several mean that the curves are close."""
    if not pair.crossings:
        return f"{pair.label} and {pair.baseline} do not cross."
    if len(pair.crossings) > 1:
        return f"{pair.label} and {pair.baseline} cross {len(pair.crossings)} times."
    side = "ahead of" if pair.crossings[0].ahead_below else "behind"
    return f"Below κ = {pair.crossings[0].kept:.1%} {pair.label} is {side} {pair.baseline}."


def _summary(study: Study, group: Group, pair: BaselineComparison | None) -> list[str]:
    gain = "baseline" if group.label == study.baseline else "–"
    if pair is not None and pair.gain is not None:
        gain = f"{pair.gain:+.2f}".replace("-", "−")
    crossed = summarise_crossings([f"{crossing.kept:.1%}" for crossing in pair.crossings]) if pair else "–"
    used, all_runs = group.curve.count if group.curve else 0, len(group.runs)
    runs = str(used) if used == all_runs else f"{used} of {all_runs}"
    area = "–" if group.area is None else f"{group.area:.4f}"
    mean = metric_axis(study.metric).show(group.mean_metric)
    final = _spread(study.metric, group.final, group.final_spread)
    return [group.label, runs, mean, area, gain, crossed, final, f"{group.seconds:,.1f}", group.hardware]


def _composed(study: Study) -> list[list[str]]:
    """The composed hybrid's row of the summary, if there is a threshold."""
    composed, over = study.composed_hybrid, study.composed_gain
    if composed is None or composed.area is None or study.range is None:
        return []
    low, high = study.range
    shown = "–" if over is None else f"{over:+.2f}".replace("-", "−")
    mean = metric_axis(study.metric).show(composed.area / (high - low))
    return [[f"{LABEL}, κ ≤ {composed.threshold:.1%}", "–", mean, f"{composed.area:.4f}", shown, *"––––"]]


def _levels(study: Study, group: Group) -> list[str]:
    curve = group.curve
    assert curve is not None
    return [group.label, *(_spread(study.metric, curve.at(level), curve.spread_at(level)) for level in study.levels)]


def _snapshot(study: Study, group: Group, point: SnapshotPoint) -> list[str]:
    metric = _spread(study.metric, point.mean, point.spread)
    return [group.label, f"{100 * point.asked:.4g}", f"{100 * point.kept:.2f}", metric, str(point.count)]


def _spread(metric: str, mean: float | None, spread: float | None) -> str:
    axis = metric_axis(metric)
    return axis.show(mean) + ("" if spread is None else f" ± {axis.show(spread)}")
