"""`hgnp run`: train and prune from a preset or a configuration file."""

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
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with the dataset (see hgnp data).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder. Default: runs/NAME, or the next free runs/NAME-2, …")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pruning method: hgnp, taylor, l1, …, with the hyperparameters that the preset has for it.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as recipe.mu=0.01; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed of network, data and run.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, … Default: cuda if available.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the run folder; print its result if it is finished.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Train, prune and fine-tune a network. Default: the demo, about 20 seconds on two cores."""  # fmt: skip
    from hgnp.experiments.overrides import effective
    from hgnp.progress import BarProgress, LineProgress

    config = effective(what, data=data, method=method, settings=set_ or [], seed=seed, device=device)
    folder = out or default_folder(f"{config.name}-{method}" if method else config.name, resume=resume)
    stream = sys.stderr if as_json else sys.stdout
    progress = BarProgress() if sys.stderr.isatty() else LineProgress(stream)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out must be a folder, got the file {folder}; choose another")
    begun, done = ((folder / name).exists() for name in ("run.json", "result.json"))
    if begun and not resume:
        raise FileExistsError(
            f"--out must be a folder without a run, got {folder}; add --resume to resume its run, or choose another folder"
        )

    from hgnp.experiments.build import prepare
    from hgnp.train import check_one_process

    check_one_process()
    experiment = prepare(config)
    created = [path for path in (folder / "config.yaml", folder) if not path.exists()]
    if begun:
        check_same_config(experiment.config, folder)
    else:
        check_overwrites_nothing(experiment.config, folder)
    if resume and not begun:
        progress.note(f"{folder} has no run to resume; starting a new one")
    if config.about:
        progress.note(config.about)
    try:
        if not begun:
            experiment.config.write(folder / "config.yaml")
        if not (begun and done) or os.access(
            folder, os.W_OK
        ):  # a finished run is printed even if its folder is read-only
            experiment.run(out=folder, resume=resume, progress=progress)
    except BaseException as error:
        progress.stop()
        if not (folder / "run.json").exists():  # refused before it started
            remove_created(created)
        elif was_interrupted(error):
            command = shlex.join(["hgnp", "run", str(folder / "config.yaml"), "--out", str(folder), "--resume"])
            print(f"\nhgnp: interrupted; {command} resumes after the last completed epoch", file=sys.stderr)
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

    from hgnp.cli.table import print_result
    from hgnp.io.atomic import read_json

    result = read_json(folder / "result.json")
    # without a terminal rich would wrap at 80 columns
    print_result(result, out=folder, console=Console(file=stream, width=None if stream.isatty() else 140))
    if as_json:
        print(json.dumps({**result, "out": str(folder)}))
    if unwritten is not None and not done:
        why = unwritten.strerror or str(unwritten)
        raise OSError(unwritten.errno, f"the run is finished, but {folder / 'page.html'} could not be written ({why})")


def was_interrupted(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt, or follows from one: PyTorch raises another error where Ctrl-C comes in the middle."""
    return isinstance(error, KeyboardInterrupt) or (
        error.__context__ is not None and was_interrupted(error.__context__)
    )


def write_page(folder: Path) -> None:
    """Write the run's HTML page."""
    from hgnp.io import runs
    from hgnp.reporting.page import write_report

    write_report([runs.read(folder)], folder / "page.html")


def check_overwrites_nothing(config: "Config", folder: Path) -> None:
    """Refuse to overwrite files, except the configuration of a run that was killed before it started."""
    for file in (folder / "config.yaml", folder / "page.html"):
        if file.exists() and (file.name == "page.html" or file.read_bytes() != config.text().encode()):
            raise FileExistsError(
                f"--out must be a folder without {file.name}, got {folder}, where it would be overwritten; choose another"
            )


def remove_created(paths: list[Path]) -> None:
    """Remove the paths that a run created before it was refused."""
    for path in paths:
        with contextlib.suppress(OSError):  # a folder that is not empty
            path.rmdir() if path.is_dir() else path.unlink()


def default_folder(name: str, *, resume: bool) -> Path:
    """The first unused of runs/NAME, runs/NAME-2, …, or, to resume, the last one with a run. Numbers only grow, even if
    folders were deleted, so that the last is the newest."""
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


def check_same_config(config: "Config", folder: Path) -> None:
    """Refuse to resume a run of another configuration. Device and data folder may differ."""
    from hgnp.experiments.overrides import difference

    found = difference(config, folder) if (folder / "config.yaml").exists() else None
    if found is not None:
        key, now, before = found
        raise InputError(
            f"{key} must be {before!r} to resume the run in {folder}, got {now!r}; "
            "resume it with that value, or start a new run in another folder"
        )
