"""The two ways to the full Hessian along v: time of C, q = vᵀHv and the gradient of both, against a plain step.

python benchmarks/hessian.py --out benchmarks/hessian.md                    on a CPU
python benchmarks/hessian.py --device cuda --batch 128 --out OUT.md         in bfloat16, without CUDA graphs

v lies in the first layer, where most of the network depends on it.
"""

import argparse
import contextlib
import datetime
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hgnp.curvature.autodiff.hessian import Hessian
from hgnp.curvature.autodiff.second_tangent import SecondTangent
from hgnp.curvature.losses import CrossEntropy
from hgnp.experiments.models.resnet import ResNet18
from hgnp.experiments.models.vgg import VGG16
from hgnp.io.atomic import write
from hgnp.timing import time_interleaved

NETS: dict[str, Callable[[], nn.Module]] = {
    "VGG-16-BN": lambda: VGG16(num_classes=10, form="cifar"),
    "ResNet-18": lambda: ResNet18(num_classes=10, stem="cifar"),
}


def calls(net: nn.Module, batch: int, device: torch.device) -> list[Callable[[], Any]]:
    """A plain step, and one with q by either route."""
    net.to(device)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)
    first = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    tangents = [(p, torch.randn_like(p) / p.numel() ** 0.5) for p in first.parameters()]

    def step(make: Callable[[], Any] | None) -> None:
        net.zero_grad()
        mode = None if make is None else make()
        half = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
        with half, mode or contextlib.nullcontext():
            z = net(x)
        loss = F.cross_entropy(z.float(), y) if mode is None else F.cross_entropy(z, y)
        (loss if mode is None else loss + mode.quotient(loss, z, y)).backward()

    return [
        lambda: step(None),
        lambda: step(lambda: SecondTangent(tangents, CrossEntropy())),
        lambda: step(lambda: Hessian(tangents, observer=None)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    lines = [
        "| network | plain step, ms | second-order tangents | two reverse passes |",
        "|---|--:|--:|--:|",
    ]
    for name, make in NETS.items():
        found = time_interleaved(
            calls(make(), arguments.batch, device), device=device, repeats=arguments.repeats, warmup=2
        )
        plain, second, reverse = (latency.median for latency in found)
        lines.append(f"| {name} | {plain:.0f} | {second / plain:.1f}× | {reverse / plain:.1f}× |")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    how = "in bfloat16, without CUDA graphs, " if device.type == "cuda" else ""
    command = " ".join(["python", "benchmarks/hessian.py", *sys.argv[1:]])
    text = (
        "# The full Hessian along v\n\n"
        f"`{command}`, {datetime.date.today()}, {where}, torch {torch.__version__}: C, q = vᵀHv along v in the first layer, "
        f"and the gradient of both, {how}batch {arguments.batch} of 3 × 32 × 32, as multiples of a plain step, median of "
        f"{arguments.repeats} alternating repeats.\n\n" + "\n".join(lines) + "\n"
    )
    print(text)
    if arguments.out is not None:
        write(arguments.out, text.encode())


if __name__ == "__main__":
    main()
