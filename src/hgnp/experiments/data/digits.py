"""Scikit-learn's handwritten digits: small, and available without a download."""

import torch

from hgnp.experiments.data.loader import Data, InMemorySource, Loader, subset_indices
from hgnp.train import as_device

TRAIN = 1347
MEAN, STD = (4.884,), (6.017,)  # of values from 0 to 16


def digits(
    *, batch: int, device: str | torch.device = "cpu", limit: int | None = None, drop_last: bool = False
) -> Data:
    """1,347 training and 450 validation images of 8 px and one channel, always the same split. No flips."""
    from sklearn.datasets import load_digits  # takes a second to import, which runs on other data need not wait for

    where = as_device(device)
    bunch = load_digits()
    images = torch.tensor(bunch.images).to(torch.uint8).unsqueeze(1)
    labels = torch.tensor(bunch.target)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[mixed], labels[mixed]
    keep = subset_indices(labels[:TRAIN], limit)
    train, val = (
        InMemorySource(images[keep], labels[keep], where),
        InMemorySource(images[TRAIN:], labels[TRAIN:], where),
    )
    return Data(
        train=Loader(train, batch=batch, mean=MEAN, std=STD, device=where, shuffle=True, drop_last=drop_last),
        val=Loader(val, batch=batch, mean=MEAN, std=STD, device=where),
        classes=10,
        image_side=8,
        train_samples=train.samples,
        val_samples=val.samples,
        about=f"handwritten digits: {train.samples:,} training and {val.samples:,} validation images, 8 px, 10 classes",
    )
