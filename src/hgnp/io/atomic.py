"""Atomic writes: a file is complete or absent. Also locks, JSON and CSV."""

import csv
import glob
import io
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hgnp.errors import InputError, InputTypeError

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path, *, timeout: float) -> Iterator[None]:
    """Hold an exclusive lock on `folder`. Waits up to `timeout` seconds for another process: the children of a killed one may
    outlive it briefly. BlockingIOError if it keeps the lock. The lock ends with its process."""
    handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if handle is not None:
            _lock(handle, time.monotonic() + timeout)
        yield
    finally:
        if handle is not None:
            with suppress(OSError):  # closing is not enough: a data loader's workers have inherited the handle
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _lock(handle: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return None


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path, on the same disk and with the same name, that replaces `path` when the block succeeds.

    Creates the parent folders. If the block raises, `path` is unchanged. The content is flushed to disk before the rename, so
    that a crash leaves the old file or the new one.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # what the user named, not the temporary folder
        raise
    with temporary as folder:
        draft, ordinary = Path(folder) / path.name, Path(folder) / f"{path.name}.mode"
        yield draft
        ordinary.touch()
        shutil.copymode(ordinary, draft)  # safetensors creates files that only their owner can read
        with open(draft, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)


def as_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    if path == "" or "\0" in str(path):  # Path("") is the current folder
        raise InputError(f"{name} must be the name of a file or folder, got {str(path)!r}")
    try:
        return Path(path)
    except TypeError:
        raise InputTypeError(f"{name} must be a string or a path, got {type(path).__name__}") from None


def check_file_path(path: Path) -> None:
    """InputError if `path` is a folder or one of its parents is a file."""
    if path.is_dir():
        raise InputError(f"path must be a file, got the folder {str(path)!r}")
    for above in path.parents:
        if above.is_file():
            raise InputError(f"path must be below folders, got the file {str(above)!r} among them; choose another path")


def remove_stale_drafts(path: Path, *, older_than: float) -> None:
    """Remove drafts of `path` that killed writers left beside it: those unmodified for `older_than` seconds."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        if left.is_dir() and time.time() - left.stat().st_mtime >= older_than:
            shutil.rmtree(left, ignore_errors=True)


def write(path: str | os.PathLike[str], content: str | bytes) -> Path:
    with atomic_path(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    return write(path, as_json(value, indent=2) + "\n")


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} must be JSON, got text that is not ({error}); it is damaged") from None


def as_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a CSV file. Cells that a spreadsheet would run as a formula are prefixed by a quote; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_safe(name) for name in header])
    writer.writerows([_safe(cell) for cell in row] for row in rows)
    return write(path, text.getvalue())


def _safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
