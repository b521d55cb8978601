"""The charts of a comparison, for each of its experiments."""

from hgnp.reporting.charts import Axis, Chart, Figure, ReferenceLine, Series
from hgnp.reporting.compare import ComparedExperiment
from hgnp.reporting.run_charts import KEPT, SNAPSHOTS, metric_axis


def all_charts(experiment: ComparedExperiment) -> list[Figure]:
    made = [against_kept(experiment), relative_difference(experiment), hybrid_chart(experiment)]
    return [figure for figure in made if figure is not None]


def against_kept(experiment: ComparedExperiment) -> Chart | None:
    """Mean curves with a band of ± one standard deviation over seeds."""
    series = []
    for number, group in enumerate(experiment.groups):
        if (curve := group.curve) is None:
            continue
        low = high = None
        if curve.spread is not None:
            low = tuple(mean - spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
            high = tuple(mean + spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
        runs = f"{curve.count} runs" if curve.count > 1 else "1 run"
        label = f"{group.label} ({runs})"
        series.append(
            Series(label, curve.kept, curve.mean, number, low, high, dashed=group.label == experiment.baseline)
        )
    if not series:
        return None
    for number, group in enumerate(experiment.groups):
        if group.snapshots:
            kept, means = zip(*((point.kept, point.mean) for point in group.snapshots), strict=True)
            series.append(Series(f"{group.label}, {SNAPSHOTS}", kept, means, number, line=False))
    title = f"{experiment.metric.capitalize()} against κ"
    alt = f"{experiment.metric} of {', '.join(one.label for one in series)} against the parameters kept"
    return Chart("metric_against_kept", title, alt, KEPT, metric_axis(experiment.metric), tuple(series))


def relative_difference(experiment: ComparedExperiment) -> Chart | None:
    """The paper's figure: the difference of each group from the baseline, in percent of the baseline's metric."""
    order = [group.label for group in experiment.groups]
    series = tuple(
        Series(pair.label, pair.kept, pair.relative, order.index(pair.label))
        for pair in experiment.pairs
        if any(value is not None for value in pair.relative)
    )
    if not series:
        return None
    title = f"Relative difference from {experiment.baseline}"
    marks = [ReferenceLine(0.0, experiment.baseline, vertical=False)]
    if len(experiment.pairs) == 1 and len(experiment.pairs[0].crossings) <= 3:  # more labels would overlap
        marks += [ReferenceLine(crossing.kept, f"{crossing.kept:.1%}") for crossing in experiment.pairs[0].crossings]
    alt = (
        f"{experiment.metric} of {', '.join(one.label for one in series)} relative to {experiment.baseline}, against κ"
    )
    axis = Axis("difference (%)")
    return Chart("relative_difference", title, alt, KEPT, axis, series, tuple(marks))


def hybrid_chart(experiment: ComparedExperiment) -> Chart | None:
    """The composed hybrid: which network it uses at each κ, with its threshold or, if none is predicted, in hindsight."""
    if experiment.composed_hybrid is None:
        return None
    threshold = (
        experiment.composed_hybrid.threshold
        if experiment.composed_hybrid.threshold is not None
        else experiment.composed_hybrid.hindsight
    )
    curves = {group.label: group.curve for group in experiment.groups}
    hgnp, taylor = curves[experiment.composed_hybrid.hgnp], curves[experiment.composed_hybrid.taylor]
    if threshold is None or hgnp is None or taylor is None:
        return None
    sources = {"fit": "predicted", "paper": "the paper's", "given": "given"}
    how = (
        sources[experiment.composed_hybrid.source]
        if experiment.composed_hybrid.threshold is not None
        else "in hindsight"
    )
    cut = min(max(threshold, hgnp.kept[0]), hgnp.kept[-1])
    below = (*(kept for kept in hgnp.kept if kept < cut), cut)
    above = (cut, *(kept for kept in hgnp.kept if kept > cut))
    order = [group.label for group in experiment.groups]
    ours, theirs = order.index(experiment.composed_hybrid.hgnp), order.index(experiment.composed_hybrid.taylor)
    series = (
        Series(experiment.composed_hybrid.taylor, taylor.kept, taylor.mean, colour=-1, markers=False),
        Series(experiment.composed_hybrid.hgnp, hgnp.kept, hgnp.mean, colour=-1, markers=False, dashed=True),
        Series("hybrid: HGNP's part", below, tuple(map(hgnp.at, below)), colour=ours, markers=False),
        Series("hybrid: Taylor's part", above, tuple(map(taylor.at, above)), colour=theirs, markers=False),
    )
    alt = f"the composed hybrid takes HGNP's networks up to κ = {threshold:.1%} ({how}) and Taylor's above"
    marks = (ReferenceLine(threshold, f"{threshold:.1%}, {how}"),)
    return Chart("hybrid", "The composed hybrid", alt, KEPT, metric_axis(experiment.metric), series, marks)
