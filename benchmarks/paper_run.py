"""A whole run of a preset, and what it costs: training with the flatness penalty against plain training of the same networks.

    python benchmarks/paper_run.py vgg16-cifar10-fast --data DIR --device cuda [--out runs/vgg] [--set recipe.mu=0.01]
                                   [--method NAME] [--seed N] [--minutes M]

It is what `hgnp run` does, in a folder like its own. After the first epoch at new widths a copy of the network is trained
plainly for a moment, by the same executor on the same data in the same process, so that each epoch has a plain one beside it;
this changes nothing in the run, and its time is not counted. After M minutes it stops with the epoch; the same command resumes
it. costs.json keeps what the run itself does not; report.json and report.md are written anew after every epoch.
"""

import argparse
import copy
import dataclasses
import datetime
import gc
import itertools
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from epoch import steps
from hgnp.cli.run import check_overwrites_nothing, check_same_config, remove_created
from hgnp.curvature.step import make_step
from hgnp.experiments.build import Experiment, prepare
from hgnp.experiments.overrides import resolve_config
from hgnp.io import runs
from hgnp.io.atomic import read_json, write, write_json
from hgnp.progress import LineProgress, format_duration, format_metric
from hgnp.training import rng_state
from hgnp.training.data import Batches
from hgnp.training.optimizers import make_optimizer
from hgnp.training.task import CallbackState
from hgnp.training.trainer import Trainer

WARMUP, TIMED = 8, 60  # plain steps
PHASES = {"warmup": "warm-up", "prune": "pruning", "finetune": "fine-tuning"}
Row = Mapping[str, Any]


class OutOfTimeError(Exception):
    """The minutes are over."""


class Costs(LineProgress):
    """Watches a run: times the plain epoch at new widths and the checkpoints, keeps the report, ends the run in time."""

    def __init__(self, experiment: Experiment, out: Path, minutes: float | None) -> None:
        super().__init__()
        self.experiment, self.out, self.minutes = experiment, out, minutes
        self.file = out / "costs.json"
        new: dict[str, Any] = {"plain": {}, "checkpoints": {}, "wall": []}
        self.known = read_json(self.file) if self.file.exists() else new
        self.began = self.saving = time.perf_counter()
        self.apart = 0.0

    def start(self, info: Row) -> None:
        super().start(info)
        self.known["wall"].append(0.0)  # one for each part of a run

    def on_epoch(self, state: CallbackState) -> None:
        start, key = time.perf_counter(), widths(state.row)
        if key not in self.known["plain"]:
            self.known["plain"][key] = plain_epoch(state.net, self.experiment, state.row["lr"])
            self.apart += time.perf_counter() - start
        self.saving = time.perf_counter()  # a checkpoint follows

    def epoch(self, row: Row, left: float | None) -> None:
        self.known["checkpoints"][str(row["epoch"])] = time.perf_counter() - self.saving
        self.write()
        super().epoch(row, left)
        if self.minutes is not None and left is not None and time.perf_counter() - self.began > 60 * self.minutes:
            raise OutOfTimeError  # only now: the epoch's checkpoint is written

    def write(self) -> None:
        self.known["wall"][-1] = time.perf_counter() - self.began - self.apart
        write_json(self.file, self.known)
        self.report()

    def report(self) -> None:
        report = summary(runs.read(self.out), self.known)
        write_json(self.out / "report.json", report)
        write(self.out / "report.md", markdown(report))


def plain_epoch(net: nn.Module, experiment: Experiment, lr: float) -> float:
    """Seconds of a plain epoch at these widths. The network, the data and all random streams are left as found."""
    options, device = experiment.options, next(net.parameters()).device
    with rng_state.preserved(experiment.train, experiment.val):
        own = copy.deepcopy(net)
        task = {name: options[name] for name in ("loss", "output") if name in options}
        optimizer = make_optimizer(own, experiment.recipe, options.get("optimizer"))
        for group in optimizer.param_groups:
            group["lr"] = lr
        step, state = make_step(own, mu=0.0, **task)
        epochs = Trainer(step, state, optimizer, experiment.recipe, device)
        loader = Batches(experiment.train, "train", options.get("unpack"), device)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        steps(epochs, batches, WARMUP)
        seconds = steps(epochs, batches, TIMED).seconds
    assert loader.count is not None
    del own, step, state, optimizer, epochs, batches
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds / TIMED * loader.count


def widths(row: Row) -> str:
    return ",".join(map(str, row["widths"].values()))


def summary(run: runs.Run, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the run came to so far, and what it took."""
    last, total = run.rows[-1], sum(row["seconds"] for row in run.rows)
    trained = sum(row["train_seconds"] for row in run.rows)
    checkpoints, wall = sum(known["checkpoints"].values()), sum(known["wall"])
    quiet, rounds = ([r for r in run.rows if bool(r["removed"]) is cut] for cut in (False, True))
    blocks: dict[str, float] = {}
    for row in run.rows:
        for name, share in row["blocks"].items():
            blocks[name] = blocks.get(name, 0.0) + share / len(run.rows)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": str(datetime.date.today()),
        "name": run.info["name"], "method": run.method, "recipe": run.recipe, "device": run.info["device"],
        "versions": run.info["versions"],
        "state": run.state,
        "epochs": len(run.rows), "parts": len(known["wall"]),
        "metric": run.metric, "score": last["metric"], "kept": last["kept"], "parameters": last["parameters"],
        "seconds": {
            "wall": wall, "steps": trained, "rounds and validation": total - trained,
            "checkpoints": checkpoints, "before and after": wall - total - checkpoints,
        },
        "overhead": {
            "epochs with a round": _mean(r["seconds"] - r["train_seconds"] for r in rounds),
            "epochs without": _mean(r["seconds"] - r["train_seconds"] for r in quiet),
        },
        "training": {"all": against(run.rows, known["plain"])} | {
            phase: against([row for row in run.rows if row["phase"] == phase], known["plain"]) for phase in PHASES
        },
        "blocks": dict(sorted(blocks.items(), key=lambda item: -item[1])),
    }  # fmt: skip


def against(rows: Iterable[Row], plain: Mapping[str, float]) -> dict[str, Any]:
    """Steps of these epochs against those of plain ones at the same widths, where both are known."""
    mine = [row for row in rows if widths(row) in plain]
    trained, plainly = sum(row["train_seconds"] for row in mine), sum(plain[widths(row)] for row in mine)
    return {
        "epochs": len(mine), "seconds": trained, "plain": plainly, "ratio": trained / plainly if mine else None,
        "active penalty": _mean(row["active"] for row in mine if row["active"] is not None),
    }  # fmt: skip


def markdown(report: Mapping[str, Any]) -> str:
    seconds, overhead = report["seconds"], report["overhead"]
    what = (
        "" if report["score"] is None else f"{report['metric']} {format_metric(report['score'], report['metric'])} at "
    )
    lines = [
        f"# {report['name']}, {report['method']}", "",
        f"`{report['command']}`, {report['date']}, {report['device']}, torch {report['versions']['torch']}.", "",
        f"{what}κ = {report['kept']:.2%} ({report['parameters']:,} parameters) after {report['epochs']} epochs; "
        f"{report['state']}. {format_duration(seconds['wall'])} in {report['parts']} part(s).", "",
        "Steps of the run's epochs against plain steps at the same widths, by the same executor in the same process "
        f"({TIMED} steps after {WARMUP}, scaled to an epoch). The run's own first steps at new widths are counted in.", "",
        "| phase | epochs | s, HGNP steps | s, plain steps | ratio | steps with active penalty |", "|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for phase, t in report["training"].items():
        if t["epochs"]:
            cells = [f"{t['epochs']}", f"{t['seconds']:.1f}", f"{t['plain']:.1f}", f"{t['ratio']:.2f}"]
            lines.append(_row([PHASES.get(phase, "whole run"), *cells, _show(t["active penalty"], ".1%")]))
    lines += ["", "| seconds | | share |", "|---|--:|--:|"]
    lines += [_row([name, f"{value:.1f}", f"{value / seconds['wall']:.1%}"]) for name, value in seconds.items()]
    lines += ["", "Scoring, removal and validation: " + ", ".join(
        f"{_show(value, '.2f')} s in {name}" for name, value in overhead.items()) + ".", ""]  # fmt: skip
    if report["blocks"]:
        lines += ["| penalised block | share of steps |", "|---|--:|"]
        lines += [_row([name, f"{share:.1%}"]) for name, share in report["blocks"].items()]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="a preset or a YAML file, as for hgnp run")
    parser.add_argument("--data", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="runs/PRESET if left out")
    parser.add_argument("--method")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device")
    parser.add_argument("--minutes", type=float)
    args = parser.parse_args(arguments)
    args.out = args.out or Path("runs") / Path(args.preset).stem
    made = [path for path in (args.out / "config.yaml", args.out) if not path.exists()]
    try:
        experiment = prepare(resolve_config(
            args.preset, data=args.data, method=args.method, settings=args.set, seed=args.seed, device=args.device
        ))  # fmt: skip
        if (args.out / "run.json").exists():
            check_same_config(experiment.config, args.out)
        else:
            check_overwrites_nothing(experiment.config, args.out)
            experiment.config.write(args.out / "config.yaml")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    costs, done = Costs(experiment, args.out, args.minutes), (args.out / "result.json").exists()
    experiment = dataclasses.replace(experiment, options={**experiment.options, "on_epoch": costs.on_epoch})
    try:
        experiment.run(out=args.out, resume=True, progress=costs)
    except OutOfTimeError:
        print(f"{args.minutes:g} minutes are over; the same command resumes the run")
    except BaseException:
        if not (args.out / "run.json").exists():  # refused before it began
            remove_created(made)
        raise
    costs.report() if done else costs.write()
    print((args.out / "report.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
