"""`hgnp data`: download, verify and unpack the official files of a dataset."""

import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from hgnp.errors import InputError


def data(
    name: Annotated[str, typer.Argument(metavar="cifar10|flowers102|cub200", help="Dataset.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Target folder, for hgnp run … --data DIR.")],
    mirror: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Download from this base URL instead; checksums stay the same."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, the last line of stdout.")] = False,
) -> None:
    """Download, verify and unpack a dataset. Resumes; a complete folder is verified and left unchanged."""
    from hgnp.errors import did_you_mean
    from hgnp.experiments.download import OFFICIAL, install
    from hgnp.io.atomic import as_json as text

    if name not in OFFICIAL:
        raise InputError(f"dataset must be a known one, got {name!r}{did_you_mean(name, OFFICIAL)}")
    source = OFFICIAL[name] if mirror is None else OFFICIAL[name].at(mirror)
    stream = sys.stderr if as_json else sys.stdout
    with DownloadDisplay(stream) as display:
        done = install(source, folder, display)
    state = "downloaded" if done.downloaded else "already complete"
    print(f"{source.title} in {folder}: {state}, {done.files:,} files, {done.bytes:,} bytes, verified", file=stream)
    print(f"Terms ({source.page}): {source.terms}", file=stream)
    if as_json:
        facts = {"files": done.files, "bytes": done.bytes, "downloaded": done.downloaded}
        print(text({"data": name, "folder": str(folder), **facts, "page": source.page, "terms": source.terms}))


class DownloadDisplay:
    """On a terminal a progress bar with bytes, speed and time left; elsewhere one line per completed step."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            *columns,
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._stream, self._what = stream, ""

    def __enter__(self) -> "DownloadDisplay":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def bytes(self, what: str, done: int, total: int | None) -> None:
        if what != self._what:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._what = what
            self._bars.add_task(what, completed=done, total=total)
        self._bars.update(self._bars.task_ids[0], completed=done, total=total)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
