"""Reading run folders (docs/runs.md): `read(folder)` returns a `Run`, finished or not."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hgnp.errors import RENAMED, InputError, check_renamed

FORMAT = 1
NUMBERS = (
    "epoch",
    "loss",
    "penalty",
    "radius",
    "curvature",
    "active",
    "val_loss",
    "metric",
    "kept",
    "neurons",
    "seconds",
    "train_seconds",
)
FIELD_TYPES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a number": (int | float, NUMBERS),
    "a string": (str, ("phase",)),
    "an object": (dict, ("blocks", "widths")),
}
SAVED_START = "weights saved by hgnp in "
"""`start` in run.json begins so if the initial weights are a file of `hgnp.save`; its name follows."""
OLD_SAVED_START = "the pruned network in "
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run folder: `info` is run.json, `rows` the lines of metrics.jsonl, `result` result.json (None: not finished).

    `label` names its method in a comparison; None stands for `method`."""

    folder: Path
    info: Mapping[str, Any]
    rows: tuple[Row, ...]
    result: Mapping[str, Any] | None
    label: str | None = None

    @property
    def title(self) -> str:
        """The folder's name: the one name of a run that its user chose."""
        return self.folder.name

    @property
    def method(self) -> str:
        return str(self.info["method"])

    @property
    def seed(self) -> int | None:
        return self.info.get("seed")

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return str(self.info.get("metric") or "metric")

    @property
    def ranks(self) -> int:
        """The number of processes that trained the network together."""
        return int(self.info.get("ranks") or 1)

    @property
    def hardware(self) -> str:
        """The GPU's name or the number of CPU threads, of how many processes, and how many runs shared it."""
        device, threads = str(self.info.get("device") or "unknown"), self.info.get("threads")
        if device == "cpu" and threads:
            device += f", {threads} thread{'s' if threads != 1 else ''}"
        if self.ranks > 1:
            device = f"{self.ranks} × {device}"
        shared_by = self.info.get("shared_by", 1)
        return device if shared_by == 1 else f"{device} shared by {shared_by} runs"

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.info["recipe"]

    @property
    def state(self) -> str:
        """Whether the run is finished, in words."""
        if self.result is None:
            if not self.rows:
                return "unfinished: no epoch is complete"
            last = self.rows[-1]
            return f"unfinished: the last complete epoch is {last['epoch']} ({last['phase']})"
        if self.result.get("stopped"):
            return f"stopped early: {self.result['stopped']}"
        return "finished" if self.result.get("reached") else "finished; the target was not reached"

    def curve(self) -> tuple[tuple[float, float], ...]:
        """The points (kept, metric) of accuracy against κ, from the full network down.

        One point per pruning level: the last epoch at each distinct `kept`. The first is the network after its warm-up; the
        last, of a finished run, is the fine-tuned network, which was trained `finetune_epochs` longer than the others.
        Epochs without a metric have no point.
        """
        levels: dict[float, float] = {}
        for row in self.rows:
            if row.get("metric") is not None:
                levels[float(row["kept"])] = float(row["metric"])
        return tuple(sorted(levels.items(), reverse=True))

    @property
    def snapshots(self) -> tuple[Row, ...]:
        """The snapshots in result.json: networks at intermediate κ, each fine-tuned separately, from large κ to small."""
        return tuple((self.result or {}).get("snapshots") or ())

    def snapshot_points(self) -> tuple[tuple[float, float], ...]:
        """The points (kept, metric) of the snapshots; snapshots of one round share a point."""
        return tuple(dict.fromkeys((row["kept"], row["metric"]) for row in self.snapshots if row["metric"] is not None))


def missing_measurements(result: Mapping[str, Any]) -> list[str]:
    """One line per reason why sharpness or latency was not measured."""
    lacking: dict[str, list[str]] = {}
    for side in ("before", "after"):
        for name, why in ((result.get(side) or {}).get("missing") or {}).items():
            lacking.setdefault(why, []).append(f"{name} {side}")
    return [f"not measured: {', '.join(names)}: {why}" for why, names in lacking.items()]


def read(folder: str | os.PathLike[str]) -> Run:
    """Read the run in `folder`. FileNotFoundError if there is none, InputError if it is damaged or too new."""
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        what = "one without run.json" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder} must be a run folder of hgnp run or hgnp.prune, got {what}")
    info = _object(folder / "run.json")
    version = info.get("format")
    if not isinstance(version, int):
        raise InputError(f"{folder / 'run.json'}: format must be an integer, got {version!r}")
    if version > FORMAT:
        raise InputError(
            f"{folder / 'run.json'}: format must be at most {FORMAT}, got {version}, which a newer hgnp wrote; upgrade hgnp"
        )
    for key, kind, expected in (
        ("method", str, "a string"),
        ("recipe", dict, "an object"),
        ("at_start", dict, "an object"),
    ):
        if not isinstance(info.get(key), kind):
            raise InputError(
                f"{folder / 'run.json'}: {key} must be {expected}, got {info.get(key)!r}; the file is damaged"
            )
    flatness = info["recipe"].get("flatness")
    for options, where in (
        (info["recipe"], "recipe"),
        (flatness if isinstance(flatness, dict) else {}, "recipe.flatness"),
    ):
        check_renamed(options, RENAMED.values(), f"{folder / 'run.json'}: {where}")
    result = _object(folder / "result.json") if (folder / "result.json").is_file() else None
    _check_snapshots(result or {}, folder / "result.json")
    return Run(folder.resolve(), info, _rows(folder / "metrics.jsonl"), result)


def _check_snapshots(result: Mapping[str, Any], file: Path) -> None:
    rows = result.get("snapshots") or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{file}: snapshots must be a list of objects, got {rows!r}; the file is damaged")
    for row in rows:
        for key in ("asked", "kept", "metric"):
            if not isinstance(row.get(key), int | float) and (key != "metric" or row.get(key, 0) is not None):
                raise InputError(
                    f"{file}: {key} of a snapshot must be a number, got {row.get(key)!r}; the file is damaged"
                )


def _rows(file: Path) -> tuple[Row, ...]:
    if not file.is_file():
        return ()
    rows: list[Row] = []
    for number, line in enumerate(_text(file).splitlines(), start=1):
        where = f"{file} line {number}"
        row = _parse(line, where)
        for expected, (kind, keys) in FIELD_TYPES.items():
            for key in keys:
                if row.get(key) is not None and not isinstance(row[key], kind):
                    raise InputError(f"{where}: {key} must be {expected}, got {row[key]!r}")
        for key in ("epoch", "kept", "phase"):
            if row.get(key) is None:
                raise InputError(f"{where}: {key} must be present, got none")
        if rows and row["epoch"] <= rows[-1]["epoch"]:
            raise InputError(
                f"{where}: epoch must be above {rows[-1]['epoch']}, the epoch of the line before, got {row['epoch']}"
            )
        rows.append(row)
    return tuple(rows)


def _object(file: Path) -> dict[str, Any]:
    return _parse(_text(file), str(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} must be text in UTF-8, got {error.reason} at byte {error.start}; it is damaged"
        ) from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deeply nested"
        raise InputError(f"{where} must be JSON, got text that is not ({reason}); it is damaged") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a JSON object, got a {type(value).__name__}; it is damaged")
    return value
