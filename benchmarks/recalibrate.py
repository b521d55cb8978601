"""README's one-shot example on handwritten digits: half the neurons removed from a trained network, then recalibrated.

python benchmarks/recalibrate.py --out benchmarks/recalibrate.md
"""

import argparse
import datetime
import platform
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.experiments.models.digits import DigitsNet
from hgnp.io.atomic import write

EPOCHS = 10


def accuracy(net: nn.Module, val: TensorDataset) -> float:
    x, y = val.tensors
    with torch.no_grad():
        return float((net.eval()(x).argmax(1) == y).float().mean())


def measured(seed: int) -> list[float]:
    """Accuracy of the trained network, after the removal, after `recalibrate`; and the fraction of parameters kept."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = (TensorDataset(x[part], y[part]) for part in (order[:1400], order[1400:]))
    torch.manual_seed(seed)
    net = DigitsNet()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(EPOCHS):
        for inputs, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    found = [accuracy(net, val)]
    neurons = hgnp.Neurons(net, x[:2])
    neurons.remove(neurons.least(hgnp.sensitivity(net, neurons, [next(iter(loader))]), n=neurons.count // 2))
    found.append(accuracy(net, val))
    hgnp.recalibrate(net, loader)
    return [*found, accuracy(net, val), neurons.kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(seed) for seed in range(arguments.seeds)]
    lines = [
        "# One-shot removal, recalibrated",
        "",
        f"`python {' '.join(sys.argv)}`, {datetime.date.today()}, {platform.machine()}, torch {torch.__version__}: DigitsNet "
        f"trained for {EPOCHS} epochs on scikit-learn's digits (1,400 to train, 397 to validate, batch 64); then README's "
        "one-shot example: half the neurons removed by scores of one batch, and batch norms recalibrated on the training set. "
        "No training afterwards. Accuracy on the validation set.",
        "",
        "| seed | parameters kept | trained | half the neurons removed | recalibrated |",
        "|---|--:|--:|--:|--:|",
        *(f"| {seed} | {row[3]:.1%} | {row[0]:.1%} | {row[1]:.1%} | {row[2]:.1%} |" for seed, row in enumerate(rows)),
        "| mean | " + " | ".join(f"{statistics.mean(row[place] for row in rows):.1%}" for place in (3, 0, 1, 2)) + " |",
        "",
    ]
    print("\n".join(lines))
    if arguments.out:
        write(arguments.out, "\n".join(lines))


if __name__ == "__main__":
    main()
