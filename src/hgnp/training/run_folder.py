"""A run's folder: its files, its lock and its checkpoints. docs/runs.md describes the files."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import nn

from hgnp import __version__
from hgnp.errors import InputError, check_renamed
from hgnp.io.atomic import as_json, as_path, locked, read_json, remove_stale_drafts, write, write_json
from hgnp.io.weights import save
from hgnp.pruning.limits import LIMITS
from hgnp.recipe import Recipe
from hgnp.result import Row
from hgnp.training import checkpoint

FORMAT = 1
STALE_AFTER = 60.0  # seconds; an older temporary file is no longer being written
LOCK_TIMEOUT = 10.0  # seconds; a data loader's workers notice within five that their run was killed


class RunFolder:
    """The folder `path` of one run. Every file is written whole or not at all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path, "out")
        self.info = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.result = self.path / "result.json"
        self.snapshots = self.path / "snapshots"
        self._writing: Future[None] | None = None

    @contextmanager
    def locked(self, *, resume: bool) -> Iterator[None]:
        """Create the folder and hold its lock. Refuse a folder that holds a run already, or files of something else. A folder
        that is still empty in the end, as the run was refused, is removed again."""
        created = [path for path in (self.path, *self.path.parents) if not os.path.lexists(path)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise FileExistsError(f"out must be a folder, got the file {self.path}") from None
        except OSError as error:
            raise type(error)(
                error.errno, f"out must be a folder that can be created, got {self.path} ({error.strerror})"
            ) from None
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"out must be a writable folder, got {self.path}")
        with ExitStack() as stack:
            stack.callback(_remove_empty, created)
            try:
                stack.enter_context(locked(self.path, timeout=LOCK_TIMEOUT))
            except BlockingIOError:
                raise BlockingIOError(
                    f"out must be a folder without a running process, got {self.path}; choose another folder"
                ) from None
            stack.callback(self.flush)
            self._check(resume=resume)
            self.remove_temporary_files(older_than=STALE_AFTER)
            yield

    def _check(self, *, resume: bool) -> None:
        started = self.info.exists()
        if started and not resume:
            raise FileExistsError(
                f"out must be a folder without a run, got {self.path}; use resume=True (--resume) or choose another folder"
            )
        own = (
            self.metrics,
            self.checkpoint,
            self.model,
            self.result,
            self.snapshots,
            *self.path.glob("also-*.safetensors"),
        )
        for file in () if started else own:
            if file.exists():
                raise FileExistsError(
                    f"out must be a folder without a run's files, got {self.path} with {file.name} and no run.json; "
                    "choose another folder"
                )
        if started and self.metrics.exists() and not self.checkpoint.exists() and not self.finished:
            raise FileNotFoundError(
                f"resume: {self.checkpoint} must exist to resume the run, got no such file; start again in another folder"
            )

    def remove_temporary_files(self, *, older_than: float = 0.0) -> None:
        for file in (self.info, self.metrics, self.checkpoint, self.model, self.result, *self.path.glob("also-*")):
            remove_stale_drafts(file, older_than=older_than)

    @property
    def finished(self) -> bool:
        return self.result.exists() and self.model.exists()

    def snapshot(self, value: float) -> "RunFolder":
        """The folder, itself a run's folder, in which the network at an intermediate κ is fine-tuned."""
        return RunFolder(self.snapshots / str(value))

    def check_recipe(self, recipe: Recipe) -> None:
        """InputError unless `recipe` is the one that the run started with."""
        info = read_json(self.info)
        if not isinstance(info, dict) or not isinstance(info.get("recipe"), dict):
            raise InputError(f"{self.info} must have a recipe, got none; the file is damaged")
        if info.get("format") != FORMAT:
            raise InputError(
                f"{self.info}: format must be {FORMAT}, got {info.get('format')!r}, which another hgnp wrote; use that one"
            )
        now = recipe.as_dict()
        check_renamed(info["recipe"], now, str(self.info))
        was = Recipe(keep=1).as_dict() | info["recipe"]  # a field that is newer than the run had its default's meaning
        for name, value in now.items():
            reordered = name in LIMITS and isinstance(value, dict) and list(was.get(name) or ()) != list(value)
            if was.get(name) != value or reordered:  # the first of a limit's patterns that matches applies
                raise InputError(f"resume: {name} must be {was.get(name)!r} as in {self.path}, got {value!r}; a run "
                                 "is resumed with the recipe that it started with")  # fmt: skip

    def write_info(self, info: dict[str, Any]) -> None:
        self._write_or_explain(lambda: write_json(self.info, {"format": FORMAT} | info))

    def write_metrics(self, rows: Iterable[Row]) -> None:
        self._write_or_explain(lambda: write(self.metrics, "".join(f"{as_json(row)}\n" for row in rows)))

    def write_checkpoint(self, tree: dict[str, Any]) -> None:
        """Copy `tree` now and write it in the background. If that fails, the next call or `flush` raises the error."""
        failure = self._wait()  # before copying: there may be no memory for two copies
        ready, written = checkpoint.pack(tree), Future[None]()
        # not an executor: it refuses work once the main thread has ended, and the run may be in another thread
        Thread(target=self._write_in_background, args=(ready, written), name="hgnp-writer").start()
        self._writing = written
        if failure is not None:
            raise failure  # after starting this write, which may succeed
        if not self.checkpoint.exists():
            self.flush()  # a run with metrics but no checkpoint cannot be resumed

    def flush(self) -> None:
        """Wait until the last checkpoint is written; raise the error if it could not be."""
        failure = self._wait()
        if failure is not None:
            raise failure

    def _wait(self) -> BaseException | None:
        """Wait for the last checkpoint; the error if it could not be written."""
        failure = None if self._writing is None else self._writing.exception()
        self._writing = None  # after the wait: if Ctrl-C interrupts it, leaving the folder waits again
        return failure

    def _write_in_background(self, ready: checkpoint.Packed, written: Future[None]) -> None:
        try:
            self._write_or_explain(lambda: checkpoint.write(self.checkpoint, ready))
            written.set_result(None)
        except BaseException as error:
            written.set_exception(error)

    def also(self, place: int) -> Path:
        """The file of a network that was pruned along with the run's own."""
        return self.path / f"also-{place}.safetensors"

    def finish(self, net: nn.Module, result: dict[str, Any], also: Sequence[nn.Module] = ()) -> None:
        """Write the networks, then the result: with both the run is finished."""
        for place, network in enumerate(also):
            self._write_or_explain(partial(save, network, self.also(place)))
        self._write_or_explain(lambda: save(net, self.model))
        self._write_or_explain(lambda: write_json(self.result, result))
        self.remove_temporary_files()

    def _write_or_explain(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            last = (
                f"the last good checkpoint is {self.checkpoint}"
                if self.checkpoint.exists()
                else "there is no checkpoint yet"
            )
            raise OSError(f"{self.path} could not be written ({error.strerror or error}); {last}") from error


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, each inside the next, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def versions() -> dict[str, str]:
    return {
        "hgnp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
