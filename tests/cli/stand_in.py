"""A run that trains nothing: it tells its progress, leaves run.json and result.json, and can be made to end badly."""

import json
from pathlib import Path
from typing import Any


class Prune:
    """In the place of `hgnp.train.prune`. `calls` holds what it was given; `fail` is raised after the first epoch."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fail: BaseException | None = None

    def __call__(self, net: Any, train: Any, val: Any = None, **given: Any) -> None:
        self.calls.append({"net": net, "train": train, "val": val, **given})
        out, progress, recipe = Path(given["out"]), given["_progress"], given["recipe"]
        out.mkdir(parents=True, exist_ok=True)
        size = sum(each.numel() for each in net.parameters())
        info = {
            "format": 1, "recipe": recipe.as_dict(),
            "metric": "accuracy", "method": recipe.method, "model": type(net).__name__, "device": str(given["device"]),
            "at_start": {"parameters": size, "neurons": 30, "macs": 4000}, **given["_about"],
        }  # fmt: skip
        (out / "run.json").write_text(json.dumps(info))
        progress.start({**info, "epochs_done": 0, "out": str(out)})
        progress.step(0, 3, 21, 1.5)
        row = {"epoch": 0, "phase": "prune", "loss": 0.25, "metric": 0.985, "kept": 0.5, "radius": None, "seconds": 1.0}
        progress.epoch(row, 61.0)
        if self.fail:
            raise self.fail
        content = {
            "reached": True, "target": {"kind": "params", "asked": 0.1, "got": 0.0981}, "stopped": None, "epochs": 1,
            "metric": "accuracy",
            "seconds": 1.25, "parts": 1, "latency": {"batch": 256, "threads": 2, "device": "cpu"},
            "before": {"metric": 0.99, "parameters": size, "macs": 4000, "neurons": 30, "latency_ms": 8.0, "sharpness": 2.0},
            "after": {"metric": 0.985, "parameters": 1000, "macs": 400, "neurons": 3, "latency_ms": 2.0, "sharpness": None},
        }  # fmt: skip
        (out / "result.json").write_text(json.dumps(content))
