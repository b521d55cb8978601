"""README's ten-line example on handwritten digits: HGNP with the defaults of `Recipe` beside Taylor, over seeds.

    python benchmarks/example.py --out benchmarks/example.md

The two methods take turns in one process with one thread; a time is the processor time of one call of `hgnp.prune`.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hgnp
from hgnp.experiments.models.digits import DigitsNet
from hgnp.io.atomic import write

METHODS = ("hgnp", "taylor")


def pruned(method: str, seed: int) -> tuple[float, float, float]:
    """Accuracy, κ and seconds of one run."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, val = (TensorDataset(x[part], y[part]) for part in (order[:1400], order[1400:]))
    torch.manual_seed(seed)
    net = DigitsNet()
    start = time.process_time()
    result = hgnp.prune(
        net,
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=256),
        recipe=hgnp.Recipe(
            keep=0.10, method=method, warmup_epochs=5, prune_every=1, neurons_per_round=50, finetune_epochs=5, seed=seed
        ),
        verbose=False,
    )
    return result.history[-1]["metric"], result.kept, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for method in METHODS:
        pruned(method, 0)  # PyTorch loads what it needs at first use
    found = [{method: pruned(method, seed) for method in METHODS} for seed in range(arguments.seeds)]
    ratios = [row["hgnp"][2] / row["taylor"][2] for row in found]
    gaps = [row["hgnp"][0] - row["taylor"][0] for row in found]
    lines = [
        "# The ten-line example",
        "",
        f"`python {' '.join(sys.argv)}`, {datetime.date.today()}, {platform.machine()}, one thread, torch {torch.__version__}: "
        "the example of the README on DigitsNet and scikit-learn's digits (1,400 to train, 397 to validate, batch 64), "
        "once with each method in turn.",
        "",
        "| seed | HGNP | Taylor | κ, HGNP | κ, Taylor | s, HGNP | s, Taylor | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for seed, row in enumerate(found):
        (a, kept_a, time_a), (b, kept_b, time_b) = row["hgnp"], row["taylor"]
        cells = [f"{seed}", f"{a:.2%}", f"{b:.2%}", f"{kept_a:.2%}", f"{kept_b:.2%}", f"{time_a:.1f}", f"{time_b:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {time_a / time_b:.2f} |")
    lines += [
        "",
        f"HGNP takes {statistics.median(ratios):.2f} times as long as Taylor (median; target: at most 1.3) and differs in "
        f"accuracy by {100 * statistics.mean(gaps):+.2f} points on average. One validation image is 0.25 points.",
        "",
    ]
    print("\n".join(lines))
    if arguments.out:
        write(arguments.out, "\n".join(lines))


if __name__ == "__main__":
    main()
