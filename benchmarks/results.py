"""docs/results.md and its figures, from the run folders under results/.

    python benchmarks/results.py [results] [--out docs/results.md]

Reads `run.json`, `metrics.jsonl` and `result.json` of every run (weights are not needed), and what robustness.py and
flatness_penalty.py have left there. What is missing is named with the command that makes it. The rules:

- Each seed, mean and standard deviation (n − 1), parameters and MACs in absolute numbers.
- Comparisons between our own runs are paired by seed, with a 95 % t interval; p-values are Holm's over all endpoints that were
  planned, those without runs included. The first endpoint is the primary one.
- A method *beats* a number that others report only if the whole interval around our mean lies above it. That interval has
  the t interval over seeds and the test set's own 95 % binomial error, added in quadrature.
"""

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from scipy import stats

from hgnp.experiments import studies
from hgnp.io import runs
from hgnp.io.atomic import write
from hgnp.reporting import charts, figures

TEST = 10_000
"""Images of CIFAR-10's test set."""
LEVEL = 0.95


# Statistics


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float
    p: float = math.nan
    """Two-sided, that the mean is 0."""


def t_interval(values: Sequence[float]) -> Interval | None:
    """Mean ± t·s/√n, and the p-value of the t test; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return Interval(mean, mean - half, mean + half, p)


def paired(ours: Mapping[int, float], others: Mapping[int, float]) -> Interval | None:
    """Of the differences at the seeds that both have."""
    return t_interval([ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())])


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values; NaN, an endpoint without runs, counts as 1."""
    known = [1.0 if math.isnan(p) else p for p in ps]
    adjusted, least = [0.0] * len(known), 0.0
    for rank, number in enumerate(sorted(range(len(known)), key=known.__getitem__)):
        least = max(least, min(1.0, (len(known) - rank) * known[number]))
        adjusted[number] = least
    return adjusted


def with_test_error(values: Sequence[float], samples: int = TEST) -> Interval | None:
    """The interval over seeds with the test set's binomial error in quadrature, of accuracies from 0 to 1."""
    found = t_interval(values)
    if found is None:
        return None
    sampled = float(stats.norm.ppf((1 + LEVEL) / 2)) * math.sqrt(found.mean * (1 - found.mean) / samples)
    half = math.hypot(found.high - found.mean, sampled)
    return Interval(found.mean, found.mean - half, found.mean + half)


def verdict(values: Sequence[float], rival: float, samples: int = TEST) -> str:
    found = with_test_error(values, samples)
    if found is None:
        return "too few seeds"
    if found.low > rival:
        return "beats it"
    return "is below it" if found.high < rival else "undecided"


# Runs


@dataclass(frozen=True)
class Point:
    """A fine-tuned network."""

    asked: float
    kept: float
    parameters: int
    macs: int
    accuracy: float
    epochs: int
    """Of training until it was there."""


@dataclass(frozen=True)
class Entry:
    """A run: where it stands, its seed, and its networks by the κ that was asked for."""

    study: str
    network: str
    method: str
    seed: int
    points: tuple[Point, ...]
    full: int
    """MACs of the full network."""


OTHER_DATA = ("flowers102", "cub200")
EARLIER = {"cifar10-best-no-cutout": "without cutout"}
"""Folders with runs of our recipes from before a preset changed, and what was different. Endpoints leave them out."""
OURS = ("cifar10-best", "cifar10-rivals", *EARLIER)
NARROW = "-narrow"
LITERAL = ("resnet18-cifar10", "vgg16-cifar10")
"""The paper's experiments with its literal settings."""


def study_of(folder: Path) -> str:
    """The name of the folder that holds a run's folder; a snapshot is its run's."""
    run = folder.parents[1] if folder.parent.name == "snapshots" else folder
    return run.parent.name


def is_diagnostic(folder: Path) -> bool:
    """Whether a run is one of flatness_penalty.py's, which its records describe."""
    return study_of(folder).startswith("flatness_penalty")


def entries(root: Path) -> list[Entry]:
    """Every finished run below `root`, except for diagnostics and those on the paper's other data; a run's study is its
    folder's parent."""
    finished: list[tuple[Path, runs.Run]] = []
    for file in sorted(root.rglob("result.json")):
        if "snapshots" in file.parts or is_diagnostic(file.parent) or not (file.parent / "run.json").is_file():
            continue
        config = file.parent / "config.yaml"
        if config.is_file():
            settings = yaml.safe_load(config.read_text(encoding="utf-8"))
            if settings["data"] in OTHER_DATA:
                continue
            _check_data(file.parent, settings.get("data_args") or {})
        finished.append((file, runs.read(file.parent)))
    starts = {(study_of(file.parent), run.info.get("name")): run.info["at_start"] for file, run in finished}
    found = []
    for file, run in finished:
        assert run.result is not None
        after, start = run.result["after"], run.info["at_start"]
        if (name := str(run.info.get("name"))).endswith(NARROW):  # its share is that of the network that was narrowed
            start = starts.get((study_of(file.parent), name.removesuffix(NARROW)), start)
        if after["metric"] is None:
            continue
        method, full, kept = run.method, start["macs"], after["parameters"] / start["parameters"]
        asked, epochs = float(run.recipe["keep"]), run.result["epochs"]
        if (file.parent / "rival.json").is_file():  # another library has pruned it before this run fine-tuned it
            rival = json.loads((file.parent / "rival.json").read_text())
            method, full, asked = rival["method"], rival["full_macs"], rival["asked"]
            kept, epochs = after["parameters"] / rival["full_parameters"], epochs + rival["epochs"]
        points = [Point(asked, kept, after["parameters"], after["macs"], after["metric"], epochs)]
        points += [
            Point(
                each["asked"],
                each["kept"],
                each["parameters"],
                each["macs"],
                each["metric"],
                each["epoch"] + 1 + each["epochs"],
            )
            for each in run.snapshots
            if each["metric"] is not None
        ]
        name = str(run.info.get("name") or run.info.get("model"))
        study = study_of(file.parent)
        if study == "holdout":  # settings that are compared have one name and seed
            name = f"{name} ({file.parent.name})"
        elif study in EARLIER:
            name = f"{name} ({EARLIER[study]})"
        found.append(Entry(study, name, method, run.seed or 0, tuple(points), full))
    return found


def _check_data(folder: Path, data_args: Mapping[str, object]) -> None:
    """ValueError for a run whose accuracy would be shown as that of other images."""
    holdout = data_args.get("holdout") or 0
    if bool(holdout) != (study_of(folder) == "holdout"):
        raise ValueError(
            f"{folder} must lie in a folder named holdout if and only if it holds out images, got {holdout=}"
        )


@dataclass(frozen=True)
class Group:
    """One network by one method at one κ, over seeds."""

    study: str
    network: str
    method: str
    asked: float
    points: Mapping[int, Point]
    full: int

    @property
    def accuracies(self) -> dict[int, float]:
        return {seed: point.accuracy for seed, point in self.points.items()}

    @property
    def title(self) -> str:
        whole = f"{self.network}, {self.method}"
        return whole if self.asked == 1 else f"{whole}, κ {100 * self.asked:g} %"


def grouped(found: Sequence[Entry]) -> list[Group]:
    made: dict[tuple[str, str, str, float], dict[int, Point]] = {}
    full: dict[tuple[str, str, str, float], int] = {}
    for entry in found:
        for point in entry.points:
            key = entry.study, entry.network, entry.method, point.asked
            if entry.seed in made.setdefault(key, {}):
                raise ValueError(f"two runs of {', '.join(map(str, key))} have seed {entry.seed}")
            made[key][entry.seed] = point
            full[key] = entry.full
    return [Group(*key, points, full[key]) for key, points in made.items()]


def at_macs(points: Sequence[Point], macs: float) -> float | None:
    """Accuracy at so many MACs, linear in their logarithm between fine-tuned networks; None outside of them."""
    ordered = sorted(points, key=lambda point: point.macs)
    for below, above in itertools.pairwise(ordered):
        if below.macs <= macs <= above.macs and below.macs < above.macs:
            share = math.log(macs / below.macs) / math.log(above.macs / below.macs)
            return below.accuracy + share * (above.accuracy - below.accuracy)
    return next((point.accuracy for point in ordered if point.macs == macs), None)


# What is compared


@dataclass(frozen=True)
class Endpoint:
    about: str
    study: str
    ours: tuple[str, str, float]
    """Network, method, κ asked."""
    others: tuple[str, str, float]


VGG, RESNET, RIVALS = "vgg16-cifar10-best", "resnet18-cifar10-best", ("hgnp", "l2", "bn_scale", "sam", "torch-pruning")
ENDPOINTS = (
    Endpoint("primary: VGG-16 pruned to κ 5 % over a uniformly narrowed one", "cifar10-best",
             (VGG, "taylor", 0.05), (f"{VGG}-narrow", "taylor", 1.0)),
    Endpoint("ResNet-18 pruned to κ 5 % over a uniformly narrowed one", "cifar10-best",
             (RESNET, "taylor", 0.05), (f"{RESNET}-narrow", "taylor", 1.0)),
    *(
        Endpoint(f"VGG-16 at κ {100 * kept:g} %, Taylor over {rival}", "cifar10-rivals",
                 (VGG, "taylor", kept), (VGG, rival, kept))
        for kept in (0.05, 0.1)
        for rival in RIVALS
    ),
)  # fmt: skip
COMMANDS = {
    "cifar10-best": "hgnp study cifar10-best --data DIR --device cuda --jobs 3 --out results/cifar10-best",
    "cifar10-rivals": "hgnp study cifar10-rivals --data DIR --device cuda --jobs 4 --out results/cifar10-rivals",
    "torch-pruning": "python benchmarks/rivals.py --data DIR --device cuda --out results/cifar10-rivals",
    "robustness": "python benchmarks/robustness.py results/cifar10-best results/cifar10-rivals --data DIR --device cuda",
    "flatness_penalty": "python benchmarks/flatness_penalty.py --preset vgg16-cifar10-best --data DIR --device cuda --jobs 4 "
    "--work results/flatness_penalty --out benchmarks/flatness_penalty_cifar10.md",
}


@dataclass(frozen=True)
class Reported:
    """What others report (collected 2026-11-16). Grade: L, their own logs or notebooks; F, quoted by another paper."""

    method: str
    network: str
    kept: float | None
    macs: float | None
    accuracy: float
    start: str
    epochs: str
    augmentation: str
    grade: str
    ours: tuple[str, str, float] | None = None
    """The group of ours that it is compared with."""


UNKNOWN = "not known"
FIELD = (
    Reported("OTOv2", "VGG-16-BN", 0.050, 0.266, 0.9327, "scratch", "300", "mixup", "L", (VGG, "taylor", 0.05)),
    Reported("OTOv1", "VGG-16", None, 0.268, 0.9350, "scratch", UNKNOWN, UNKNOWN, "F", (VGG, "taylor", 0.05)),
    Reported("OTOv2", "VGG-16", None, 0.237, 0.9320, "scratch", UNKNOWN, UNKNOWN, "F", (VGG, "taylor", 0.05)),
    Reported("DCFF", "VGG-16", None, 0.231, 0.9347, "scratch", UNKNOWN, UNKNOWN, "F", (VGG, "taylor", 0.05)),
    Reported("OCSPruner", "VGG-16", None, 0.212, 0.9376, "scratch", UNKNOWN, UNKNOWN, "F", (VGG, "taylor", 0.05)),
    Reported("CHIP", "VGG-16-BN", 0.127, 0.214, 0.9318, "pretrained (93.96 %)", "long fine-tuning", UNKNOWN, "L",
             (VGG, "taylor", 0.05)),
    Reported("OTOv2", "ResNet-18", 0.088, 0.203, 0.9286, "scratch", "300", UNKNOWN, "L", (RESNET, "taylor", 0.05)),
    Reported("HESSO", "ResNet-18", 0.081, None, 0.928, "scratch", "100", UNKNOWN, "L", (RESNET, "taylor", 0.05)),
    Reported("OTOv2", "ResNet-50", 0.036, 0.100, 0.9439, "scratch", "300", UNKNOWN, "L"),
    Reported("CHIP", "ResNet-56", 0.57, 0.53, 0.9416, "pretrained", UNKNOWN, UNKNOWN, "L"),
    Reported("CHIP", "ResNet-56", 0.30, 0.26, 0.9243, "pretrained", UNKNOWN, UNKNOWN, "L"),
    Reported("DepGraph", "ResNet-56", None, 0.47, 0.9377, "pretrained", UNKNOWN, UNKNOWN, "L"),
    Reported("DepGraph", "ResNet-56", None, 0.39, 0.9364, "pretrained", UNKNOWN, UNKNOWN, "L"),
    Reported("OCSPruner", "ResNet-56", 0.57, 0.50, 0.9389, "scratch", "300", UNKNOWN, "L"),
)  # fmt: skip


# The page

PROTOCOL = (
    "Protocol: choices between settings are made on 5,000 held-out training images (`--set data_args.holdout=5000`). Final",
    "runs train on all 50,000, with seeds fixed beforehand, and report their last epoch; no epoch is chosen by its accuracy.",
    "The first settings are those of one exploratory run, whose test accuracy was seen (92.98 %, VGG-16 at κ 5 %, one seed).",
    "Cutout was tried after two final runs of VGG-16 without it, whose test accuracy was seen too (below). Its size was chosen",
    "on held-out images.",
)


def page(root: Path, out: Path, command: str) -> tuple[str, list[charts.Chart]]:
    found = grouped(entries(root))
    own = [group for group in found if group.study in OURS]
    tested = [group for group in found if group.study != "holdout"]
    drawn = [_chart(tested, "kept"), _chart(tested, "macs")]
    lines = [
        "# Results", "",
        f"`{command}`, {datetime.date.today()}, from the runs under `{root.name}/`. Accuracy on CIFAR-10's test images; κ is "
        "the fraction of the parameters that is kept.", "",
        *PROTOCOL, "",
        *_endpoints(own), *_field(own), *_groups("Our recipes", "cifar10-best", own),
        *_groups("Methods at one schedule", "cifar10-rivals", own),
        *_equal_macs(own), *_robustness(root), *_penalty(root), *_paper(tested), *_holdout(found), *_time_beside_steps(root),
        "## Figures", "",
        *(f"![{chart.alt}]({out.stem}/{chart.key}.png)" for chart in drawn), "",
        "## How it is computed", "", *((__doc__ or "").split("The rules:")[1].strip().splitlines()), "",
    ]  # fmt: skip
    return "\n".join(lines), drawn


def _table(head: str, rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    columns = head.split(" | ")
    marks = "|---" * left + "|--:" * (len(columns) - left) + "|"
    return [f"| {head} |", marks, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _range(found: Interval) -> str:
    return f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"


def _missing(key: str) -> list[str]:
    return [f"Not run yet: `{COMMANDS[key]}`.", ""]


def _missing_runs(study: str, groups: Sequence[Group]) -> list[str]:
    """The runs of a built-in study of which these groups have no network."""
    finished = {(group.network, group.method, seed) for group in groups for seed in group.accuracies}
    seeds: dict[str, list[str]] = {}
    for run in studies.study(study).runs():
        if (run.network, run.method, run.seed) not in finished:
            seeds.setdefault(f"{run.network}, {run.method}", []).append(str(run.seed))
    if not groups or not seeds:
        return _missing(study) if seeds else []
    names = "; ".join(f"{name} (seed {', '.join(each)})" for name, each in seeds.items())
    return [f"Not run yet: {names}. `{COMMANDS[study]}`", ""]


def _find(groups: Sequence[Group], study: str, key: tuple[str, str, float]) -> Group | None:
    here = [each for each in groups if each.study == study]
    return next((each for each in here if (each.network, each.method, each.asked) == key), None)


def _endpoints(groups: Sequence[Group]) -> list[str]:
    intervals = []
    for each in ENDPOINTS:
        pair = [_find(groups, each.study, key) for key in (each.ours, each.others)]
        intervals.append(None if None in pair else paired(pair[0].accuracies, pair[1].accuracies))  # type: ignore[union-attr]
    adjusted = holm([math.nan if each is None else each.p for each in intervals])
    rows = []
    for each, interval, p in zip(ENDPOINTS, intervals, adjusted, strict=True):
        if interval is None:
            rows.append([each.about, "not run, or fewer than two seeds", "–", "–"])
        else:
            rows.append([each.about, f"{100 * interval.mean:+.2f}", _range(interval), f"{p:.3f}"])
    return ["## Endpoints", "", "Differences in accuracy, points, paired by seed. The first is the primary endpoint.", "",
            *_table("endpoint | mean difference | 95 % interval | p, Holm", rows)]  # fmt: skip


def _field(groups: Sequence[Group]) -> list[str]:
    rows, intervals = [], {}
    for each in FIELD:
        ours = None if each.ours is None else _find(groups, "cifar10-best", each.ours)
        if ours is not None and (found := with_test_error(list(ours.accuracies.values()))) is not None:
            intervals[ours.network] = (
                f"{ours.network}: {_percent(found.mean)} %, 95 % interval {_percent(found.low)} to {_percent(found.high)} %, "
                "the test set's error included."
            )
        said = "–"
        if each.ours is not None:
            said = "not run" if ours is None else f"{verdict(list(ours.accuracies.values()), each.accuracy)}"
        rows.append([each.method, each.network, each.augmentation, each.start, each.epochs, each.grade, _percent(each.kept, 1),
                     _percent(each.macs, 1), _percent(each.accuracy), said])  # fmt: skip
    return [
        "## What others report", "",
        "CIFAR-10. *Ours* is VGG-16 or ResNet-18 at κ 5 %: random weights, crops, flips, label smoothing, VGG-16 with cutout. "
        "A row at another κ or other MACs is not a like-for-like comparison. Grade L: their own logs or notebooks; F: quoted "
        "by another paper.", "", *(part for line in intervals.values() for part in (line, "")),
        *_table("method | network | augmentation | start | epochs | grade | κ, % | MACs, % | accuracy, % | ours", rows, left=6),
    ]  # fmt: skip


def _groups(title: str, study: str, groups: Sequence[Group]) -> list[str]:
    here = [group for group in groups if group.study == study]
    earlier = [group for group in groups if group.study in EARLIER and group.study.startswith(study)]
    lines = [f"## {title}", "", *_missing_runs(study, here)]
    if earlier:
        lines += ["Brackets name how an earlier version of the preset differed; no endpoint uses these rows.", ""]
    if here or earlier:
        lines += _table(HEAD, [_row(group) for group in (*here, *earlier)])
    if here and study == "cifar10-rivals" and not any(group.method == "torch-pruning" for group in here):
        lines += _missing("torch-pruning")
    return lines


HEAD = "network, method | seeds | accuracy of each, % | mean | s.d. | κ, % | parameters | MACs | MACs, % | epochs"


def _row(group: Group) -> list[str]:
    points = [group.points[seed] for seed in sorted(group.points)]
    values, epochs = [100 * point.accuracy for point in points], [point.epochs for point in points]
    parameters, macs = (statistics.mean(getattr(point, name) for point in points) for name in ("parameters", "macs"))
    return [
        group.title, ", ".join(map(str, sorted(group.points))), ", ".join(f"{value:.2f}" for value in values),
        f"{statistics.mean(values):.2f}", f"{statistics.stdev(values):.2f}" if len(values) > 1 else "–",
        _percent(statistics.mean(point.kept for point in points)),
        f"{parameters:,.0f}", f"{macs / 1e6:.1f} M", _percent(macs / group.full, 1),
        "–".join(map(str, sorted({min(epochs), max(epochs)}))),
    ]  # fmt: skip


def _equal_macs(groups: Sequence[Group]) -> list[str]:
    """Accuracy of each method at the MACs of Taylor at κ 5 %, seed by seed."""
    here = [group for group in groups if group.study == "cifar10-rivals"]
    reference = next((group for group in here if group.method == "taylor" and group.asked == 0.05), None)
    if reference is None:
        return []
    rows = []
    for method in dict.fromkeys(group.method for group in here):
        values = []
        for seed, point in sorted(reference.points.items()):
            mine = [group.points[seed] for group in here if group.method == method and seed in group.points]
            values.append(at_macs(mine, point.macs))
        rows.append([method, ", ".join(_percent(value) for value in values)])
    return [
        "## At equal MACs", "",
        "Accuracy at the MACs of Taylor's network at κ 5 %, seed by seed; linear in log MACs between a method's two networks, "
        "– outside of them.", "",
        *_table("method | accuracy of each seed, %", rows),
    ]  # fmt: skip


def _robustness(root: Path) -> list[str]:
    lines, files = ["## Where flatness could help", ""], sorted(root.rglob("robustness.json"))
    if not files:
        return [*lines, *_missing("robustness")]
    made: dict[tuple[str, str, str, float], list[dict[str, float]]] = {}
    for file in files:
        facts = json.loads(file.read_text())
        key = study_of(file.parent), facts["network"], facts["method"], facts["kept_asked"]
        made.setdefault(key, []).append(facts["accuracy"])
    names = list(dict.fromkeys(name for each in made.values() for facts in each for name in facts))
    rows = []
    for (study, network, method, kept), each in made.items():
        values = [[facts[name] for facts in each if name in facts] for name in names]
        cells = [_percent(statistics.mean(value) if value else None, 1) for value in values]
        rows.append([study, f"{network}, {method}, κ {100 * kept:g} %", str(len(each)), *cells])
    head = " | ".join(["study", "network", "seeds", *names])
    return [*lines, "Mean accuracy over seeds, %.", "", *_table(head, rows, left=2)]


def _penalty(root: Path) -> list[str]:
    file = root / "flatness_penalty" / "records.jsonl"
    if not file.is_file():
        return ["## The flatness penalty", "", *_missing("flatness_penalty")]
    facts: dict[str, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        facts |= json.loads(line)
    made: dict[str, dict[int, dict[str, float]]] = {}
    for name, value in facts.items():
        if name.startswith("c "):
            _, variant, seed = name.split(" ")
            made.setdefault(variant, {})[int(seed)] = value
    plain, times, rows = made.get("mu=0", {}), facts.get("d", {}), []
    for variant, each in made.items():
        seeds = sorted(each.keys() & plain.keys())
        accuracy = t_interval([each[s]["metric"] - plain[s]["metric"] for s in seeds])
        rows.append([
            variant, str(len(seeds)),
            *(log_interval([each[s][mode] / plain[s][mode] for s in seeds]) for mode in ("training", "evaluation")),
            "–" if accuracy is None else f"{100 * accuracy.mean:+.2f} ({_range(accuracy)})",
            *(f"{times[variant] / times[base]:.2f}" if {variant, base} <= times.keys() else "–" for base in ("mu=0", "sam")),
        ])  # fmt: skip
    return ["## The flatness penalty", "", "Dense training; sharpness over that of μ = 0 (geometric mean) and difference in "
            "accuracy, paired by seed, with 95 % t intervals; time of a training step.", "",
            *_table("training | seeds | sharpness ratio, training mode | evaluation mode | accuracy, points | "
                    "step over μ = 0 | step over SAM", rows)]  # fmt: skip


def log_interval(ratios: Sequence[float]) -> str:
    """The geometric mean with its 95 % interval."""
    found = t_interval([math.log(ratio) for ratio in ratios])
    if found is None:
        return f"{ratios[0]:.2f}" if ratios else "–"
    return f"{math.exp(found.mean):.2f} ({math.exp(found.low):.2f} to {math.exp(found.high):.2f})"


def _paper(groups: Sequence[Group]) -> list[str]:
    here = [group for group in groups if group.study not in (*OURS, "flatness_penalty")]
    if not here:
        return []
    about = (
        "`hgnp paper results/paper` compares these with the paper's own numbers. Snapshots of these runs have what the round "
        "that passed their κ had left (column κ); later versions of hgnp stop at κ itself."
    )
    return ["## The paper's schedule", "", about, "", *_table(HEAD, [_row(group) for group in here])]


def _holdout(groups: Sequence[Group]) -> list[str]:
    here = [group for group in groups if group.study == "holdout"]
    if not here:
        return []
    about = (
        "Trained on 45,000 images. Accuracy on 5,000 held-out training images, not on the test set; the folder under "
        "`results/holdout` in brackets."
    )
    return ["## Choices between settings", "", about, "", *_table(HEAD, [_row(group) for group in here])]


def _time_beside_steps(root: Path) -> list[str]:
    """Shares of the epochs' time that are not training steps."""
    shares: dict[tuple[str, str, str], list[float]] = {}
    for file in sorted(root.rglob("metrics.jsonl")):
        if is_diagnostic(file.parent):
            continue
        run = runs.read(file.parent)
        if "snapshots" in file.parts or run.result is None or (file.parent / "rival.json").is_file():
            continue
        if not all("train_seconds" in row for row in run.rows):
            continue
        key = study_of(file.parent), str(run.info.get("name")), run.method
        whole, steps = (sum(row[name] for row in run.rows) for name in ("seconds", "train_seconds"))
        shares.setdefault(key, []).append(1 - steps / whole)
    if not shares:
        return []
    about = (
        "Rounds and validation, as a fraction of the time of all epochs; the smallest and the largest of the runs. Goal: at "
        "most 10 %. Checkpoints and the measurements before the first and after the last epoch are not included. "
        "Flowers-102 has three times as many validation as training images, CUB-200-2011 about as many."
    )
    rows = [
        [
            study,
            f"{name}, {method}",
            str(len(each)),
            "–".join(dict.fromkeys(_percent(end(each), 1) for end in (min, max))),
        ]
        for (study, name, method), each in shares.items()
    ]
    return ["## Time outside the training steps", "", about, "",
            *_table("runs of | network, method | runs | share, %", rows, left=2)]  # fmt: skip


def _chart(groups: Sequence[Group], against: str) -> charts.Chart:
    """Accuracy against κ or MACs: ours as means, and what others report."""
    series: list[charts.Series] = []
    made: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        if group.asked == 1 and not group.network.endswith(NARROW):
            continue
        more = " (one schedule)" if group.study == "cifar10-rivals" else ""
        more = " (literal)" if group.network in LITERAL else more
        name = group.network.replace("-cifar10", "") + more
        points = list(group.points.values())
        x = statistics.mean(point.kept if against == "kept" else point.macs / group.full for point in points)
        made.setdefault((name, group.method), []).append((x, statistics.mean(point.accuracy for point in points)))
    for (network, method), points in made.items():
        xs, ys = zip(*sorted(points), strict=True)
        series.append(charts.Series(f"{network}, {method}", xs, ys, len(series)))
    for network in ("VGG-16", "ResNet-18"):
        rivals = [each for each in FIELD if each.network.startswith(network)]
        known = [(each.kept if against == "kept" else each.macs, each.accuracy) for each in rivals]
        pairs = sorted((x, y) for x, y in known if x is not None)
        others = charts.Series(f"{network}, others", *zip(*pairs, strict=True), len(series), line=False)
        series.append(others)
    what = "parameters" if against == "kept" else "MACs"
    return charts.Chart(
        key=against, title=f"CIFAR-10: accuracy against the {what} kept", alt=f"Accuracy against the fraction of {what} kept.",
        x=charts.Axis(f"{what} kept", percent=True, reverse=True), y=charts.Axis("accuracy", percent=True),
        series=tuple(series),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, nargs="?", default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"))
    given = parser.parse_args()
    text, drawn = page(given.root, given.out, " ".join(["python benchmarks/results.py", *sys.argv[1:]]))
    write(given.out, text)
    for file in figures.save(drawn, given.out.with_suffix("")):
        print(file)
    print(given.out)


if __name__ == "__main__":
    main()
