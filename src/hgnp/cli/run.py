"""`hgnp run`: train and prune from a preset or a configuration file."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from hgnp.errors import InputError

if TYPE_CHECKING:
    from hgnp.experiments.config import Config
    from hgnp.progress import Progress
    from hgnp.reducer import Reducer

T = TypeVar("T")
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
    from hgnp.experiments.overrides import resolve_config
    from hgnp.progress import BarProgress, LineProgress

    with across_ranks() as reducer:
        config = resolve_config(what, data=data, method=method, settings=set_ or [], seed=seed, device=device)
        name = f"{config.name}-{method}" if method else config.name
        path, begun, done = on_rank_zero(reducer, lambda: checked_folder(out, name, resume=resume))
        folder = Path(path)
        if reducer is not None and reducer.rank:
            join_run(reducer, config, folder, resume=resume)
            return
        stream = sys.stderr if as_json else sys.stdout
        progress = BarProgress() if sys.stderr.isatty() else LineProgress(stream)
        train(reducer, config, folder, progress, begun=begun, done=done, resume=resume)
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


@contextlib.contextmanager
def across_ranks() -> Iterator["Reducer | None"]:
    """The ranks that torchrun has started, or None for a single process. They learn of each other's errors."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        yield None  # without importing torch: an unknown preset is refused at once
        return
    from hgnp.execution.process_group import failures_announced, initialise, world
    from hgnp.reducer import Reducer

    initialise()
    reducer: Reducer = world()
    with failures_announced(reducer):
        yield reducer


def on_rank_zero(reducer: "Reducer | None", function: Callable[[], T]) -> T:
    """What `function` returns, on every rank what it returns on rank 0: something that JSON can hold."""
    if reducer is None:
        return function()
    value: T = json.loads(reducer.on_rank_zero(lambda: json.dumps(function()).encode()))
    return value


def checked_folder(out: Path | None, name: str, *, resume: bool) -> tuple[str, bool, bool]:
    """The run folder, whether it has a run, and whether that is finished."""
    folder = out or default_folder(name, resume=resume)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out must be a folder, got the file {folder}; choose another")
    begun, done = ((folder / file).exists() for file in ("run.json", "result.json"))
    if begun and not resume:
        raise FileExistsError(
            f"--out must be a folder without a run, got {folder}; add --resume to resume its run, or choose another folder"
        )
    return str(folder), begun, done


def join_run(reducer: "Reducer", config: "Config", folder: Path, *, resume: bool) -> None:
    """Train on a rank that is not the first, which reads, writes and shows progress for it."""
    from hgnp.experiments.build import prepare
    from hgnp.progress import SilentProgress

    experiment = prepare(config)
    try:
        if on_rank_zero(reducer, lambda: True):
            experiment.run(out=folder, resume=resume, progress=SilentProgress())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # rank 0 says so


def train(
    reducer: "Reducer | None",
    config: "Config",
    folder: Path,
    progress: "Progress",
    *,
    begun: bool,
    done: bool,
    resume: bool,
) -> None:
    """Train and write into the folder; its configuration first."""
    from hgnp.experiments.build import prepare

    experiment = prepare(config)
    # a finished run is printed even if its folder is read-only
    due = not (begun and done) or os.access(folder, os.W_OK)
    created = [path for path in (folder / "config.yaml", folder) if not path.exists()]

    def checked() -> bool:
        (check_same_config if begun else check_overwrites_nothing)(experiment.config, folder)
        return due

    on_rank_zero(reducer, checked)
    if resume and not begun:
        progress.note(f"{folder} has no run to resume; starting a new one")
    if config.about:
        progress.note(config.about)
    try:
        if not begun:
            experiment.config.write(folder / "config.yaml")
        if due:
            experiment.run(out=folder, resume=resume, progress=progress)
    except BaseException as error:
        progress.stop()
        if not (folder / "run.json").exists():  # refused before it started
            remove_created(created)
        elif was_interrupted(error):
            command = shlex.join(["hgnp", "run", str(folder / "config.yaml"), "--out", str(folder), "--resume"])
            print(f"\nhgnp: interrupted; {command} resumes after the last checkpoint", file=sys.stderr)
            raise typer.Exit(130) from None
        raise
    progress.stop()


def was_interrupted(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt, or follows from one: PyTorch raises another error where Ctrl-C comes in the middle."""
    return isinstance(error, KeyboardInterrupt) or (
        error.__context__ is not None and was_interrupted(error.__context__)
    )


def write_page(folder: Path) -> None:
    """Write the run's HTML page."""
    from hgnp.io import runs
    from hgnp.reporting.page.run_page import write_report

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
    from hgnp.experiments.overrides import first_difference

    differs = first_difference(config, folder) if (folder / "config.yaml").exists() else None
    if differs is not None:
        key, now, before = differs
        raise InputError(
            f"{key} must be {before!r} to resume the run in {folder}, got {now!r}; "
            "resume it with that value, or start a new run in another folder"
        )
