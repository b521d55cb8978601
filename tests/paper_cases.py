"""Synthetic run folders and bench files of the paper's experiments, from formulas and presets."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hgnp.experiments.presets import preset
from hgnp.recipe import Recipe
from hgnp.reporting import hybrid
from run_cases import write_run

GPU = "NVIDIA H200"
FEATURES = {
    key: dict(sample.features)
    for key, sample in zip(
        ("alexnet-flowers", "resnet18-cifar10", "resnet18-birds", "vgg16-cifar10"), hybrid.PAPER, strict=True
    )
}
IMAGENET = {
    "alexnet-flowers": "14 of 16 tensors from alexnet.safetensors; at random: classifier.6; not used: classifier.6",
    "resnet18-birds": "100 of 102 tensors from resnet18.safetensors; at random: fc; not used: fc",
}


def write_paper_run(
    folder: Path,
    experiment: str,
    *,
    of: str | None = None,
    method: str | None = None,
    own_schedule: bool = True,
    seed: int = 0,
    accuracy: Callable[[float], float] = lambda kept: 0.9 - 0.2 * (1 - kept),
    device: str = GPU,
    start: str | None = None,
    train_seconds: float = 10.0,
    snapshots: Sequence[tuple[float, float, float]] = (),
    epochs: int | None = None,
    changes: Sequence[str] = (),
) -> Path:
    """A run of the preset `of`, by default the experiment's own; κ falls in nine equal rounds from 1 to the preset's target.

    `snapshots`: requested κ, κ and accuracy of each. `own_schedule`: whether a method has the schedule that the preset has
    for it. `epochs`: interrupted after this number.
    """
    config = preset(of or experiment).with_settings([f"seed={seed}", *changes])
    if method is not None:
        config = config.with_method(method) if own_schedule else config.with_settings([f"recipe.method={method}"])
    recipe = Recipe.from_dict({**config.recipe, "seed": seed}).resolved()
    write_run(
        folder, method=recipe.method, seed=seed, accuracy=accuracy, keep=recipe.keep, name=config.name,
        model=config.model, features=FEATURES[experiment], epochs=epochs,
    )  # fmt: skip
    dataclasses.replace(config, methods={}).write(folder / "config.yaml")

    info = json.loads((folder / "run.json").read_text())
    begun = start or IMAGENET.get(experiment, "random weights")
    info |= {"recipe": recipe.as_dict(), "device": device, "start": begun}
    (folder / "run.json").write_text(json.dumps(info))
    rows = [
        json.loads(line) | {"train_seconds": train_seconds}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if epochs is None:
        result = json.loads((folder / "result.json").read_text())
        result["snapshots"] = [{"asked": a, "got": k, "kept": k, "metric": m} for a, k, m in snapshots]
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_bench(
    file: Path, experiment: str, times: dict[tuple[str, float], float], *, device: str = "cuda", batch: int = 2000,
    date: str = "2026-11-16T12:00:00+00:00",
) -> Path:  # fmt: skip
    """`times`: (network, κ) → milliseconds."""
    count = FEATURES[experiment]["parameters"]
    rows: list[dict[str, Any]] = [
        {"network": network, "variant": "eager", "device": device, "batch": batch, "median_ms": ms, "kept": kept,
         "parameters": count if network == "full" else round(kept * count)}
        for (network, kept), ms in times.items()
    ]  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    name = GPU if device == "cuda" else "Some CPU"
    file.write_text(json.dumps({"date": date, "devices": {device: name}, "rows": rows}))
    return file


def write_everything(folder: Path) -> Path:
    """Three seeds of VGG-16 by both methods, fast, Taylor with HGNP's schedule; an unfinished literal run; one run of each
    method of the others; both ablations; timings."""
    for seed in range(3):
        off = 0.002 * (seed - 1)
        write_paper_run(
            folder / "vgg" / f"hgnp-{seed}", "vgg16-cifar10", of="vgg16-cifar10-fast", seed=seed, train_seconds=15.0,
            accuracy=lambda k, off=off: 0.94 - 0.03 * (1 - k) ** 8 + off,
            snapshots=[(0.144, 0.142, 0.9228 + off), (0.10, 0.098, 0.9196 + off), (0.05, 0.0495, 0.914 + off)],
        )  # fmt: skip
        write_paper_run(
            folder / "vgg" / f"taylor-{seed}", "vgg16-cifar10", of="vgg16-cifar10-fast", method="taylor",
            own_schedule=False, seed=seed, accuracy=lambda k, off=off: 0.942 - 0.06 * (1 - k) ** 6 - off,
        )  # fmt: skip
    write_paper_run(folder / "vgg" / "literal-0", "vgg16-cifar10", epochs=7)
    write_paper_run(folder / "r18" / "hgnp", "resnet18-cifar10", accuracy=lambda k: 0.945 - 0.05 * (1 - k) ** 4)
    write_paper_run(
        folder / "r18" / "taylor", "resnet18-cifar10", method="taylor", accuracy=lambda k: 0.948 - 0.06 * (1 - k) ** 4
    )
    write_paper_run(
        folder / "birds" / "hgnp",
        "resnet18-birds",
        start="random weights",
        accuracy=lambda k: 0.45 - 0.2 * (1 - k) ** 2,
    )
    flowers = {
        None: lambda k: 0.80 - 0.06 * (1 - k) ** 2,
        "no-training-penalty": lambda k: 0.80 - 0.10 * (1 - k) ** 2,
        "no-scoring-penalty": lambda k: 0.80 - 0.12 * (1 - k) ** 2,
    }
    features_only = "10 of 16 tensors from features.safetensors; at random: classifier.1, classifier.4, classifier.6"
    for name, accuracy in flowers.items():
        of = "-".join(part for part in ("alexnet-flowers", name, "fast") if part)
        write_paper_run(folder / "flowers" / of, "alexnet-flowers", of=of, start=features_only, accuracy=accuracy)
    write_paper_run(
        folder / "flowers" / "taylor", "alexnet-flowers", method="taylor", start=features_only,
        accuracy=lambda k: 0.81 - 0.7 * (1 - k) ** 3,
    )  # fmt: skip
    vgg = {("full", 1.0): 20.0, ("weight-pruned", 0.045): 21.0, ("neuron-pruned", 0.0447): 5.0}
    write_bench(folder / "vgg" / "hgnp-0" / "bench.json", "vgg16-cifar10", vgg)
    equal = {("full", 1.0): 400.0, ("neuron-pruned", 0.142): 200.0, ("weight-pruned", 0.03): 410.0}
    write_bench(folder / "bench-equal.json", "vgg16-cifar10", equal, device="cpu", batch=128)
    return folder
