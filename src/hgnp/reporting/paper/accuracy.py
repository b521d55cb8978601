"""Rows about accuracy: values in the text, areas and the hybrid (Table 4), the ablation (Figure 5), equal accuracy."""

from collections.abc import Iterator

from hgnp.errors import InputError
from hgnp.reporting import curves, hybrid
from hgnp.reporting.compare import same_experiment
from hgnp.reporting.paper import verdict
from hgnp.reporting.paper.reported import (
    ABLATION_KEPT,
    BY_KEY,
    EQUAL,
    EXPERIMENTS,
    METHODS,
    PaperExperiment,
    StatedAccuracy,
)
from hgnp.reporting.paper.results import NAMES, PaperGroup, PaperResults, finetuned
from hgnp.reporting.paper.rows import (
    Claim,
    MethodPair,
    PaperRow,
    deviations_of_both,
    missing_command,
    not_run,
    pairs,
    show,
    study_command,
)
from hgnp.reporting.paper.verdict import Measured, Verdict

FITTED = "hybrid over Taylor, area, at a threshold fitted on the paper's other experiments"


def accuracy_rows(results: PaperResults) -> Iterator[PaperRow]:
    for experiment in EXPERIMENTS:
        missing = missing_command(results, experiment)
        where = ("accuracy", f"text on {experiment.figure}", experiment)
        for stated in experiment.accuracies:
            what = f"{METHODS[stated.method]}'s accuracy at κ = {stated.kept:g} %"
            claim = Claim(*where, what, "%", stated.value, f"{stated.value:.1f} %")
            made = [_accuracy(claim, group, stated) for group in results.of(experiment, stated.method)]
            yield from [row for row in made if row] or [not_run(claim, missing)]
        matches = pairs(results, experiment)
        for gap in experiment.gaps:
            text = f"{'more than ' if gap.at_least else ''}+{gap.value:g} %"
            claim = Claim(*where, f"HGNP over Taylor at κ = {gap.kept:g} %, relative", "%", gap.value, text)
            judge = verdict.bound if gap.at_least else verdict.signed
            gaps = [(pair, *pair.gap_at(gap.kept / 100)) for pair in matches]
            yield from [
                _paired(claim, pair, ours, judge(gap.value, ours), f", {how}") for pair, ours, how in gaps if ours
            ] or [not_run(claim, missing)]
        for ahead in experiment.ahead:
            claim = Claim(*where, ahead.words, "%", ahead.kept, f"κ < {ahead.kept:g} %")
            yield from [row for pair in matches if (row := _ahead(claim, pair, ahead.kept))] or [
                not_run(claim, missing)
            ]


def areas_rows(results: PaperResults) -> Iterator[PaperRow]:
    for experiment in EXPERIMENTS:
        stated, matches = experiment.areas, pairs(results, experiment)
        where = ("areas", "Table 4", experiment)
        hgnp = Claim(*where, "HGNP over Taylor, area", "%", stated.hgnp, _signed(stated.hgnp))
        hybrid = f"hybrid over Taylor, area, at the paper's threshold κ = {stated.threshold:g} %"
        threshold = Claim(*where, "hybrid's threshold κ", "%", stated.threshold, f"{stated.threshold:.1f} %")

        def hybrids(what: str, experiment: PaperExperiment = experiment) -> Claim:
            value = experiment.areas.hybrid
            return Claim("areas", "Table 4", experiment, what, "%", value, _signed(value))

        if not matches:
            missing = missing_command(results, experiment)
            yield from (not_run(claim, missing) for claim in (hgnp, hybrids(hybrid), threshold))
        for pair in matches:
            composed = pair.compared.composed_hybrid
            assert composed is not None
            yield from _gain(hgnp, pair, None)
            yield from _gain(hybrids(hybrid), pair, stated.threshold / 100)
            predicted = _threshold_from_others(experiment, pair)
            if isinstance(predicted, float):
                yield from _gain(hybrids(FITTED), pair, predicted)
                fitted = f"{100 * predicted:.1f} % fitted"
            else:
                fitted = f"none predicted ({predicted})"
            after = "no crossing" if composed.hindsight is None else f"{100 * composed.hindsight:.1f} % in hindsight"
            ours = 100 * predicted if isinstance(predicted, float) else None
            yield PaperRow(threshold, f"{fitted}; {after}", ours, None, pair.title, pair.deviations)
        for pair in pairs(results, experiment, "hybrid"):
            switched = (
                f"hybrid over Taylor, area, of runs that switch at κ = {pair.group.runs[0].recipe['threshold']:.1%}"
            )
            yield from _gain(hybrids(switched), pair, None)


def _threshold_from_others(experiment: PaperExperiment, pair: MethodPair) -> float | str:
    """The Lasso's threshold, fitted without this experiment also where the runs' data or network differ from the paper's; or
    why none is predicted."""
    own = hybrid.PAPER[EXPERIMENTS.index(experiment)]
    model = hybrid.fit([sample for sample in hybrid.PAPER if sample is not own], left_out=[own])
    try:
        return model.predict(pair.compared.features)
    except InputError as error:
        return str(error)


def ablation_groups(results: PaperResults) -> list[PaperGroup]:
    """Full HGNP and its ablations with the same penalty and schedule, nearest to the paper first; empty unless both exist."""
    experiment = EXPERIMENTS[0]
    for full in results.of(experiment, "hgnp"):
        alike = [
            group
            for variant in ("no training penalty", "no scoring penalty")
            for group in results.of(experiment, variant)
            if (group.penalty, group.schedule) == (full.penalty, full.schedule)
            and same_experiment(group.runs[0], full.runs[0])
        ]
        if alike:
            return [full, *alike]
    return []


def ablation_rows(results: PaperResults) -> Iterator[PaperRow]:
    groups = ablation_groups(results)
    for variant in ("no training penalty", "no scoring penalty"):
        what = f"full HGNP ahead of {NAMES[variant]} ({variant})"
        claim = Claim(
            "ablation", "text on Figure 5", EXPERIMENTS[0], what, "%", ABLATION_KEPT, f"κ < {ABLATION_KEPT:g} %"
        )
        made = [_ablated(claim, groups[0], group) for group in groups if group.variant == variant]
        command = study_command(EXPERIMENTS[0], "hgnp", variant.replace(" ", "-"))
        yield from [row for row in made if row] or [not_run(claim, command)]


def equal_rows(results: PaperResults) -> Iterator[PaperRow]:
    experiment = BY_KEY[EQUAL.experiment]
    what = f"κ at which HGNP's networks have {EQUAL.accuracy:g} %"
    where = ("equal", "text on Table 3", experiment)
    rows = []
    for group in results.of(experiment, "hgnp"):
        fine = [[(kept, metric) for _, kept, metric in finetuned(run)] for run in group.runs]
        for how, points in (("fine-tuned", fine), ("on the curve", [run.curve() for run in group.runs])):
            if min(map(len, points)) > 1:
                claim = Claim(*where, f"{what}, {how}", "%", EQUAL.neurons, f"{EQUAL.neurons:g} %")
                rows.append(
                    _equal(claim, group, [curves.smallest_reaching(each, EQUAL.accuracy / 100) for each in points])
                )
    missing = missing_command(results, experiment)
    yield from rows or [not_run(Claim(*where, what, "%", EQUAL.neurons, f"{EQUAL.neurons:g} %"), missing)]


def _accuracy(claim: Claim, group: PaperGroup, stated: StatedAccuracy) -> PaperRow | None:
    """From fine-tuned networks at this κ if there are any, otherwise from the curve."""
    kept, curve = stated.kept / 100, group.curve
    if (fine := group.finetuned_at(kept)) is not None:
        ours, how = Measured.of([100 * metric for _, metric in fine]), "fine-tuned"
    elif curve is not None and curve.kept[0] <= kept <= curve.kept[-1]:
        spread = curve.spread_at(kept)
        ours, how = Measured(100 * curve.at(kept), None if spread is None else 100 * spread), "on the curve"
    else:
        return None
    judged = _settled(verdict.value(stated.value, ours), group)
    return PaperRow(claim, f"{show(ours)}, {how}", ours.mean, ours.spread, group.title, group.short, judged)


def _paired(claim: Claim, pair: MethodPair, ours: Measured, judged: Verdict, more: str = "") -> PaperRow:
    judged = _settled(judged, pair.group, pair.taylor)
    return PaperRow(claim, show(ours, sign=True) + more, ours.mean, ours.spread, pair.title, pair.deviations, judged)


def _gain(claim: Claim, pair: MethodPair, threshold: float | None) -> Iterator[PaperRow]:
    low, high = pair.curves[0].kept[0], pair.curves[0].kept[-1]
    if (ours := pair.gain(threshold)) is not None and claim.paper is not None:
        judged = verdict.signed(claim.paper, ours)
        yield _paired(claim, pair, ours, judged, f", κ from {100 * low:.1f} to {100 * high:.1f} %")


def _ahead(claim: Claim, pair: MethodPair, kept: float) -> PaperRow | None:
    share = curves.share_ahead(*pair.curves, kept / 100)
    if share is None:
        return None
    crossed = curves.summarise_crossings([f"{100 * each.kept:.1f} %" for each in pair.compared.pairs[0].crossings])
    text = f"{_ahead_on(share, pair.curves[0].kept[0], kept)}; crossings: {crossed}"
    judged = _settled(verdict.ahead(share, _seeds(pair.group, pair.taylor)), pair.group, pair.taylor)
    return PaperRow(claim, text, 100 * share, None, pair.title, pair.deviations, judged)


def _ablated(claim: Claim, full: PaperGroup, other: PaperGroup) -> PaperRow | None:
    each = [[run.curve() for run in group.runs] for group in (full, other)]
    grid = curves.common_grid([*each[0], *each[1]])
    if grid is None:
        return None
    ours, theirs = (curves.mean_curve(points, grid) for points in each)
    share = curves.share_ahead(ours, theirs, ABLATION_KEPT / 100)
    if share is None:
        return None
    judged = _settled(verdict.ahead(share, _seeds(full, other)), full, other)
    runs = f"{full.title} against {other.title}"
    text, both = _ahead_on(share, grid[0], ABLATION_KEPT), deviations_of_both(full, other)
    return PaperRow(claim, text, 100 * share, None, runs, both, judged)


def _equal(claim: Claim, group: PaperGroup, reached: list[tuple[float, bool] | None]) -> PaperRow:
    known = [each for each in reached if each is not None]
    if not known:
        judged = Verdict(verdict.DIFFERS, "never reached") if len(reached) > 1 else verdict.ONE_SEED
        judged = _settled(judged, group)
        return PaperRow(claim, "at no κ", None, None, group.title, group.short, judged)
    ours = Measured.of([100 * kept for kept, _ in known])
    text, judged = show(ours), verdict.value(EQUAL.neurons, ours)
    if len(known) < len(reached):
        text, judged = f"{text} in {len(known)} of {len(reached)} runs", Verdict(verdict.UNDECIDED, "not in every run")
    elif any(end for _, end in known):
        smaller = ours.mean + (ours.spread or 0) < EQUAL.neurons
        judged = (
            Verdict(verdict.DIFFERS, "at a smaller κ") if smaller else Verdict(verdict.UNDECIDED, "the runs end there")
        )
        text = f"at most {text}, where the runs end"
    return PaperRow(claim, text, ours.mean, ours.spread, group.title, group.short, _settled(judged, group))


def _seeds(*groups: PaperGroup) -> int:
    return min(len(group.runs) for group in groups)


def _settled(judged: Verdict, *groups: PaperGroup) -> Verdict:
    """Unfinished runs leave the verdict undecided."""
    return judged if all(group.finished for group in groups) else Verdict(verdict.UNDECIDED, "unfinished")


def _ahead_on(share: float, low: float, kept: float) -> str:
    return f"ahead on {100 * share:.0f} % of κ from {100 * low:.1f} to {kept:g} %"


def _signed(value: float) -> str:
    return f"{value:+.2f} %".replace("-", "−")
