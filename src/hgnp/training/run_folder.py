"""A run's folder: what is written, when, and what may already be there. docs/runs.md describes its files."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import nn

from hgnp import __version__
from hgnp.errors import InputError, InputTypeError, check_renamed
from hgnp.io.atomic import as_json, locked, read_json, remove_stale_drafts, write, write_json
from hgnp.io.weights import save
from hgnp.recipe import Recipe
from hgnp.result import Row
from hgnp.training import checkpoint

FORMAT = 1
ABANDONED = 60.0  # seconds after which a draft is no longer being written
PATIENCE = 10.0  # seconds; a data loader's workers notice within five that their run was killed


class Folder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = Path(path)
        except TypeError:
            raise InputTypeError(f"out: a {type(path).__name__} was given; a path would do") from None
        self.info = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.result = self.path / "result.json"
        self.snapshots = self.path / "snapshots"
        self._writing: Future[None] | None = None

    @contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Make the folder and stay alone in it. Refuse one that holds a run already, or a file that is not a run's."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise FileExistsError(f"out: {self.path} is a file; a folder would do") from None
        except OSError as error:
            raise type(error)(error.errno, f"out: {self.path} cannot be made ({error.strerror})") from None
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"out: {self.path} is not writable; another folder would do")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path, patience=PATIENCE))
            except BlockingIOError:
                raise BlockingIOError(
                    f"out: another process is running in {self.path}; another folder would do"
                ) from None
            stack.callback(self.settle)
            self._check(resume=resume)
            self.tidy(older_than=ABANDONED)
            yield

    def _check(self, *, resume: bool) -> None:
        begun = self.info.exists()
        if begun and not resume:
            raise FileExistsError(
                f"out: {self.path} holds a run already; resume it (resume=True, --resume) or choose another folder"
            )
        for file in () if begun else (self.metrics, self.checkpoint, self.model, self.result, self.snapshots):
            if file.exists():
                raise FileExistsError(
                    f"out: {self.path} has no run.json, so it is no run, but a {file.name}, which a run would overwrite; "
                    "another folder would do"
                )
        if begun and self.metrics.exists() and not self.checkpoint.exists() and not self.finished:
            raise FileNotFoundError(
                f"resume: {self.checkpoint} is missing, so the run cannot go on; another folder starts anew"
            )

    def tidy(self, *, older_than: float = 0.0) -> None:
        for file in (self.info, self.metrics, self.checkpoint, self.model, self.result):
            remove_stale_drafts(file, older_than=older_than)

    @property
    def finished(self) -> bool:
        return self.result.exists() and self.model.exists()

    def snapshot(self, value: float) -> "Folder":
        """Where the network at an intermediate κ is fine-tuned: a run's folder too."""
        return Folder(self.snapshots / str(value))

    def check_recipe(self, recipe: Recipe) -> None:
        """A run goes on with the recipe it began with."""
        info = read_json(self.info)
        if not isinstance(info, dict) or not isinstance(info.get("recipe"), dict):
            raise InputError(f"{self.info}: damaged: it has no recipe")
        if info.get("format") != FORMAT:
            raise InputError(
                f"{self.info}: written in format {info.get('format')} by another hgnp; this one reads {FORMAT}"
            )
        was, now = info["recipe"], recipe.as_dict()
        check_renamed(was, now, str(self.info))
        for name, value in now.items():
            if was.get(name) != value:
                raise InputError(f"resume: the run in {self.path} has {name}={was.get(name)!r}, not {value!r}; "
                                 "it goes on only with the recipe it began with")  # fmt: skip

    def write_info(self, info: dict[str, Any]) -> None:
        self._written(lambda: write_json(self.info, {"format": FORMAT} | info))

    def write_metrics(self, rows: Iterable[Row]) -> None:
        self._written(lambda: write(self.metrics, "".join(f"{as_json(row)}\n" for row in rows)))

    def keep(self, tree: dict[str, Any]) -> None:
        """A checkpoint of what is now, written while the run goes on. Should that fail, the next call or `settle` raises it."""
        failure = self._wait()  # before the copy: there may not be memory for two
        ready, written = checkpoint.packed(tree), Future[None]()
        # no pool: that takes no more work once the main thread has ended, and the run may be in another
        Thread(target=self._write, args=(ready, written), name="hgnp-writer").start()
        self._writing = written
        if failure is not None:
            raise failure  # only now: this one may well be written
        if not self.checkpoint.exists():
            self.settle()  # metrics without a checkpoint could not be gone on from

    def settle(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        failure = self._wait()
        if failure is not None:
            raise failure

    def _wait(self) -> BaseException | None:
        """Why the last checkpoint could not be written, if so."""
        failure = None if self._writing is None else self._writing.exception()
        self._writing = None  # not before: if Ctrl-C ends the wait, who leaves the folder waits again
        return failure

    def _write(self, ready: checkpoint.Packed, written: Future[None]) -> None:
        try:
            self._written(lambda: checkpoint.write(self.checkpoint, ready))
            written.set_result(None)
        except BaseException as error:
            written.set_exception(error)

    def finish(self, net: nn.Module, result: dict[str, Any]) -> None:
        """The network, then the result: with both the run is finished."""
        self._written(lambda: save(net, self.model))
        self._written(lambda: write_json(self.result, result))
        self.tidy()

    def _written(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            last = (
                f"the last good checkpoint is {self.checkpoint}"
                if self.checkpoint.exists()
                else "there is no checkpoint yet"
            )
            raise OSError(f"{self.path} could not be written to ({error.strerror or error}); {last}") from error


def versions() -> dict[str, str]:
    return {
        "hgnp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
