"""The page of `hgnp paper`."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any

from hgnp.reporting.charts import Chart, MissingChart
from hgnp.reporting.page import write_page
from hgnp.reporting.page.plots import figure_view
from hgnp.reporting.paper import figures
from hgnp.reporting.paper.deviations import ASPECTS
from hgnp.reporting.paper.report import JUDGED, PaperReport
from hgnp.reporting.paper.reported import EXPERIMENTS, METHODS, PaperExperiment
from hgnp.reporting.paper.results import NAMES, PaperGroup
from hgnp.reporting.paper.rows import SECTIONS, PaperRow, missing_command
from hgnp.reporting.paper.verdict import NOT_RUN, RULE

CAPTIONS = {
    "accuracy": "Lines: the last epoch at each κ; bands: ± one standard deviation over seeds. Markers: fine-tuned "
    "networks, final ones and snapshots, and the paper's values.",
    "relative": "In percent of Taylor's accuracy, over the κ that both reach. Markers: values from the paper's text; the "
    "curves of its figures are not available as numbers.",
    "ablation": "In percent of the accuracy of Taylor, or of full HGNP where Taylor was not run.",
}
NOTES = {
    "areas": "Area under accuracy against κ, over the κ that both methods reach, in percent of Taylor's. The fitted threshold "
    "is the Lasso's on the paper's other three experiments.",
    "training": "The paper's hours and ours are from different hardware. Ours exclude the fine-tuning of snapshots.",
    "inference": "Milliseconds per mini-batch in eager mode. Weight-pruned: the full-size network with all but a fraction κ of "
    "its weights zero. A ratio uses times from one bench file.",
    "equal": "The paper has 92 % at κ = 14.4 % from its own neuron-pruned VGG-16, and at κ = 3 % from weight pruning by SNIP "
    "(Lee et al.); it times both.",
}


def write_paper(report: PaperReport, path: str | os.PathLike[str]) -> Path:
    """A page with the paper's numbers next to ours, the deviations of the runs, and verdicts."""
    return write_page("paper.html", paper_view(report), path)


def paper_view(report: PaperReport) -> dict[str, Any]:
    results = report.results
    return {
        "counts": report.counts,
        "rule": RULE,
        "conclusions": [
            (word, [_line(row) for row in report.concluding if row.verdict.word == word])
            for word in JUDGED
            if word != NOT_RUN and any(row.verdict.word == word for row in report.concluding)
        ],
        "experiments": [  # those with runs first
            _experiment(report, experiment) for experiment in sorted(EXPERIMENTS, key=lambda each: not results.of(each))
        ],
        "sections": [
            {
                "key": key,
                "title": title,
                "note": NOTES.get(key, ""),
                "figure": _figure(figures.ablation(results), "ablation") if key == "ablation" else None,
                "groups": _by_experiment(report, [row for row in report.rows if row.claim.section == key]),
            }
            for key, title in SECTIONS.items()
            if key != "accuracy"
        ],
        "runs": [_run(group, run) for group in results.groups for run in group.members],
        "others": [os.path.relpath(run.folder, results.folder.resolve()) for run in results.others],
    }


def _experiment(report: PaperReport, experiment: PaperExperiment) -> dict[str, Any]:
    results = report.results
    command = missing_command(results, experiment)
    made = [
        _figure(chart(results, experiment), key)
        for key, chart in (("relative", figures.relative), ("accuracy", figures.accuracy))
    ]
    return {
        "key": experiment.key,
        "title": experiment.title,
        "aspects": [aspect for aspect in ASPECTS if aspect != "seeds"],
        "groups": [_group(group) for group in results.of(experiment)],
        "missing": [name for method, name in METHODS.items() if not results.of(experiment, method)],
        "command": command,
        "figures": made,
        "rows": _by_what(
            [
                row
                for row in report.rows
                if row.claim.section == "accuracy" and row.claim.experiment.title == experiment.title
            ],
            command,
        ),
    }


def _group(group: PaperGroup) -> dict[str, Any]:
    return {
        "title": group.title,
        "states": [f"{run.title} is {run.state}" for run in group.unfinished],
        "cells": [
            [each for each in group.deviations if each.aspect == aspect] for aspect in ASPECTS if aspect != "seeds"
        ],
    }


def _figure(figure: Chart | MissingChart, key: str) -> dict[str, Any]:
    return figure_view(figure, "paper", CAPTIONS[key])


def _by_experiment(report: PaperReport, rows: list[PaperRow]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Title, the study's command if it gives rows that are not run, and the rows."""
    entries = []
    for experiment, each in groupby(rows, key=lambda row: row.claim.experiment):
        mine, command = list(each), missing_command(report.results, experiment)
        entries.append(
            (experiment.title, command if any(row.command == command for row in mine) else "", _by_what(mine, command))
        )
    return entries


def _by_what(rows: list[PaperRow], command: str) -> list[dict[str, Any]]:
    """A number of the paper, with every row of ours for it. `command` is shown above the rows."""
    merged: dict[tuple[str, str], list[PaperRow]] = {}
    for row in rows:
        merged.setdefault((row.claim.what, row.claim.text), []).append(row)
    return [
        {
            "what": _unbroken(what),
            "source": each[0].claim.source,
            "paper": _unbroken(paper),
            "rows": [_cells(row, command) for row in each],
        }
        for (what, paper), each in merged.items()
    ]


def _cells(row: PaperRow, command: str) -> dict[str, Any]:
    return {
        "ours": _unbroken(row.text),
        "word": row.verdict.word,
        "class": row.verdict.word.replace(" ", "-"),
        "reason": row.verdict.reason,
        "runs": row.runs,
        "deviations": " · ".join(row.deviations),
        "command": "" if row.command == command else row.command,
    }


def _line(row: PaperRow) -> dict[str, str]:
    claim = row.claim
    values = f"{claim.text} in the paper, {row.text} here ({row.verdict.reason}); {row.runs}"
    return {"what": f"{claim.experiment.title}: {claim.what}", "values": _unbroken(values)}


def _unbroken(text: str) -> str:
    """Numbers stay with their units."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%").replace("κ = ", "κ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")


def _run(group: PaperGroup, run: Any) -> list[str]:
    kept = f"{100 * run.rows[-1]['kept']:.1f}" if run.rows else "–"
    metric = f"{100 * run.curve()[-1][1]:.2f}" if run.curve() else "–"
    seed = "–" if run.seed is None else str(run.seed)
    name = NAMES.get(group.variant, group.variant)
    return [
        run.title,
        group.experiment.title,
        name,
        group.penalty or "–",
        f"{group.schedule} schedule",
        seed,
        kept,
        metric,
        run.state,
    ]
