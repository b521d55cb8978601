"""Run folders in the format of docs/runs.md, written from formulas, so that every number in them is known."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hgnp.recipe import Recipe

FEATURES = {
    "train_samples": 6000,
    "val_samples": 6000,
    "image_side": 64,
    "classes": 50,
    "conv_layers": 12,
    "linear_layers": 2,
    "parameters": 12_000_000,
    "mean_kernel": 3.0,
    "kernels": 3000,
}
LAYERS = {"features.0": 64, "features.3": 128, "features.7": 256, "classifier.1": 512}
START = 1_000_000
WARMUP, ROUNDS, FINETUNE = 3, 9, 4


def straight(kept: float) -> float:
    return 0.9 - 0.2 * (1 - kept)


def write_run(
    folder: Path,
    *,
    method: str = "hgnp",
    seed: int | None = 0,
    accuracy: Callable[[float], float] | None = straight,
    epochs: int | None = None,
    keep: float = 0.1,
    metric: str = "accuracy",
    name: str | None = "demo",
    model: str = "nets.Small",
    features: dict[str, Any] | None = None,
    **recipe: Any,
) -> Path:
    """κ falls from 1 to `keep` in equal rounds of one epoch. The metric of a level's last epoch is accuracy(κ); warm-up and
    fine-tuning rise to it. `epochs`: the run was interrupted after so many. `accuracy=None`: no validation data."""
    folder.mkdir(parents=True)
    chosen = Recipe(keep=keep, method=method, warmup_epochs=WARMUP, finetune_epochs=FINETUNE, seed=seed, **recipe)
    penalized = method == "hgnp" and chosen.mu > 0
    info = {
        "format": 1,
        "name": name,
        "method": method,
        "seed": seed,
        "metric": metric,
        "model": model,
        "recipe": chosen.as_dict(),
        "versions": {"hgnp": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        "device": "cpu",
        "threads": 2,
        "at_start": {"parameters": START, "neurons": sum(LAYERS.values()), "macs": 30_000_000},
        "start": "random",
        "features": FEATURES if features is None else features,
    }
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")

    rows = []
    total = WARMUP + ROUNDS + FINETUNE
    previous = sum(LAYERS.values())
    for epoch in range(total if epochs is None else epochs):
        phase = "warmup" if epoch < WARMUP else "prune" if epoch < WARMUP + ROUNDS else "finetune"
        done = min(max(epoch - WARMUP + 1, 0), ROUNDS) / ROUNDS
        kept = 1 - (1 - keep) * done
        behind = {"warmup": WARMUP - 1 - epoch, "prune": 0, "finetune": total - 1 - epoch}[phase]
        widths = {
            layer: max(1, round(width * (1 - (0.5 + 0.1 * i) * done)))
            for i, (layer, width) in enumerate(LAYERS.items())
        }
        steepest = list(LAYERS)[epoch % 3]
        rows.append(
            {
                "epoch": epoch,
                "phase": phase,
                "loss": 2.0 * math.exp(-0.2 * epoch) + 0.2,
                "penalty": 1e-3 * math.exp(-0.1 * epoch) if penalized else 0.0,
                "radius": 4.0 * math.exp(-0.15 * epoch) if penalized else None,
                "curvature": 3.0 * math.exp(-0.12 * epoch) if penalized else None,
                "active": 0.8 if penalized else None,
                "blocks": {steepest: 0.75, "classifier.1": 0.25} if penalized else {},
                "val_loss": None if accuracy is None else 2.0 * math.exp(-0.18 * epoch) + 0.3,
                "metric": None if accuracy is None else accuracy(kept) - 0.05 * behind,
                "kept": kept,
                "parameters": round(START * kept),
                "neurons": sum(widths.values()),
                "macs": round(30_000_000 * kept),
                "removed": previous - sum(widths.values()),
                "widths": widths,
                "lr": 0.05,
                "mu": chosen.training_mu,
                "seconds": 12.0 - 6.0 * done + (3.0 if phase == "prune" else 0.0),
            }
        )
        previous = sum(widths.values())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if epochs is None:
        (folder / "result.json").write_text(json.dumps(_result(rows, keep)), encoding="utf-8")
    return folder


def _result(rows: list[dict[str, Any]], keep: float) -> dict[str, Any]:
    def facts(row: dict[str, Any], sharpness: float, latency: float) -> dict[str, Any]:
        sizes = {key: row[key] for key in ("metric", "parameters", "neurons", "macs")}
        return {**sizes, "loss": row["val_loss"], "sharpness": sharpness, "latency_ms": latency}

    return {
        "reached": True,
        "target": {"kind": "params", "asked": keep, "got": rows[-1]["kept"]},
        "stopped": None,
        "epochs": len(rows),
        "seconds": sum(row["seconds"] for row in rows),
        "parts": 1,
        "before": facts(rows[WARMUP - 1], 12.0, 40.0),
        "after": facts(rows[-1], 3.5, 10.0),
        "latency": {"batch": 64, "threads": 2, "device": "cpu"},
    }
