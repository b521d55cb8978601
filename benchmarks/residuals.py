"""How exact the eigenpairs of a training run are: `flat.residual` in every step.

    python benchmarks/residuals.py [--epochs 20] [--out benchmarks/residuals.md]

The demo's network at half its width and its data (handwritten digits, batches of 64, SGD with momentum at rate 0.05), with the
default choices and with the paper's, v renewed in every step. The residual is ‖(Ψ ⊗ Γ)v − λv‖/λ of the penalised pair; the
error of λ is at most that share of it, and most often its square.
"""

import argparse
import datetime
from pathlib import Path

import torch

import hgnp
from hgnp.experiments.data import digits
from hgnp.experiments.models import DigitsNet
from hgnp.io.atomic import write

QUANTILES = (0.5, 0.9, 0.99, 1.0)


def residuals(bundle: str, epochs: int) -> list[float]:
    """Of every step, sorted."""
    torch.manual_seed(0)
    net, data = DigitsNet(width=32), digits(batch=64, drop_last=True)
    flat = hgnp.Flatness(net, flatness=bundle)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    found = []
    for _ in range(epochs):
        for x, y in data.train:
            optimizer.zero_grad()
            flat.backward(x, y)
            optimizer.step()
            found.append(flat.residual)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [
        "# Residuals of the eigenpairs in a training run",
        "",
        f"`python benchmarks/residuals.py --epochs {given.epochs}`, {datetime.date.today()}, CPU, torch {torch.__version__}.",
        "",
        "| choices | steps | median | 90 % | 99 % | largest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for bundle in ("default", "paper"):
        found = residuals(bundle, given.epochs)
        cells = [f"{found[min(int(q * len(found)), len(found) - 1)]:.1e}" for q in QUANTILES]
        lines.append(f"| {bundle} | {len(found)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.out is not None:
        write(given.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
