"""Milliseconds of a training step on a GPU: operation by operation and from CUDA graphs, plain and with the flatness term.

    python benchmarks/engine.py [--out benchmarks/engine.md]

ResNet-18 and VGG-16-BN on CIFAR-10-shaped random data, batch 128, bfloat16, channels last, SGD with momentum. Ratios are to the
plain step from a graph of the same network in the same process.
"""

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hgnp
from hgnp.curvature.blocks import find_blocks
from hgnp.curvature.spectrum import Chosen
from hgnp.experiments.models import VGG16, ResNet18
from hgnp.training.engine import Engine

NETS: dict[str, Callable[[], nn.Module]] = {"ResNet-18": ResNet18, "VGG-16-BN": VGG16}
NATURAL: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain, as it is": (False, {"mu": 0.0}),
    "plain": (True, {"mu": 0.0}),
    "HGNP, as it is": (False, {}),
    "HGNP": (True, {}),
    "HGNP, v_every=4": (True, {"v_every": 4}),
    "HGNP, v_every=8": (True, {"v_every": 8}),
    "HGNP, v_from=this_batch": (True, {"v_from": "this_batch"}),
    "HGNP, flatness=paper": (True, {"flatness": "paper"}),
}
FORCED = {"the first block": 0, "the middle one": 0.5, "the last one": -1}


def timed(step: Callable[[], None], repeats: int, warmup: int = 40) -> float:
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def milliseconds(
    make: Callable[[], nn.Module], captured: bool, options: dict[str, Any], block: float | None, x: Tensor, y: Tensor
) -> tuple[float, str]:
    torch.manual_seed(0)
    net = make().cuda().to(memory_format=torch.channels_last)
    flat = hgnp.Flatness(net, **options)
    engine = Engine(flat)
    trainer = engine if captured else flat
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    blocks = find_blocks(net)
    forced = None if block is None else blocks[int(len(blocks) * block) if block > 0 else int(block)]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if forced is not None and flat.v.pairs:
            flat.v.chosen = Chosen.known(forced)
        with torch.autocast("cuda", torch.bfloat16):
            trainer.backward(x, y)
        optimizer.step()

    with engine.running():
        found = timed(step, 80 if captured else 24)
    assert engine.refused is None, engine.refused
    return found, flat.block or "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    x = torch.randn(128, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,), device="cuda")
    command = f"python benchmarks/engine.py{f' --out {out}' if out else ''}"
    lines = [
        "# Steps on a GPU", "",
        f"`{command}`, {datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}.", "",
        "Batch 128, CIFAR-10's shape, bfloat16, channels last. *As it is*: operation by operation; all others from CUDA "
        "graphs. *Block* is the one that was penalised last. A forced block's step renews no v: it is the cost of the "
        "tangent pass alone.", "",
        "| network | step | ms | ratio to plain | block |", "|---|---|--:|--:|---|",
    ]  # fmt: skip
    for name, make in NETS.items():
        base, _ = milliseconds(make, True, {"mu": 0.0}, None, x, y)
        for label, (captured, options) in NATURAL.items():
            found, block = milliseconds(make, captured, options, None, x, y)
            lines.append(f"| {name} | {label} | {found:.2f} | {found / base:.2f} | {block} |")
            print(lines[-1], flush=True)
        for label, block in FORCED.items():
            found, chosen = milliseconds(make, True, {"v_every": 10**6}, block, x, y)
            lines.append(f"| {name} | HGNP, {label} in every step | {found:.2f} | {found / base:.2f} | {chosen} |")
            print(lines[-1], flush=True)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
