"""The paper's figures drawn from runs, with the values from its text."""

import statistics

from hgnp.reporting import curves
from hgnp.reporting.charts import Axis, Chart, MissingChart, ReferenceLine, Series
from hgnp.reporting.compare import same_experiment
from hgnp.reporting.paper.accuracy import ablation_groups
from hgnp.reporting.paper.reported import ABLATION_KEPT, EXPERIMENTS, METHODS, PaperExperiment
from hgnp.reporting.paper.results import VARIANTS, PaperResults
from hgnp.reporting.paper.rows import missing_command, pairs, study_command
from hgnp.reporting.run_charts import KEPT, metric_axis

PAPERS = {"hgnp": 7, "taylor": 4}
DIFFERENCE = Axis("difference (%)")


def accuracy(results: PaperResults, experiment: PaperExperiment) -> Chart | MissingChart:
    """Mean curves with a band of ± one standard deviation; fine-tuned networks and the paper's values as markers."""
    title = f"{experiment.title}: accuracy against κ"
    series = []
    groups = [group for group in results.of(experiment) if group.curve and group.variant in VARIANTS]
    for number, group in enumerate(groups):
        curve = group.curve
        assert curve is not None
        low = high = None
        if curve.spread is not None:
            low = tuple(mean - spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
            high = tuple(mean + spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
        series.append(
            Series(
                group.title, curve.kept, curve.mean, number, low, high, dashed=group.variant == "taylor", markers=False
            )
        )
    for number, group in enumerate(groups):
        fine = group.finetuned().items()
        if points := sorted((kept, statistics.mean(metric for _, metric in each)) for kept, each in fine):
            kept, means = zip(*points, strict=True)
            series.append(Series(f"{group.label}, fine-tuned", kept, means, number, line=False))
    if not series:
        return MissingChart(title, f"Not run. {study_command(experiment)}")
    for method, name in METHODS.items():
        if points := sorted(
            (each.kept / 100, each.value / 100) for each in experiment.accuracies if each.method == method
        ):
            kept, values = zip(*points, strict=True)
            series.append(Series(f"{name}, paper", kept, values, PAPERS[method], line=False))
    alt = f"accuracy of {', '.join(one.label for one in series)} against the parameters kept"
    return Chart(f"{experiment.key}-accuracy", title, alt, KEPT, metric_axis("accuracy"), tuple(series))


def relative(results: PaperResults, experiment: PaperExperiment) -> Chart | MissingChart:
    """HGNP's accuracy over Taylor's against κ."""
    title = f"{experiment.figure}: {experiment.title}, HGNP over Taylor"
    series = [
        Series(pair.title, pair.compared.pairs[0].kept, pair.compared.pairs[0].relative, number, markers=False)
        for number, pair in enumerate(pairs(results, experiment))
    ]
    if not series:
        return MissingChart(title, f"Not run for both methods. {missing_command(results, experiment)}")
    if points := stated_gaps(experiment):
        kept, gaps = zip(*points, strict=True)
        series.append(Series("paper", kept, gaps, 7, line=False))
    marks = [ReferenceLine(0.0, "Taylor", vertical=False)]
    marks += [ReferenceLine(claim.kept / 100, f"paper: ahead below {claim.kept:g} %") for claim in experiment.ahead]
    alt = f"accuracy of HGNP relative to Taylor's on {experiment.title}, against κ"
    return Chart(f"{experiment.key}-relative", title, alt, KEPT, DIFFERENCE, tuple(series), tuple(marks))


def stated_gaps(experiment: PaperExperiment) -> list[tuple[float, float]]:
    """κ and HGNP's difference from Taylor in percent, from pairs of accuracies or differences in the text."""
    values = {(each.method, each.kept): each.value for each in experiment.accuracies}
    points = {gap.kept: gap.value for gap in experiment.gaps}
    for method, kept in values:
        if method == "hgnp" and ("taylor", kept) in values:
            points[kept] = 100 * (values["hgnp", kept] / values["taylor", kept] - 1)
    return sorted((kept / 100, value) for kept, value in points.items())


def ablation(results: PaperResults) -> Chart | MissingChart:
    """Full HGNP and its two ablations, relative to Taylor; without runs of Taylor, the ablations relative to full HGNP."""
    title = "Figure 5: AlexNet / Flowers-102, HGNP and its ablations"
    groups = [group for group in ablation_groups(results) if group.curve]
    if len(groups) < 2:
        return MissingChart(title, "Not run: full HGNP and an ablation with the same settings are needed.")
    of_taylor = [group for group in results.of(EXPERIMENTS[0], "taylor") if group.curve]
    taylor = next((group for group in of_taylor if same_experiment(group.runs[0], groups[0].runs[0])), None)
    base = taylor or groups[0]
    name = METHODS["taylor"] if taylor else "full HGNP"
    series = []
    for number, group in enumerate(groups):
        if group is base:
            continue
        both = [[run.curve() for run in each.runs] for each in (group, base)]
        if grid := curves.common_grid([*both[0], *both[1]]):
            ours, theirs = (curves.mean_curve(points, grid) for points in both)
            gaps = tuple(curves.gain(a, b) for a, b in zip(ours.mean, theirs.mean, strict=True))
            series.append(Series(group.title, grid, gaps, number, markers=False, dashed=number > 0))
    marks = (
        ReferenceLine(0.0, base.title, vertical=False),
        ReferenceLine(ABLATION_KEPT / 100, f"paper: full is best below {ABLATION_KEPT:g} %"),
    )
    alt = f"accuracy of {', '.join(one.label for one in series)} relative to that of {name}, against κ"
    title = (
        f"{title} over {name}" if taylor else title.replace("HGNP and its ablations", "HGNP's ablations over full HGNP")
    )
    return Chart("ablation", title, alt, KEPT, DIFFERENCE, tuple(series), marks)
