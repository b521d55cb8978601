"""`hgnp run`: an experiment from a preset or a configuration file."""

import contextlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hgnp.errors import InputError

if TYPE_CHECKING:
    from hgnp.experiments.config import Config

RUNS = Path("runs")


def run(
    what: Annotated[
        str, typer.Argument(metavar="PRESET|FILE", help="A preset (see hgnp presets) or a YAML file.")
    ] = "demo",
    data: Annotated[str | None, typer.Option(metavar="DIR", help="The folder the data is in.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/NAME, or the next free, if left out.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="hgnp, taylor, l1, … with its own hyperparameters.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as recipe.mu=0.01; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seeds the network, the data and the run.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 …")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the folder, or print it if it is done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON, the last line of stdout.")] = False,
) -> None:
    """Train, prune and fine-tune a network. Without an argument: the demo, half a minute on two cores."""  # fmt: skip
    from hgnp.experiments.overrides import effective
    from hgnp.progress import BarProgress, LineProgress

    config = effective(what, data=data, method=method, settings=set_ or [], seed=seed, device=device)
    folder = out or default_folder(f"{config.name}-{method}" if method else config.name, resume=resume)
    say = sys.stderr if as_json else sys.stdout
    progress = BarProgress() if sys.stderr.isatty() else LineProgress(say)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out: {folder} is a file; a folder would do")
    begun, done = ((folder / name).exists() for name in ("run.json", "result.json"))
    if begun and not resume:
        raise FileExistsError(f"--out: {folder} holds a run; --resume resumes it, another folder starts a new one")

    from hgnp.experiments.build import prepare
    from hgnp.train import check_one_process

    check_one_process()
    experiment = prepare(config)
    made = [path for path in (folder / "config.yaml", folder) if not path.exists()]
    if begun:
        same_run(experiment.config, folder)
    else:
        not_yours(experiment.config, folder)
    if resume and not begun:
        progress.note(f"there is no run in {folder} yet: starting one")
    if config.about:
        progress.note(config.about)
    try:
        if not begun:
            experiment.config.write(folder / "config.yaml")
        if not (begun and done) or os.access(folder, os.W_OK):  # a finished run is shown where nothing can be written
            experiment.run(out=folder, resume=resume, progress=progress)
    except BaseException as error:
        progress.stop()
        if not (folder / "run.json").exists():  # refused before it began
            discard(made)
        elif isinstance(error, KeyboardInterrupt):
            command = shlex.join(["hgnp", "run", str(folder / "config.yaml"), "--out", str(folder), "--resume"])
            print(f"\nhgnp: interrupted; {command} resumes after the last whole epoch", file=sys.stderr)
            raise typer.Exit(130) from None
        raise
    progress.stop()
    unwritten: OSError | None = None
    if not done or not (folder / "page.html").exists():
        try:
            write_page(folder)
        except OSError as error:
            unwritten = error

    from rich.console import Console

    from hgnp.cli.table import show
    from hgnp.io.atomic import read_json

    result = read_json(folder / "result.json")
    # without a terminal rich would wrap at 80 columns
    show(result, out=folder, console=Console(file=say, width=None if say.isatty() else 140))
    if as_json:
        print(json.dumps({**result, "out": str(folder)}))
    if unwritten is not None and not done:
        why = unwritten.strerror or str(unwritten)
        raise OSError(unwritten.errno, f"the run is finished, but {folder / 'page.html'} could not be written ({why})")


def write_page(folder: Path) -> None:
    """The run to look at."""
    from hgnp.io import runs
    from hgnp.reporting.page import write_report

    write_report([runs.read(folder)], folder / "page.html")


def not_yours(config: "Config", folder: Path) -> None:
    """That a new run overwrites nothing but the configuration of one that was killed before it began."""
    for file in (folder / "config.yaml", folder / "page.html"):
        if file.exists() and (file.name == "page.html" or file.read_bytes() != config.text().encode()):
            raise FileExistsError(f"--out: {file} is there already and would be overwritten; another folder would do")


def discard(made: list[Path]) -> None:
    """Leave nothing behind of a run that did not begin: of these, which were not there before."""
    for path in made:
        with contextlib.suppress(OSError):  # a folder holds something else by now
            path.rmdir() if path.is_dir() else path.unlink()


def default_folder(name: str, *, resume: bool) -> Path:
    """runs/NAME, runs/NAME-2 …: the one after the last that is not empty, or, to resume, the last with a run. Numbers only
    grow, also where folders were deleted, so that the last is the newest."""
    first = RUNS / name
    numbered = {1: first} | {
        int(match[1]): path
        for path in (first.parent.iterdir() if first.parent.is_dir() else ())
        if (match := re.fullmatch(re.escape(first.name) + "-([2-9]|[1-9][0-9]+)", path.name))
    }
    if resume:
        return numbered[max((number for number, path in numbered.items() if (path / "run.json").exists()), default=1)]
    last = max((number for number, path in numbered.items() if _occupied(path)), default=0)
    return first.with_name(f"{first.name}-{last + 1}") if last else first


def _occupied(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def same_run(config: "Config", folder: Path) -> None:
    """That a run to be resumed was made from this configuration; only where it runs and reads may have changed."""
    from hgnp.experiments.overrides import difference

    found = difference(config, folder) if (folder / "config.yaml").exists() else None
    if found is not None:
        key, now, before = found
        raise InputError(
            f"{key} must be {before!r} to resume the run in {folder}, got {now!r}; "
            "resume it with that, or start anew in another folder"
        )
