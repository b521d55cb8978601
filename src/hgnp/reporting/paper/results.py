"""Runs and timings below a folder, assigned to the paper's experiments."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hgnp.errors import InputError
from hgnp.io import runs
from hgnp.io.atomic import read_json
from hgnp.io.runs import Run
from hgnp.reporting import curves, hybrid
from hgnp.reporting.compare import config_settings, run_settings, same_experiment
from hgnp.reporting.curves import Curve
from hgnp.reporting.paper import deviations as deviate
from hgnp.reporting.paper.deviations import Deviation
from hgnp.reporting.paper.reported import EXPERIMENTS, PaperExperiment

VARIANTS = ("hgnp", "taylor", "no training penalty", "no scoring penalty", "hybrid")
NAMES = {"hgnp": "HGNP", "taylor": "Taylor", "no training penalty": "HGNP with the penalty in scores only",
         "no scoring penalty": "HGNP with the penalty in training only", "hybrid": "Hybrid, switching in training"}  # fmt: skip
NEAR = 0.005
"""Values of κ within half a point count as equal."""


@dataclass(frozen=True)
class PaperGroup:
    """Runs of an experiment that differ only in the seed."""

    experiment: PaperExperiment
    variant: str
    penalty: str
    schedule: str
    runs: tuple[Run, ...]
    """The finished runs; all runs if none is finished."""
    unfinished: tuple[Run, ...]
    deviations: tuple[Deviation, ...]
    """Deviations of `runs`."""

    @property
    def members(self) -> tuple[Run, ...]:
        """Finished and unfinished runs."""
        return (*self.runs, *self.unfinished) if self.finished else self.runs

    @property
    def finished(self) -> bool:
        return self.runs[0].result is not None

    @property
    def label(self) -> str:
        parts = [NAMES.get(self.variant, self.variant), f"{self.penalty} penalty" if self.penalty else ""]
        parts += ["" if self.schedule == "the paper's" else f"{self.schedule} schedule"]
        return ", ".join(part for part in parts if part)

    @property
    def title(self) -> str:
        """The label with the number of seeds, or "unfinished"."""
        count = len(self.runs)
        return f"{self.label} ({f'{count} seed' + 's' * (count > 1) if self.finished else 'unfinished'})"

    @property
    def short(self) -> tuple[str, ...]:
        """Deviations for table cells, without those in the title."""
        named = ("penalty", "seeds")
        shorts = [each.short for each in self.deviations if each.aspect not in named and each.short not in self.label]
        return tuple(dict.fromkeys(shorts))

    @cached_property
    def curve(self) -> Curve | None:
        """The mean curve over the κ that all runs reach."""
        grid = curves.common_grid([run.curve() for run in self.runs])
        return None if grid is None else curves.mean_curve([run.curve() for run in self.runs], grid)

    def finetuned(self) -> dict[float, list[tuple[int | None, float]]]:
        """Mean κ → seed and accuracy of each run, for the final networks and the snapshots."""
        by_value: dict[float, list[tuple[float, tuple[int | None, float]]]] = {}
        for run in self.runs:
            for asked, kept, metric in finetuned(run):
                by_value.setdefault(asked, []).append((kept, (run.seed, metric)))
        return {statistics.mean(kept for kept, _ in each): [pair for _, pair in each] for each in by_value.values()}

    def finetuned_at(self, kept: float) -> list[tuple[int | None, float]] | None:
        """Seed and accuracy of the fine-tuned networks nearest to κ; None if none is within NEAR."""
        found = self.finetuned()
        nearest = min(found, key=lambda place: abs(place - kept), default=None)
        return found[nearest] if nearest is not None and abs(nearest - kept) <= NEAR else None

    @property
    def seconds(self) -> float:
        """Mean training time of a run, without the fine-tuning of snapshots."""
        return statistics.mean(sum(float(row.get("seconds") or 0) for row in run.rows) for run in self.runs)

    @property
    def epoch_seconds(self) -> float | None:
        """Median training time of an epoch of the full network; the first epoch is left out, as it includes set-up."""
        times = [
            row["train_seconds"]
            for run in self.runs
            for row in run.rows[1:]
            if row["phase"] == "warmup" and row.get("train_seconds")
        ]
        return statistics.median(times) if times else None


def finetuned(run: Run) -> list[tuple[float, float, float]]:
    """Requested κ, κ and accuracy of a run's fine-tuned networks: its snapshots and its final network."""
    rows = [(float(row["asked"]), float(row["kept"]), row["metric"]) for row in run.snapshots]
    if run.result is not None and run.recipe.get("finetune_epochs") and run.curve():
        rows.append((float(run.recipe["keep"]), *run.curve()[-1]))
    return [row for row in rows if row[2] is not None]


@dataclass(frozen=True)
class BenchTiming:
    """A row of a bench.json, and its origin."""

    experiment: PaperExperiment
    file: Path
    date: str
    hardware: str
    threads: int | None
    """On a CPU."""
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}, {self.date[:10]}"


@dataclass(frozen=True, eq=False)
class PaperResults:
    """The runs and timings below a folder."""

    folder: Path
    groups: tuple[PaperGroup, ...]
    others: tuple[Run, ...]
    """Runs of other experiments."""
    timings: tuple[BenchTiming, ...]

    def of(self, experiment: PaperExperiment, variant: str | None = None) -> list[PaperGroup]:
        """Groups nearest to the paper first."""
        return [g for g in self.groups if g.experiment is experiment and variant in (None, g.variant)]


def scan(folder: Path) -> PaperResults:
    """Runs and bench files anywhere below `folder`. ValueError if there are none, or if one is damaged."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be a folder with runs below it, got {'a file' if folder.is_file() else 'no such folder'}"
        )
    read, benches = [], []
    for place, inner, files in os.walk(folder):
        inner.sort()
        here = Path(place)
        if "run.json" in files and not _is_snapshot(here):
            read.append(runs.read(here))
        benches += [here / name for name in sorted(files) if name.startswith("bench") and name.endswith(".json")]
    if not read and not benches:
        raise InputError(f"{folder} must hold runs or bench.json files, got none; hgnp run and hgnp study write runs")
    sorted_out: list[tuple[PaperExperiment, str, list[Run]]] = []
    others = []
    for run in read:
        experiment = experiment_of(run)
        if experiment is None:
            others.append(run)
            continue
        settings = json.dumps(run_settings(run), sort_keys=True, default=str)
        for known, theirs, members in sorted_out:
            if known is experiment and theirs == settings and same_experiment(members[0], run):
                members.append(run)
                break
        else:
            sorted_out.append((experiment, settings, [run]))
    groups = [_group(experiment, members) for experiment, _, members in sorted_out]
    groups.sort(key=_distance)
    timings = [timing for file in benches for timing in _timings(file, read)]
    return PaperResults(folder, tuple(groups), tuple(others), tuple(timings))


def experiment_of(run: Run) -> PaperExperiment | None:
    """The experiment with the run's network and data: from config.yaml, or else the model class and number of classes."""
    config, features = config_settings(run), run.info.get("features") or {}
    for experiment in EXPERIMENTS:
        same_data = (
            config["data"] == experiment.data
            if "data" in config
            else features.get("classes") == experiment.features["classes"]
        )
        model = str(config.get("model", run.info.get("model"))).rpartition(":")[2]
        if same_data and model == experiment.model:
            return experiment
    return None


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and (folder.parents[1] / "run.json").is_file()


def _group(experiment: PaperExperiment, members: Sequence[Run]) -> PaperGroup:
    done = [run for run in members if run.result is not None]
    used = tuple(sorted(done or members, key=lambda run: (run.seed is None, run.seed or 0)))
    return PaperGroup(
        experiment,
        deviate.variant(used[0]),
        deviate.penalty(used[0]),
        deviate.schedule(experiment, used[0]),
        used,
        tuple(run for run in members if run.result is None),
        deviate.deviations(experiment, used),
    )


def _distance(group: PaperGroup) -> tuple[int, int, bool, int, int]:
    order = VARIANTS.index(group.variant) if group.variant in VARIANTS else len(VARIANTS)
    stated = sum(not each.open for each in group.deviations)
    return EXPERIMENTS.index(group.experiment), order, not group.finished, stated, -len(group.runs)


def _timings(file: Path, read: Sequence[Run]) -> Iterator[BenchTiming]:
    """A bench file belongs to the run whose folder holds it, or else to the experiment with the same number of parameters."""
    content = read_json(file)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("rows"), list)
        or not isinstance(content.get("devices"), dict)
    ):
        raise InputError(f"{file} must be written by hgnp bench, got another file; rename it, or move it away")
    rows = content["rows"]
    for row in rows:
        if (
            not isinstance(row, dict)
            or not {"network", "variant", "device", "batch", "median_ms", "kept", "parameters"} <= row.keys()
        ):
            raise InputError(
                f"{file}: a row must have network, variant, device, batch, median_ms, kept, parameters, got one that "
                "does not; run hgnp bench again"
            )
    home = next((run for run in read if file.resolve().is_relative_to(run.folder)), None)
    experiment = experiment_of(home) if home else None
    if experiment is None:
        count = next((row["parameters"] for row in rows if row["network"] == "full"), None)
        known = [sample.features["parameters"] for sample in hybrid.PAPER]  # in the order of EXPERIMENTS
        experiment = EXPERIMENTS[known.index(count)] if count in known else None
    if experiment is not None:
        for row in rows:
            hardware = str(content["devices"].get(row["device"], row["device"]))
            threads = content.get("threads") if row["device"] == "cpu" else None
            yield BenchTiming(experiment, file, str(content.get("date", "")), hardware, threads, row)
