"""Comparison of runs: mean and spread over seeds, differences from a baseline, areas, crossings, and the composed hybrid.

Runs with the same data, network and metric belong to one *experiment*. Within an experiment, runs that differ only in seed,
name and folder form a *group*. Groups are compared over the κ that all runs of the experiment reach, by linear interpolation,
never extrapolation.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hgnp.curvature.choices import Choices, choose
from hgnp.errors import InputError
from hgnp.experiments import config
from hgnp.io.runs import Run
from hgnp.recipe import Recipe
from hgnp.reporting import curves, hybrid
from hgnp.reporting.composed import Choice, ComposedHybrid, check_choice, compose, lowest_crossing
from hgnp.reporting.curves import Crossing, Curve

LEVELS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)  # κ at which a table states the metric


@dataclass(frozen=True)
class SnapshotPoint:
    """Fine-tuned snapshots of a group at one requested κ: mean κ, mean metric and its standard deviation."""

    asked: float
    kept: float
    mean: float
    spread: float | None
    count: int


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed. `curve` covers the experiment's range; `mean_metric` is its area divided by the range.

    `final` is the mean metric of the finished runs' final networks, with its standard deviation. At the low end of the range
    the curve interpolates between a network just pruned and a fine-tuned one.
    """

    label: str
    method: str
    threshold: float | None
    """Where runs of method "hybrid" switched."""
    runs: tuple[str, ...]
    seeds: tuple[int | None, ...]
    curve: Curve | None
    area: float | None
    mean_metric: float | None
    final: float | None
    final_spread: float | None
    seconds: float
    """Mean training time of a run."""
    hardware: str
    """The devices of the runs."""
    snapshots: tuple[SnapshotPoint, ...] = ()


@dataclass(frozen=True)
class BaselineComparison:
    """A group relative to the baseline: `relative` in percent of the baseline's metric at each κ of `kept` (None where that is
    not positive), `gain` the same for the areas, `crossings` from large κ to small."""

    label: str
    baseline: str
    kept: tuple[float, ...]
    relative: tuple[float | None, ...]
    gain: float | None
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class ComparedExperiment:
    """Runs that can be compared: one network, one dataset, one metric."""

    title: str
    metric: str
    features: Mapping[str, Any]
    range: tuple[float, float] | None
    baseline: str
    groups: tuple[Group, ...]
    pairs: tuple[BaselineComparison, ...]
    composed_hybrid: ComposedHybrid | None
    notes: tuple[str, ...]

    @property
    def levels(self) -> tuple[float, ...]:
        """Both ends of the range and round κ in between."""
        if self.range is None:
            return ()
        low, high = self.range
        return (high, *(level for level in LEVELS if low + 0.005 < level < high - 0.005), low)

    def composed_at(self, kept: float) -> float | None:
        """The composed hybrid's metric at κ; None if there is no threshold."""
        if self.composed_hybrid is None or self.composed_hybrid.threshold is None:
            return None
        label = self.composed_hybrid.hgnp if kept <= self.composed_hybrid.threshold else self.composed_hybrid.taylor
        return next(group.curve.at(kept) for group in self.groups if group.label == label and group.curve)

    @property
    def composed_gain(self) -> float | None:
        """The composed hybrid's area against the baseline's, in percent."""
        area = next(group.area for group in self.groups if group.label == self.baseline)
        if self.composed_hybrid is None or self.composed_hybrid.area is None or area is None:
            return None
        return curves.gain(self.composed_hybrid.area, area)


@dataclass(frozen=True)
class Comparison:
    """The compared experiments, and the threshold model: the Lasso fitted on the paper's experiments and on every one of these
    with a crossing, or the paper's own formula."""

    experiments: tuple[ComparedExperiment, ...]
    runs: tuple[Run, ...]
    model: hybrid.Model
    limitations: tuple[str, ...]


def compare_runs(runs: Sequence[Run], *, baseline: str | None = None, threshold: Choice = "fit") -> Comparison:
    """Compare `runs`. The baseline is the group of that label or method; by default Taylor, else the first group.

    `threshold` is the composed hybrid's: "fit" (a Lasso on the other experiments), "paper" (its two features) or a κ.
    """
    check_choice(threshold)
    if not runs:
        raise InputError("runs must hold at least one run, got none")
    members = _by_experiment(runs)
    titles = _disambiguated([_title(each[0]) for each in members], [_model_and_data(each) for each in members])
    drafts = [_experiment(title, each, baseline) for title, each in zip(titles, members, strict=True)]
    samples = [_sample(experiment) for experiment in drafts]
    experiments = []
    for number, experiment in enumerate(drafts):
        others = [sample for other, sample in enumerate(samples) if other != number and sample is not None]
        experiments.append(_with_hybrid(experiment, (*hybrid.PAPER, *others), threshold))
    if threshold == "paper":
        model = hybrid.fit(features=hybrid.PAPERS_CHOICE)
    else:
        model = hybrid.fit((*hybrid.PAPER, *(sample for sample in samples if sample is not None)))
    return Comparison(tuple(experiments), tuple(runs), model, hybrid.limitations(model))


def _by_experiment(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by experiment. A run without a configuration joins the first one with a configuration that matches otherwise."""
    experiments: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        alike = [each for each in runs if _known(each) == _known(run)]
        experiments.setdefault((_known(run), _text(_model_and_data([run, *alike]))), []).append(run)
    return list(experiments.values())


def same_experiment(one: Run, other: Run) -> bool:
    """Whether two runs have the same network, data and metric."""
    return len(_by_experiment([one, other])) == 1


def _known(run: Run) -> str:
    """Network, data and metric as recorded in run.json."""
    info = run.info
    return _text([info.get("model"), run.metric, info.get("features"), info["at_start"].get("parameters")])


def _model_and_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The network and data settings of the first configuration among the runs."""
    settings = next(filter(None, map(config_settings, runs)), {})
    return {name: value for name, value in settings.items() if _defines_experiment(name)}


def _defines_experiment(name: str) -> bool:
    return name.partition(".")[0] in ("model", "model_args", "data")


def _title(run: Run) -> str:
    return " / ".join(str(part) for part in (run.info.get("name"), run.info.get("model")) if part) or run.title


def _experiment(title: str, runs: Sequence[Run], baseline: str | None) -> ComparedExperiment:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_text([run.label, run_settings(run)]), []).append(run)
    members = list(groups.values())
    called = [group[0].label or _name(group[0]) for group in members]
    labels = _disambiguated(called, [run_settings(group[0]) for group in members])

    notes: list[str] = []
    for run in runs:
        if len(run.curve()) < 2:
            notes.append(f"{run.title} is left out: its curve must have at least 2 points, got {len(run.curve())}.")
        elif run.result is None:
            notes.append(f"{run.title} is {run.state}; it is compared over the κ it reached.")
    used = [[run for run in group if len(run.curve()) >= 2] for group in members]
    for label, group in zip(labels, used, strict=True):
        if len({run.seed for run in group}) < len(group):
            notes.append(f"{label} has several runs with one seed; its spread may be too small.")
    grid = curves.common_grid([run.curve() for group in used for run in group])
    if grid is None:
        notes.append("No range of κ is covered by all runs, so nothing is compared.")

    made = [_group(*parts, grid) for parts in zip(labels, members, used, strict=True)]
    against = _baseline(made, baseline)
    pairs = tuple(
        _pair(group, against) for group in made if group is not against and None not in (group.curve, against.curve)
    )
    first = runs[0].info
    features = {name: (first.get("features") or {}).get(name) for name in hybrid.FEATURES}
    within = None if grid is None else (grid[0], grid[-1])
    return ComparedExperiment(
        title, runs[0].metric, features, within, against.label, tuple(made), pairs, None, tuple(notes)
    )


def _name(run: Run) -> str:
    threshold = run.recipe.get("threshold")
    return run.method if threshold is None else f"{run.method}, threshold={threshold:g}"


OBSERVING = ("snapshots", "measure", "validate_every", "checkpoint_every")
"""Fields of the recipe that do not change how the network trains."""


def run_settings(run: Run) -> dict[str, Any]:
    """The settings that must be equal for runs to be repeats that differ only in the seed. Fields that a run's recipe does not
    list, as its hgnp did not have them yet, have their defaults; so have choices of the flatness penalty."""
    recipe = recipe_of(run)
    choices = {f"flatness.{name}": value for name, value in asdict(choices_of(recipe)).items()}
    fields = {name: value for name, value in recipe.as_dict().items() if name not in (*OBSERVING, "seed", "flatness")}
    rest = {name: value for name, value in config_settings(run).items() if not _defines_experiment(name)}
    return {**fields, **choices, "start": run.info.get("start"), **rest}


def recipe_of(run: Run) -> Recipe:
    """The recipe in run.json, validated."""
    try:
        return Recipe.from_dict(run.recipe)
    except ValueError as error:
        message = str(error) if str(error).startswith("recipe") else f"recipe.{error}"
        raise InputError(f"{run.folder / 'run.json'}: {message}") from error


def choices_of(recipe: Recipe) -> Choices:
    bundle, given = recipe.flatness_choices
    return choose(bundle, **given)


def config_settings(run: Run) -> dict[str, Any]:
    """The settings in config.yaml other than recipe and seed; empty for a run of `hgnp.prune`, which has no configuration."""
    file = run.folder / "config.yaml"
    if run.info.get("name") is None or not file.is_file():
        return {}
    settings = config.read(file).settings()
    return {name: value for name, value in settings.items() if name.partition(".")[0] not in ("recipe", "seed")}


def _disambiguated(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names; equal ones are extended by the settings in which they differ, long values abbreviated where that is enough."""
    brief, full = [], []
    for name, mine in zip(names, settings, strict=True):
        alike = [other for called, other in zip(names, settings, strict=True) if called == name]
        given = [key for key in mine if mine[key] is not None]  # None: not set
        values = {key: str(mine[key]) for key in given if any(other.get(key) != mine[key] for other in alike)}
        full.append(", ".join([name, *(f"{key}={text}" for key, text in values.items())]))
        brief.append(", ".join([name, *(f"{key}={_abbreviated(text)}" for key, text in values.items())]))
    return [short if brief.count(short) == 1 else long for short, long in zip(brief, full, strict=True)]


def _abbreviated(text: str, most: int = 30) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _text(value: Any) -> str:
    """A canonical string: equal values give equal strings."""
    return json.dumps(value, sort_keys=True, default=str)


def _group(label: str, group: Sequence[Run], used: Sequence[Run], grid: Sequence[float] | None) -> Group:
    curve = curves.mean_curve([run.curve() for run in used], grid) if grid and used else None
    area = None if curve is None else curves.area(curve)
    final = [run.curve()[-1][1] for run in used if run.result is not None]
    return Group(
        label=label,
        method=group[0].method,
        threshold=group[0].recipe.get("threshold"),
        runs=tuple(run.title for run in group),
        seeds=tuple(run.seed for run in group),
        curve=curve,
        area=area,
        mean_metric=None if area is None or grid is None else area / (grid[-1] - grid[0]),
        final=statistics.mean(final) if final else None,
        final_spread=statistics.stdev(final) if len(final) > 1 else None,
        seconds=sum(float(row.get("seconds") or 0) for run in group for row in run.rows) / len(group),
        hardware="; ".join(sorted({run.hardware for run in group})),
        snapshots=_snapshots(used),
    )


def _snapshots(runs: Sequence[Run]) -> tuple[SnapshotPoint, ...]:
    """From large κ to small."""
    by_value: dict[float, list[tuple[float, float]]] = {}
    for row in (row for run in runs for row in run.snapshots if row["metric"] is not None):
        by_value.setdefault(row["asked"], []).append((row["kept"], row["metric"]))
    points = []
    for asked, rows in sorted(by_value.items(), reverse=True):
        kept, metrics = zip(*rows, strict=True)
        spread = statistics.stdev(metrics) if len(rows) > 1 else None
        points.append(SnapshotPoint(asked, statistics.mean(kept), statistics.mean(metrics), spread, len(rows)))
    return tuple(points)


def _baseline(groups: Sequence[Group], wanted: str | None) -> Group:
    name = "taylor" if wanted is None else wanted
    for group in (*(g for g in groups if g.label == name), *(g for g in groups if g.method == name)):
        return group
    if wanted is not None:
        raise InputError(f"baseline must be {' or '.join(group.label for group in groups)}, got {wanted!r}")
    return groups[0]


def _pair(group: Group, baseline: Group) -> BaselineComparison:
    mine, other = group.curve, baseline.curve
    assert mine is not None
    assert other is not None
    return BaselineComparison(
        label=group.label,
        baseline=baseline.label,
        kept=mine.kept,
        relative=tuple(curves.gain(a, b) for a, b in zip(mine.mean, other.mean, strict=True)),
        gain=curves.gain(curves.area(mine), curves.area(other)),
        crossings=curves.crossings(mine, other),
    )


def _hgnp_and_taylor(experiment: ComparedExperiment) -> tuple[Group, Group] | None:
    """The first group of HGNP and the first of Taylor, if both have a curve."""
    both = [next((g for g in experiment.groups if g.method == name and g.curve), None) for name in ("hgnp", "taylor")]
    return None if both[0] is None or both[1] is None else (both[0], both[1])


def _sample(experiment: ComparedExperiment) -> hybrid.Sample | None:
    both = _hgnp_and_taylor(experiment)
    if both is None or both[0].curve is None or both[1].curve is None:
        return None
    threshold = lowest_crossing(both[0].curve, both[1].curve)
    if threshold is None:
        return None
    sample = hybrid.Sample(experiment.title, experiment.features, threshold)
    return sample if hybrid.usable(sample) is None else None


def _with_hybrid(experiment: ComparedExperiment, known: Sequence[hybrid.Sample], choice: Choice) -> ComparedExperiment:
    both = _hgnp_and_taylor(experiment)
    if both is None or both[0].curve is None or both[1].curve is None:
        return experiment
    parts = [(group.label, group.curve) for group in both if group.curve is not None]
    composed = compose(parts[0], parts[1], experiment.features, known, choice)
    notes = list(experiment.notes)
    if composed.hindsight is not None:
        missing = hybrid.usable(hybrid.Sample(experiment.title, experiment.features, composed.hindsight))
        notes += [f"These runs are not used as a sample for the threshold model: {missing}."] if missing else []
    return replace(experiment, composed_hybrid=composed, notes=tuple(notes))
