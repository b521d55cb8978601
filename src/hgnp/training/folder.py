"""A run's folder: what is written, when, and what may already be there. docs/runs.md describes its files."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hgnp.files import as_json, read_json, write_json, write_text
from hgnp.recipe import Recipe
from hgnp.result import Row
from hgnp.training import checkpoint

FORMAT = 1


class Folder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.info = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.result = self.path / "result.json"

    def claim(self, *, resume: bool) -> None:
        """Make the folder, or refuse one that holds a run already."""
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"out: {self.path} is a file; a folder would do")
        if self.info.exists() and not resume:
            raise FileExistsError(
                f"out: {self.path} holds a run already; resume it (resume=True, --resume) or choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"out: {self.path} cannot be made ({error.strerror})") from None
        if not os.access(self.path, os.W_OK):
            raise PermissionError(f"out: {self.path} is not writable; another folder would do")

    @property
    def finished(self) -> bool:
        return self.result.exists() and self.model.exists()

    def check_recipe(self, recipe: Recipe) -> None:
        """A run goes on with the recipe it began with."""
        was, now = read_json(self.info)["recipe"], recipe.as_dict()
        for name, value in now.items():
            if was.get(name) != value:
                raise ValueError(f"resume: the run in {self.path} has {name}={was.get(name)!r}, not {value!r}; "
                                 "it goes on only with the recipe it began with")  # fmt: skip

    def write_info(self, info: dict[str, Any]) -> None:
        write_json(self.info, {"format": FORMAT} | info)

    def write_metrics(self, rows: Iterable[Row]) -> None:
        self._written(lambda: write_text(self.metrics, "".join(f"{as_json(row)}\n" for row in rows)))

    def write_checkpoint(self, tree: dict[str, Any]) -> None:
        self._written(lambda: checkpoint.write(self.checkpoint, tree))

    def _written(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            last = (
                f"the last good checkpoint is {self.checkpoint}"
                if self.checkpoint.exists()
                else "there is no checkpoint yet"
            )
            raise OSError(f"{self.path} could not be written to ({error.strerror or error}); {last}") from error


def versions() -> dict[str, str]:
    from hgnp import __version__

    return {
        "hgnp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
