"""A run to be killed and resumed, also in a process of its own: `python resumable.py OUT RECIPE`.

Its dataset draws from the generators of Python, NumPy and PyTorch in workers, and its loader has its own generator.
"""

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hgnp


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch_noise = torch.randn(1, 8, 8)
        label = index % 3
        noise = random.random() + float(np.random.rand())
        return torch_noise * 0.5 + noise * 0.1 + label, torch.tensor(label)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.b, self.nb = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.nb(self.b(x)) + x)
        return self.out(self.drop(x.mean((2, 3))))


RECIPES: dict[str, dict[str, Any]] = {
    "hgnp": {
        "mu": 0.01,
        "bound": 0.0,
        "schedule": "cosine",
        "anneal": "run",
        "mu_warmup_epochs": 2,
        "refresh_every": 4,
    },
    "every third": {"mu": 0.01, "bound": 0.0, "penalty_every": 3, "flatness": {"direction_over": "network"}},
    "hybrid": {
        "method": "hybrid",
        "threshold": 0.6,
        "mu": 0.1,
        "bound": -1.0,
        "mu_warmup_epochs": 2,
        "refresh_every": 4,
    },
    "sampled": {
        "mu": 0.01,
        "bound": 0.0,
        "flatness": {"fisher_type": "mc", "direction_from": "this_batch"},
        "coupling": "paper",
    },
    "random": {"method": "random", "schedule": "one_cycle", "anneal": "run", "prune_unit": "steps", "prune_every": 2},
    "sam": {"method": "sam", "schedule": "steps", "clip_norm": 1.0},
    "snapshots": {
        "mu": 0.01,
        "bound": 0.0,
        "schedule": "cosine",
        "neurons_per_round": 4,
        "finetune_epochs": 3,
        "snapshots": (0.8, 0.6),
    },
}


def recipe(name: str) -> hgnp.Recipe:
    quick = {"neurons_per_round": 6, "warmup_epochs": 2, "finetune_epochs": 2, "lr": 0.05, "measure": "none"}
    return hgnp.Recipe(keep=0.3, seed=7, **(quick | RECIPES[name]))


def run(out: str, name: str, on_epoch: Any = None) -> hgnp.Result:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    loader = DataLoader(
        Noisy(),
        batch_size=16,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(3),
    )
    val = [(torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,)))]
    optimizer = torch.optim.AdamW if name == "random" else None
    return hgnp.prune(
        Net(), loader, val, recipe=recipe(name), optimizer=optimizer, out=out, resume=True, on_epoch=on_epoch
    )


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
