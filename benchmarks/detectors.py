"""Detectors and segmentation nets pruned by `hgnp.prune` with their own losses on generated images, saved, loaded, exported.

    python benchmarks/detectors.py [names…] [--out benchmarks/detectors.md]

This shows that a run works, not what it achieves: two batches of two images, one epoch of training before and after pruning.
Rows are appended to runs/detectors.jsonl; what is there is not run again.
"""

import argparse
import datetime
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import ultralytics.cfg
from torch import Tensor, nn

import hgnp
from coverage import exports
from models import SEGMENTATION, TORCHVISION_DETECTORS, Case, cases

YOLO = ("yolov8n", "yolo11n")
SEGMENTATION_NETS = (*SEGMENTATION, "unet")
KEEP = {"ssd300_vgg16": 0.97}
"""The fraction of parameters to keep, 0.9 otherwise: SSD's first layers see 300 × 300 pixels."""
Row = dict[str, Any]


def case_of(name: str) -> Case:
    found = cases()
    return next(found[f"{family}/{name}"] for family in ("detect", "segment", "own") if f"{family}/{name}" in found)


def torchvision_run(name: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """A network, its batches and the arguments of `prune`. Images are lists, as torchvision's collating makes them."""
    case = case_of(name)
    batches = []
    for _ in range(2):
        (images, targets), _ = case.inputs()
        batches.append((list(images), [{key: _as_float(value) for key, value in each.items()} for each in targets]))
    options = {"unpack": lambda batch: (batch, batch[1]), "loss": lambda losses, targets: sum(losses.values())}
    return case.make(), batches, options | {"metric": lambda output, target: float(len(output))}


def _as_float(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def yolo_run(name: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    net = case_of(name).make()
    net.args = ultralytics.cfg.get_cfg()
    criterion: Callable[..., Any] = net.init_criterion()  # type: ignore[operator]
    batches = [
        {
            "img": torch.rand(2, 3, 64, 64),
            "batch_idx": torch.tensor([0.0, 0.0, 1.0, 1.0]),
            "cls": torch.randint(0, 5, (4, 1)).float(),
            "bboxes": torch.cat([torch.rand(4, 2) * 0.4 + 0.3, torch.rand(4, 2) * 0.3 + 0.1], 1),
        }
        for _ in range(2)
    ]
    labels = ("batch_idx", "cls", "bboxes")
    return (
        net,
        batches,
        {
            "unpack": lambda batch: (batch["img"], {key: batch[key] for key in labels}),
            "loss": lambda predictions, targets: criterion(predictions, targets)[0].sum() / 16,
        },
    )


def segmentation_run(name: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """Cross entropy of each pixel's class, as torchvision's own training script has it."""
    classes = 2 if name == "unet" else 5
    batches = [(torch.rand(2, 3, 64, 64), torch.randint(0, classes, (2, 64, 64))) for _ in range(2)]
    options = {} if name == "unet" else {"output": lambda returned: returned["out"]}
    return case_of(name).make(), batches, options | {"loss": F.cross_entropy}


def measure(name: str) -> Row:
    torch.manual_seed(0)
    make = yolo_run if name in YOLO else segmentation_run if name in SEGMENTATION_NETS else torchvision_run
    net, batches, options = make(name)
    recipe = hgnp.Recipe(
        keep=KEEP.get(name, 0.9), warmup_epochs=1, neurons_per_round=400, finetune_epochs=1, seed=0, measure="none"
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    start = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):
        result = hgnp.prune(net, batches, batches[:1], recipe=recipe, optimizer=optimizer, verbose=False, **options)
    history = result.history
    row: Row = {
        "name": name,
        "seconds": time.perf_counter() - start,
        "neurons": [history[0]["neurons"], history[-1]["neurons"]],
        "kept": result.kept,
        "loss": [history[0]["loss"], history[-1]["loss"]],
        "penalised": sum(bool(each["penalty"]) for each in history),
    }
    images = batches[0]["img"] if name in YOLO else batches[0][0]
    case = case_of(name)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        hgnp.save(net, folder)
        again = hgnp.load(folder, case.make()).eval()
        row["loads"] = all(map(torch.equal, *(_tensors(each.eval()(images)) for each in (net, again))))
    inputs = (images,), {}
    net, inputs = net.double(), torch.utils._pytree.tree_map(lambda x: x.double(), inputs)
    row["exports"] = all(exports(net, inputs, part) for part in case.exported)
    return row


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def render(rows: list[Row]) -> str:
    about = (
        f"`python benchmarks/detectors.py --out benchmarks/detectors.md`, {datetime.date.today()}, torch {torch.__version__}, "
        "one thread of a CPU. Generated images of 64 × 64 pixels (SSD and SSDlite resize them to 300 and 320), "
        "default recipe (HGNP). Loads: bit-equal outputs of a fresh instance. Exports: `torch.export` of the whole network "
        "(YOLO, segmentation), or of backbone and head, what lies before non-maximum suppression, equal to 1e-10 in float64."
    )
    columns = (
        "neurons, before → after | parameters kept | loss, first → last epoch | epochs with a penalty | loads | exports"
    )
    lines = [
        "# Detectors and segmentation nets pruned with their own losses",
        "",
        about,
        "",
        f"| network | {columns} | s |",
    ]
    lines.append("|---|--:|--:|--:|--:|---|---|--:|")
    for row in rows:
        before, after = row["neurons"]
        first, last = row["loss"]
        marks = ["yes" if row[key] else "**no**" for key in ("loads", "exports")]
        lines.append(
            f"| {row['name']} | {before:,} → {after:,} | {row['kept']:.1%} | {first:.3g} → {last:.3g} | {row['penalised']} | "
            f"{marks[0]} | {marks[1]} | {row['seconds']:.0f} |"
        )
    done = sum(row["loads"] and row["exports"] for row in rows)
    slowest = max(rows, key=lambda row: row["seconds"])
    return "\n".join(
        [
            *lines,
            "",
            f"- {done} of {len(rows)} are trained with their own loss, pruned, loaded and exported.",
            f"- {slowest['name']} takes longest. SSD keeps 97 %: its first layers see 300 × 300 pixels.",
            "- Scores by sample are not possible with torchvision's losses: they are |mean of the derivative| over a batch.",
            "- Two batches show that a run works. They say nothing about accuracy.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*TORCHVISION_DETECTORS, *YOLO, *SEGMENTATION_NETS]
    parser.add_argument("names", nargs="*", default=names, help="networks; all by default")
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("--rows", type=Path, default=Path("runs/detectors.jsonl"), help="where measurements are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # torchvision compiles RoI align where its own operators are missing
    arguments.rows.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    rows = {row["name"]: row for row in known}
    for name in arguments.names:
        if name not in rows:
            rows[name] = measure(name)
            print(rows[name], flush=True)
            with arguments.rows.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
    if arguments.out:
        arguments.out.write_text(render([rows[name] for name in names if name in rows]))


if __name__ == "__main__":
    main()
