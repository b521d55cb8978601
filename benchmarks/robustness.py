"""Where flatness could help: accuracy of trained networks on corrupted images, with 4-bit weights, and after one-shot cuts.

    python benchmarks/robustness.py results/cifar10-best results/cifar10-rivals --data DIR --device cuda

Takes folders of finished runs with their weights (`model.safetensors`), snapshots included. Each folder's numbers go to its
`robustness.json` as soon as they are known, and a folder that has them is skipped: the same command continues.

corruptions  of the test images, two severities each, the same for every network: Gaussian noise of 6 and 12 % of the range,
             Gaussian blur of 0.7 and 1.2 px, contrast times 0.4 and 0.2, pixelation to 3/4 and 1/2 of the side
4-bit        weights of convolutions and linear layers rounded to 15 levels, symmetric, one scale per filter
cuts         to 75 and 50 % of the network's own parameters by Taylor scores, without training
"recalibrated" is after `hgnp.recalibrate` on training batches.
"""

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp
from hgnp.experiments import reload
from hgnp.io import runs
from hgnp.io.atomic import write

Batches = list[tuple[Tensor, Tensor]]
CUTS = (0.75, 0.5)
CALIBRATION = 32
"""Training batches for scores and statistics."""


def noise(x: Tensor, share: float, top: float) -> Tensor:
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return (x + share * top * drawn.to(x)).clamp(0, top)


def blur(x: Tensor, sigma: float, top: float) -> Tensor:
    reach = math.ceil(3 * sigma)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2).to(x)
    weights = weights / weights.sum()
    channels = x.shape[1]
    for shape, pad in (((1, 1, -1, 1), (0, 0, reach, reach)), ((1, 1, 1, -1), (reach, reach, 0, 0))):
        kernel = weights.view(shape).expand(channels, 1, *weights.view(shape).shape[2:])
        x = F.conv2d(F.pad(x, pad, mode="replicate"), kernel, groups=channels)
    return x


def contrast(x: Tensor, factor: float, top: float) -> Tensor:
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + factor * (x - mean)


def pixelate(x: Tensor, share: float, top: float) -> Tensor:
    side = max(1, round(x.shape[-1] * share))
    return F.interpolate(F.interpolate(x, size=side, mode="area"), size=x.shape[-1], mode="nearest")


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], float]] = {
    "noise 1": (noise, 0.06),
    "noise 2": (noise, 0.12),
    "blur 1": (blur, 0.7),
    "blur 2": (blur, 1.2),
    "contrast 1": (contrast, 0.4),
    "contrast 2": (contrast, 0.2),
    "pixelation 1": (pixelate, 0.75),
    "pixelation 2": (pixelate, 0.5),
}


@torch.no_grad()
def accuracy(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    net.eval()
    found = [((net(x).argmax(1) == y).sum(), len(y)) for x, y in batches]
    return float(sum(right for right, _ in found)) / sum(count for _, count in found)


def corrupted(loader: Any, name: str) -> Batches:
    """The validation images with this corruption, in the loader's batches."""
    change, severity = CORRUPTIONS[name]
    images, labels = loader.source.images, loader.source.labels
    top = 255.0 if images.max() > 16 else 16.0  # handwritten digits
    changed = change(images.float(), severity, top).mul_(loader._scale).add_(loader._shift)
    return list(zip(changed.split(loader.batch), labels.split(loader.batch), strict=True))


@torch.no_grad()
def quantize(net: nn.Module, bits: int = 4) -> None:
    """Rounds the weights of convolutions and linear layers, symmetric, one scale per filter."""
    levels = 2 ** (bits - 1) - 1
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            flat = layer.weight.flatten(1)
            scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-12) / levels
            layer.weight.copy_(((flat / scale).round() * scale).view_as(layer.weight))


def cut(net: nn.Module, batches: Batches, share: float) -> float:
    """Removes the least important neurons until at most this share of the parameters is left; returns what is."""
    neurons = hgnp.Neurons(net, batches[0][0][:2])
    scores = hgnp.sensitivity(net, neurons, batches)
    low, high = 1, neurons.count - 1
    while low < high:  # the smallest number that is enough
        middle = (low + high) // 2
        if neurons.preview(neurons.least(scores, middle, confirm=False)).kept <= share:
            high = middle
        else:
            low = middle + 1
    neurons.remove(neurons.least(scores, low))
    return neurons.kept


def measure(net: nn.Module, train: Iterable[tuple[Tensor, Tensor]], val: Any) -> dict[str, float]:
    batches = list(itertools.islice(train, CALIBRATION))
    found = {"clean": accuracy(net, val)}
    for name in CORRUPTIONS:
        found[name] = accuracy(net, corrupted(val, name))
    changes: dict[str, Callable[[nn.Module], Any]] = {
        "4-bit": quantize,
        **{f"cut to {share:.0%}": lambda each, share=share: cut(each, batches, share) for share in CUTS},
    }
    for name, change in changes.items():
        other = copy.deepcopy(net)
        change(other)
        found[name] = accuracy(other, val)
        hgnp.recalibrate(other, batches)
        found[f"{name}, recalibrated"] = accuracy(other, val)
    return found


def folders(given: list[Path]) -> list[Path]:
    """The finished runs with weights in these folders, and their snapshots."""
    finished = sorted({file.parent for folder in given for file in folder.rglob("result.json")})
    for path in finished:
        if not (path / "model.safetensors").is_file():
            print(f"{path}: left out, as it has no model.safetensors", flush=True)
    return [path for path in finished if (path / "model.safetensors").is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    for folder in folders(given.folders):
        if (folder / "robustness.json").is_file():
            print(f"{folder}: known", flush=True)
            continue
        start = time.perf_counter()
        made = reload.experiment(folder, given.data, given.device)
        torch.manual_seed(0)  # the same training batches for every network
        run, net = runs.read(folder), made.net.to(given.device)
        assert run.result is not None
        method, asked = run.method, run.result["target"]["asked"]
        if (folder / "rival.json").is_file():  # another library has pruned it before this run fine-tuned it
            rival = json.loads((folder / "rival.json").read_text())
            method, asked = rival["method"], rival["asked"]
        facts = {
            "network": run.info.get("name") or reload.config_of(folder).name, "method": method, "seed": run.seed,
            "kept_asked": asked, "accuracy": measure(net, made.train, made.val),
        }  # fmt: skip
        write(folder / "robustness.json", json.dumps(facts, indent=1) + "\n")
        shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in facts["accuracy"].items())
        print(f"{folder} ({time.perf_counter() - start:.0f} s): {shown}", flush=True)


if __name__ == "__main__":
    main()
