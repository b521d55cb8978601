"""HGNP, its two ablations, Taylor and magnitude on handwritten digits, over seeds: the demo's network, data and schedule.

    python benchmarks/digits.py [--seeds 3] [--out docs/digits] [--runs runs/digits]

A study (`hgnp study`) of `hgnp run demo` with one setting changed. Every run has one thread, and there are as many at once as
there are cores (for so small a network the quickest way). Runs that are there already are not run again. The comparison goes
to `--out`, with a README.md of its numbers.
"""

import argparse
import datetime
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from scipy.stats import ttest_rel

from hgnp.cli.study import StudyLines
from hgnp.experiments.study_plan import StudyPlan, check_states
from hgnp.experiments.study_runs import JobSlots, execute_runs
from hgnp.io import runs
from hgnp.io.atomic import write
from hgnp.reporting import curves, publish
from hgnp.reporting.compare import ComparedExperiment, Comparison, Group

METHODS = {  # name → (name in the table, what differs from the demo)
    "hgnp": ("HGNP, μ = 0.001", {}),
    "no-scoring-penalty": ("HGNP, penalty in training only", {"set": {"recipe.score_mu": 0}}),
    "no-training-penalty": ("HGNP, penalty in scores only", {"set": {"recipe.mu": 0, "recipe.score_mu": 0.001}}),
    "taylor": ("Taylor", {"method": "taylor"}),
    "l2": ("magnitude (L2)", {"method": "l2"}),
}


def run_all(place: Path, seeds: int, side_by_side: int) -> dict[str, list[Path]]:
    methods = {name: changes for name, (_, changes) in METHODS.items()}
    study = {"networks": "demo", "methods": methods, "seeds": seeds}
    planned = StudyPlan.from_dict(study, where="digits", name="digits").runs(device="cpu")
    states = check_states(planned, place)
    missing = [run for run in planned if states[run.name] != "finished"]
    watcher = StudyLines(place, len(planned), len(planned) - len(missing), sys.stdout)
    slots = JobSlots(side_by_side, ({"OMP_NUM_THREADS": "1"},))
    if any(outcome.error is not None for outcome in execute_runs(missing, place, slots, watcher)):
        raise SystemExit(1)
    return {name: [place / run.name for run in planned if run.method == name] for name in METHODS}


def areas(group: Sequence[Path], experiment: ComparedExperiment) -> list[float]:
    """The area under accuracy against κ of every run by itself, over the experiment's range, in percent of a perfect one's."""
    grid = next(one.curve.kept for one in experiment.groups if one.curve is not None)
    each = [curves.area(curves.mean_curve([runs.read(folder).curve()], grid)) for folder in group]
    return [100 * area / (grid[-1] - grid[0]) for area in each]


def cells(group: Group, experiment: ComparedExperiment) -> list[str]:
    assert group.curve is not None
    assert group.final is not None
    shown = [(group.curve.at(level), group.curve.spread_at(level)) for level in experiment.levels[:-1]]
    shown.append((group.final, group.final_spread))  # the curve's low end lies between levels
    return [f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}") for mean, spread in shown]


def finding(differences: Mapping[str, list[float]], chances: Mapping[str, float], one_image: float) -> str:
    """What the numbers show, in words that follow from them: a paired t-test a method, level 5 % shared among them."""
    level = 0.05 / len(chances)
    real = [name for name, chance in chances.items() if chance < level]
    largest = max(differences, key=lambda name: abs(statistics.mean(differences[name])))
    mean, spread = statistics.mean(differences[largest]), statistics.stdev(differences[largest])
    said = (
        f"Significantly different from Taylor in mean accuracy (paired t-test over seeds, p < {level:.4f}): {', '.join(real)}."
        if real
        else f"No method differs significantly from Taylor in mean accuracy "
        f"(paired t-tests over seeds, none below p = {level:.4f})."
    )
    return (
        f"{said} The largest difference is that of {largest}, {signed(mean)} ± {spread:.2f} points between seeds "
        f"(p = {chances[largest]:.2f}). One validation image is {one_image:.2f} points."
    )


def signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def readme(comparison: Comparison, folders: Mapping[str, list[Path]], command: str, took: str) -> str:
    (experiment,) = comparison.experiments
    (taylor,) = [group for group in experiment.groups if group.label == experiment.baseline]
    pairs = {pair.label: pair for pair in experiment.pairs}
    base = areas(folders["taylor"], experiment)
    lines, differences, chances = [], {}, {}
    for (name, (title, _)), group in zip(METHODS.items(), experiment.groups, strict=True):
        mine = areas(folders[name], experiment)
        row = [title, *cells(group, experiment), f"{statistics.mean(mine):.2f} ± {statistics.stdev(mine):.2f}"]
        if group is taylor:
            row += ["baseline", ""]
        else:
            differences[title] = [a - b for a, b in zip(mine, base, strict=True)]
            chances[title] = float(ttest_rel(mine, base).pvalue)
            row += [f"{signed(pairs[group.label].gain or 0.0)} %", f"{chances[title]:.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    heads = ["", *(f"κ {100 * level:.3g} %" for level in experiment.levels[:-1]), "final", "mean", "area gain", "p"]
    low, high = experiment.range or (0.0, 1.0)
    seeds = len(folders["taylor"])
    last = [run.rows[-1]["kept"] for run in comparison.runs]
    finals = [group.final for group in experiment.groups if group.final is not None]
    return "\n".join([
        "# HGNP, Taylor and magnitude on handwritten digits",
        "",
        f"`{command}`, {datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, one thread per run, Python "
        f"{platform.python_version()}, torch {torch.__version__}{took}.",
        "",
        "The demo's network (DigitsNet, on scikit-learn's 8 × 8 digits) and its schedule: pruned while it learns, one "
        f"epoch per pruning level, fine-tuned at the last. Validation accuracy in percent, mean ± standard deviation over "
        f"{seeds} seeds.",
        "",
        f"| {' | '.join(heads)} |",
        "|---|" + "--:|" * (len(heads) - 1),
        *lines,
        "",
        f"*Final* is the fine-tuned network, at κ from {min(last):.2%} to {max(last):.2%}; *mean* the accuracy averaged "
        f"over κ from {low:.1%} to {high:.1%}; *area gain* its relative difference "
        "from Taylor's; *p* that of a paired t-test over the seeds.",
        "",
        finding(differences, chances, 100 / experiment.features["val_samples"]),
        f"Fine-tuned, the methods' means lie within {100 * (max(finals) - min(finals)):.2f} points of each other.",
        "A few seeds of one small network on easy data say little about others.",
        "",
        "[page.html](page.html) shows everything (download it: one file, no network); `summary.csv`, `curves.csv`, "
        "`comparison.json` and `figures/` hold the numbers.",
        "",
        "![Accuracy against κ](figures/metric_against_kept.png)",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("docs/digits"))
    parser.add_argument("--runs", type=Path, default=Path("runs/digits"))
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        raise SystemExit(f"--seeds: {arguments.seeds} was given; at least 2, for a spread, would do")
    fresh, start = not arguments.runs.exists(), time.perf_counter()
    side_by_side = min(arguments.side_by_side, len(METHODS) * arguments.seeds)
    folders = run_all(arguments.runs, arguments.seeds, side_by_side)
    comparison = publish.compare(
        [folder for group in folders.values() for folder in group],
        arguments.out,
        names=[name for name, group in folders.items() for _ in group],
    )
    took = ""
    if fresh:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        clock, processor = (time.perf_counter() - start) / 60, (used.ru_utime + used.ru_stime) / 60
        took = f"; {clock:.1f} minutes, {side_by_side} runs side by side, {processor:.1f} minutes of CPU time"
    text = readme(comparison, folders, f"python {' '.join(sys.argv)}", took)
    write(arguments.out / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
