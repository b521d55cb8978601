"""What was timed, under which conditions: as rows, as JSON, as a table, as CSV."""

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from hgnp.io.atomic import write_csv


@dataclass(frozen=True)
class Bench:
    """What was timed: a row for each network, variant, device and batch size."""

    rows: list[dict[str, Any]]
    """`network`, `variant`, `device`, `batch`; `median_ms`, `low_ms`, `high_ms` (quartiles), `repeats`; `parameters` and `macs`
    (of one sample) that are computed with, `kept`, `accuracy` (as given); `speedup` against the full network in the same
    variant, `speedup_eager` against it in eager mode; `difference` of the output from the same network's in eager mode,
    relative; `first_s`, seconds until the first result, compilation or export included; `reason` why there are no times."""
    about: dict[str, Any]
    """Date, versions, threads and the devices' names."""

    def as_dict(self) -> dict[str, Any]:
        return {**self.about, "rows": self.rows}

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        header = list(self.rows[0])
        return write_csv(path, header, [[row[name] for name in header] for row in self.rows])

    def table(self) -> Table:
        columns = ("network", "kept", "variant", "batch", "ms", "quartiles", "speed-up", "against eager", "MMACs")
        several = len({row["device"] for row in self.rows}) > 1
        table = Table(
            title=escape(f"Inference, {', '.join(self.about['devices'].values())}"),
            title_justify="left",
            caption_justify="left",
        )
        for name in (*(["device"] if several else []), *columns):
            table.add_column(name, justify="left" if name in ("network", "variant", "device") else "right")
        for row in self.rows:
            cells = [row["network"], f"{row['kept']:.1%}", row["variant"], str(row["batch"])]
            if row["reason"] is None:
                cells += [f"{row['median_ms']:.2f}", f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"]
                cells += ["" if row[key] is None else f"{row[key]:.2f}×" for key in ("speedup", "speedup_eager")]
            else:
                cells += ["–"] * 4
            cells = [*([row["device"]] if several else []), *cells, f"{row['macs'] / 1e6:.1f}"]
            table.add_row(*map(escape, cells))
        failures = {f"{row['network']}, {row['variant']}, batch {row['batch']}": row["reason"] for row in self.rows}
        table.caption = escape("\n".join(f"{what}: {why}" for what, why in failures.items() if why)) or None
        return table


def conditions(devices: Sequence[torch.device]) -> dict[str, Any]:
    """What times depend on besides the networks."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("hgnp", "onnxruntime"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "threads": torch.get_num_threads(),
        "devices": {str(device): _name(device) for device in devices},
    }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
