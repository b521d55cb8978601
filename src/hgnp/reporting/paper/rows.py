"""Rows: a number of the paper with the result of runs; and pairs of groups that such results are computed from."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from hgnp.io.runs import Run
from hgnp.reporting import curves
from hgnp.reporting.compare import ComparedExperiment, compare_runs
from hgnp.reporting.curves import Curve
from hgnp.reporting.paper.reported import BY_KEY, METHODS, PaperExperiment
from hgnp.reporting.paper.results import NAMES, PaperGroup, PaperResults
from hgnp.reporting.paper.verdict import NO_VERDICT, NOT_RUN, Measured, Verdict

SECTIONS = {
    "accuracy": "Accuracies and differences in the text",
    "areas": "Area under the curve, and the hybrid",
    "ablation": "Ablation",
    "training": "Training times",
    "inference": "Inference",
    "equal": "Equal accuracy",
}


@dataclass(frozen=True)
class Claim:
    """A number of the paper: its source, value and text."""

    section: str
    source: str
    experiment: PaperExperiment
    what: str
    unit: str
    paper: float | None
    text: str


@dataclass(frozen=True)
class PaperRow:
    """A claim and the result of runs: `ours` and `spread` in the claim's unit, `text` as shown, `runs` the groups used."""

    claim: Claim
    text: str
    ours: float | None = None
    spread: float | None = None
    runs: str = ""
    deviations: tuple[str, ...] = ()
    verdict: Verdict = NO_VERDICT
    command: str = ""
    """The command that produces the result, if not run."""

    def as_dict(self) -> dict[str, Any]:
        """In JSON and CSV types."""
        claim = self.claim
        return {
            "section": claim.section,
            "source": claim.source,
            "experiment": claim.experiment.title,
            "what": claim.what,
            "unit": claim.unit,
            "paper": claim.paper,
            "ours": self.ours,
            "standard_deviation": self.spread,
            "paper_text": claim.text,
            "ours_text": self.text,
            "verdict": self.verdict.word,
            "reason": self.verdict.reason,
            "runs": self.runs,
            "deviations": "; ".join(self.deviations),
            "command": self.command,
        }


def not_run(claim: Claim, command: str) -> PaperRow:
    return PaperRow(claim, "–", verdict=Verdict(NOT_RUN), command=command)


def deviations_of_both(one: PaperGroup, other: PaperGroup) -> tuple[str, ...]:
    """Deviations of two groups; those of only one are prefixed with its name."""
    mine, theirs = one.short, other.short
    return (
        *(each for each in mine if each in theirs),
        *(f"{NAMES[one.variant]}: {each}" for each in mine if each not in theirs),
        *(f"{NAMES[other.variant]}: {each}" for each in theirs if each not in mine),
    )


@dataclass(frozen=True)
class MethodPair:
    """A group of HGNP or the hybrid against one of Taylor, over the κ that both reach."""

    group: PaperGroup
    taylor: PaperGroup
    compared: ComparedExperiment

    @property
    def title(self) -> str:
        return f"{self.group.title} against {self.taylor.title}"

    @cached_property
    def curves(self) -> tuple[Curve, Curve]:
        curves_by_method = {group.method: group.curve for group in self.compared.groups}
        ours, theirs = curves_by_method[self.group.runs[0].method], curves_by_method["taylor"]
        assert ours is not None
        assert theirs is not None
        return ours, theirs

    @property
    def deviations(self) -> tuple[str, ...]:
        return deviations_of_both(self.group, self.taylor)

    def over_seeds(self, number: Callable[[Curve, Curve], float | None]) -> Measured | None:
        """A number computed from the mean curves, with its standard deviation over the seeds that both groups share."""
        theirs = {run.seed: run for run in self.taylor.runs}
        grid = self.curves[0].kept
        each = [
            number(*(curves.mean_curve([one.curve()], grid) for one in (run, theirs[run.seed])))
            for run in self.group.runs
            if run.seed in theirs
        ]
        return _measured(number(*self.curves), each)

    def gap_at(self, kept: float) -> tuple[Measured | None, str]:
        """The difference at κ in percent of Taylor's accuracy, and of which networks: fine-tuned ones if both groups have
        them, otherwise those on the curves, None outside the common range."""
        fine = self.group.finetuned_at(kept), self.taylor.finetuned_at(kept)
        if fine[0] is not None and fine[1] is not None:
            ours, theirs = dict(fine[0]), dict(fine[1])
            mean = curves.gain(*(statistics.mean(metric for _, metric in each) for each in (fine[0], fine[1])))
            each = [curves.gain(metric, theirs[seed]) for seed, metric in ours.items() if seed in theirs]
            return _measured(mean, each), "fine-tuned"
        low, high = self.curves[0].kept[0], self.curves[0].kept[-1]
        if not low <= kept <= high:
            return None, ""
        return self.over_seeds(lambda ours, theirs: curves.gain(ours.at(kept), theirs.at(kept))), "on the curve"

    def gain(self, threshold: float | None = None) -> Measured | None:
        """Area gain in percent of Taylor's; with a threshold, that of the hybrid composed at it."""

        def number(ours: Curve, theirs: Curve) -> float | None:
            area = curves.area(ours) if threshold is None else curves.composed_area(ours, theirs, threshold)
            return curves.gain(area, curves.area(theirs))

        return self.over_seeds(number)


def _measured(mean: float | None, each: Sequence[float | None]) -> Measured | None:
    """The mean with the standard deviation of the seeds' own values."""
    known = [one for one in each if one is not None]
    return None if mean is None else Measured(mean, Measured.of(known).spread if len(known) > 1 else None)


def pairs(results: PaperResults, experiment: PaperExperiment, variant: str = "hgnp") -> tuple[MethodPair, ...]:
    """Each comparable pair of a group of `variant` and one of Taylor, nearest to the paper first."""
    return _pairs(results, experiment.key, variant)


@lru_cache(maxsize=16)  # tables and figures use the same pairs
def _pairs(results: PaperResults, key: str, variant: str) -> tuple[MethodPair, ...]:
    made = []
    for group in results.of(BY_KEY[key], variant):
        for taylor in results.of(BY_KEY[key], "taylor"):
            usable: list[Run] = [run for run in (*group.runs, *taylor.runs) if len(run.curve()) > 1]
            if len(usable) < len(group.runs) + len(taylor.runs):
                continue
            compared = compare_runs(usable).experiments  # several if networks or data differ
            if len(compared) == 1 and compared[0].range is not None:
                made.append(MethodPair(group, taylor, compared[0]))
    return tuple(made)


def study_command(experiment: PaperExperiment, *methods: str) -> str:
    """The command that runs an experiment, or only some of its methods."""
    only = f" --methods {','.join(methods)}" if methods else ""
    start = " --set weights=FILE.safetensors" if experiment.start == "ImageNet" else ""
    return f"hgnp study {experiment.key} --data DIR{only}{start}"


def missing_command(results: PaperResults, experiment: PaperExperiment) -> str:
    """The command for the methods of an experiment that were not run; for all of it, if none was."""
    missing = [method for method in METHODS if not results.of(experiment, method)]
    return study_command(experiment, *(missing if len(missing) < len(METHODS) else ()))


def show(measured: Measured, unit: str = " %", *, sign: bool = False) -> str:
    mean = f"{measured.mean:{'+' if sign else ''}.2f}"
    spread = "" if measured.spread is None else f" ± {measured.spread:.2f}"
    return f"{mean}{spread}{unit}".replace("-", "−")
