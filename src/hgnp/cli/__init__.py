"""The command `hgnp`: one file per command, thin. An error that a user can fix is one line and an exit code.

0: done. 1: a run stopped (it diverged, the disk is full). 2: bad input. 130: interrupted. Anything else is a bug and shows
its traceback. torch is imported only by commands that need it.
"""

import errno
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from hgnp import __version__
from hgnp.cli import bench, compare, data, export, paper, presets, report, run, sharpness, study, weights
from hgnp.errors import DivergedError, HgnpError, InputError, RankError

STOPPED, BAD_INPUT = 1, 2


class Command(TyperCommand):
    """A command whose help lists arguments by name, without their Python types (`<list[Path]>`), and that refuses empty
    arguments: those of an unset shell variable, which Path takes for the current folder."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, argument in zip(["", *args], args, strict=False):
            if not argument or re.fullmatch("--[a-z-]+=", argument):
                raise InputError(f"{(argument or before).strip('=') or 'argument'} must not be empty, got ''")
        return super().parse_args(ctx, args)


commands = typer.Typer(
    name="hgnp",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
commands.command("run", cls=Command)(run.run)
commands.command("presets", cls=Command)(presets.presets)
commands.command("data", cls=Command)(data.data)
commands.command("weights", cls=Command)(weights.weights)
commands.command("study", cls=Command)(study.study)
commands.command("compare", cls=Command)(compare.compare)
commands.command("paper", cls=Command)(paper.paper)
commands.command("bench", cls=Command)(bench.bench)
commands.command("report", cls=Command)(report.report)
commands.command("export", cls=Command)(export.export)
commands.command("sharpness", cls=Command)(sharpness.sharpness)


@commands.callback()
def _top(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Structured pruning during training: train a PyTorch network and remove neurons, channels and attention heads."""
    if version:
        print(f"hgnp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def app(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments` (the process's own if None). Raises SystemExit with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # κ and × on a terminal that cannot show them
    try:
        code = typer.main.get_command(commands).main(args=arguments, prog_name="hgnp", standalone_mode=False)
    except Exception as error:
        ending = exit_code(error)
        if ending is None:
            raise
        code, line = ending
        if prints_error(error):
            print(f"hgnp: {line}", file=sys.stderr)
        else:
            time.sleep(0.5)  # torchrun stops all ranks once one has ended: another one must have printed by then
    sys.exit(code or 0)


def prints_error(error: Exception) -> bool:
    """Whether this process prints the error; of the ranks under torchrun one does."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "1") or "RANK" not in os.environ:
        return True
    from hgnp.execution import process_group

    return process_group.prints_error(error)


def exit_code(error: Exception) -> tuple[int, str] | None:
    """The exit code and the line for an error that a user can fix; None for a bug."""
    line = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:  # without the number that Python prints
        line = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if hasattr(error, "format_message"):  # typer's own: an unknown option, a missing argument
        command = getattr(getattr(error, "ctx", None), "command_path", "hgnp")
        return BAD_INPUT, f"{error.format_message()} (see {command} --help)"
    if isinstance(
        error, FileNotFoundError | FileExistsError | PermissionError | NotADirectoryError | IsADirectoryError
    ):
        return BAD_INPUT, line
    if isinstance(error, OSError):
        if error.errno in (errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL):
            return BAD_INPUT, line
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return STOPPED, f"the disk is full: {line}" if full else line
    if isinstance(error, DivergedError | RankError):
        return STOPPED, line
    return (BAD_INPUT, line) if isinstance(error, HgnpError) else None
