"""Rows about time: training (Table 1) and inference (Tables 2 and 3)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from hgnp.progress import format_duration
from hgnp.reporting.compare import same_experiment
from hgnp.reporting.paper import verdict
from hgnp.reporting.paper.deviations import deviations
from hgnp.reporting.paper.reported import (
    BY_KEY,
    EXPERIMENTS,
    FULL,
    INFERENCE,
    METHODS,
    NEURONS,
    WEIGHTS,
    PaperExperiment,
    StatedInference,
)
from hgnp.reporting.paper.results import BenchTiming, PaperGroup, PaperResults
from hgnp.reporting.paper.rows import Claim, PaperRow, deviations_of_both, missing_command, not_run

KAPPA_TOLERANCE = 0.1
"""Relative. A κ that differs is named beside the time."""
ALEXNET_KEPT = next(row.kept for row in INFERENCE if (row.experiment, row.network) == ("alexnet-flowers", NEURONS))


def training_rows(results: PaperResults) -> Iterator[PaperRow]:
    for experiment in EXPERIMENTS:
        stated = experiment.training
        groups = {
            method: [g for g in results.of(experiment, method) if g.finished and all(r.rows for r in g.runs)]
            for method in METHODS
        }
        for method, name in METHODS.items():
            hours = stated.hours[method]
            text = f"{hours:g} h on {stated.gpus[method]} × {stated.hardware}"
            claim = Claim("training", "Table 1", experiment, f"{name}, to κ = {stated.kept:g} %", "hours", hours, text)
            missing = not_run(claim, missing_command(results, experiment))
            yield from [_trained(claim, group) for group in groups[method]] or [missing]
        yield from _ratios(experiment, groups["hgnp"], groups["taylor"])


def _trained(claim: Claim, group: PaperGroup) -> PaperRow:
    ended, epochs = (
        sum(numbers) / len(group.runs)
        for numbers in ([100 * run.rows[-1]["kept"] for run in group.runs], [len(run.rows) for run in group.runs])
    )
    text = f"{group.seconds:,.0f} s ({format_duration(group.seconds)}) on {_hardware(group)}; "
    text += f"{epochs:.0f} epochs to κ = {ended:.1f} %"
    return PaperRow(claim, text, group.seconds / 3600, None, group.title, group.short)


def _ratios(
    experiment: PaperExperiment, ours: Sequence[PaperGroup], theirs: Sequence[PaperGroup]
) -> Iterator[PaperRow]:
    """Ratios between the runs of two groups that were on the same hardware."""
    hours = experiment.training.hours
    paper = hours["hgnp"] / hours["taylor"]
    whole = Claim("training", "Table 1", experiment, "HGNP's time / Taylor's", "×", paper, f"{paper:.2f} ×")
    step = Claim("training", "not in the paper", experiment, "HGNP's step / plain step, full network", "×", None, "–")
    for every, other in product(ours, theirs):
        both = {run.hardware for run in every.runs} & {run.hardware for run in other.runs}
        if both and same_experiment(every.runs[0], other.runs[0]):
            group, taylor = (_only_on(both, each) for each in (every, other))
            title, named = f"{group.title} against {taylor.title}", deviations_of_both(group, taylor)
            if group.seconds and taylor.seconds:
                ratio = group.seconds / taylor.seconds
                judged = verdict.ratio(paper, ratio)
                yield PaperRow(whole, f"{ratio:.2f} ×", ratio, None, title, named, judged)
            if group.epoch_seconds and taylor.epoch_seconds:
                ratio = group.epoch_seconds / taylor.epoch_seconds
                yield PaperRow(step, f"{ratio:.2f} ×", ratio, None, title, named)


def _only_on(hardware: Collection[str], group: PaperGroup) -> PaperGroup:
    """The group's runs on some hardware."""
    runs = tuple(run for run in group.runs if run.hardware in hardware)
    return replace(group, runs=runs, deviations=deviations(group.experiment, runs))


def inference_rows(results: PaperResults) -> Iterator[PaperRow]:
    """Times, followed by the ratios for each device."""
    places = dict.fromkeys((row.table, row.experiment, row.device) for row in INFERENCE)
    for place in places:
        stated = {row.network: row for row in INFERENCE if (row.table, row.experiment, row.device) == place}
        pruned = _nearest(results, stated[NEURONS])
        timed = {network: _nearest(results, row, beside=pruned) for network, row in stated.items()}
        for network, row in stated.items():
            yield _time(row, timed[network])
        for slow in (FULL, WEIGHTS):
            yield from _faster(stated, timed, slow)


def _nearest(
    results: PaperResults, stated: StatedInference, *, beside: BenchTiming | None = None
) -> BenchTiming | None:
    """The eager time at about the same κ; the paper's batch size is preferred, then the file of `beside`, then the newest."""
    fits = [
        timing
        for timing in results.timings
        if timing.experiment.key == stated.experiment
        and timing.row["median_ms"] is not None
        and timing.row["variant"] == "eager"
        and str(timing.row["device"]).partition(":")[0] == stated.device
        and str(timing.row["network"]).startswith(stated.network)
        and abs(timing.row["kept"] - stated.kept / 100) <= KAPPA_TOLERANCE * stated.kept / 100
    ]
    file = None if beside is None else beside.file
    return max(fits, key=lambda t: (t.row["batch"] == stated.batch, t.file == file, t.date), default=None)


def _time(stated: StatedInference, timing: BenchTiming | None) -> PaperRow:
    what = f"{stated.network}, κ = {stated.kept:g} %, {_place(stated)}, batch {stated.batch:,}"
    claim = _claim(stated, what, "ms", stated.ms, f"{stated.ms:g} ms on {stated.hardware}")
    if timing is None:
        return not_run(claim, _bench_command(stated))
    ms = float(timing.row["median_ms"])
    return PaperRow(claim, f"{ms:.4g} ms on {timing.hardware}", ms, None, timing.name, _differences(stated, timing))


def _faster(
    stated: Mapping[str, StatedInference], timed: Mapping[str, BenchTiming | None], slow: str
) -> Iterator[PaperRow]:
    """The speed-up of the neuron-pruned network; both times must come from one file, that is, from the same conditions."""
    there, here = timed.get(slow), timed.get(NEURONS)
    if there is None or here is None or (there.file, there.row["batch"]) != (here.file, here.row["batch"]):
        return
    row = stated[NEURONS]
    paper, ours = stated[slow].ms / row.ms, there.row["median_ms"] / here.row["median_ms"]
    sizes = f"{slow} at κ = {stated[slow].kept:g} %" if slow == WEIGHTS else slow
    what = f"time of {sizes} / of neuron-pruned at κ = {row.kept:g} %, {_place(row)}"
    claim = _claim(row, what, "×", paper, f"{paper:.2f} ×")
    yield PaperRow(claim, f"{ours:.2f} ×", ours, None, here.name, _differences(row, here), verdict.ratio(paper, ours))


def _claim(stated: StatedInference, what: str, unit: str, paper: float, text: str) -> Claim:
    section = "inference" if stated.table == "Table 2" else "equal"
    return Claim(section, stated.table, BY_KEY[stated.experiment], what, unit, paper, text)


def _place(stated: StatedInference) -> str:
    return "CPU" if stated.device == "cpu" else "GPU"


def _differences(stated: StatedInference, timing: BenchTiming) -> tuple[str, ...]:
    parts = [timing.hardware if timing.threads is None else f"{timing.hardware}, {timing.threads} threads"]
    if timing.row["batch"] != stated.batch:
        parts.append(f"batch {timing.row['batch']:,}")
    if stated.network != FULL and f"{100 * timing.row['kept']:.1f}" != f"{stated.kept:.1f}":
        parts.append(f"κ = {100 * timing.row['kept']:.2f} %")
    if timing.row.get("note"):
        parts.append(str(timing.row["note"]))
    return tuple(parts)


def _bench_command(stated: StatedInference) -> str:
    """The paper's batch sizes on CIFAR-10 are the defaults; AlexNet is timed at a κ other than its study's final one."""
    if stated.experiment == "alexnet-flowers":
        return f"hgnp bench RUN --keep {ALEXNET_KEPT / 100:g} --device {stated.device} --batch {stated.batch}"
    of = "RUN" if stated.table == "Table 2" else "RUN/snapshots/0.144 --weights 0.03"
    return f"hgnp bench {of} --device {stated.device}"


def _hardware(group: PaperGroup) -> str:
    return "; ".join(sorted({run.hardware for run in group.runs}))
