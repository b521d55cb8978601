"""CIFAR-10 from the official files, in the binary layout or in the Python one."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hgnp.errors import InputError
from hgnp.experiments.data.cifar_pickle import read_batch
from hgnp.experiments.data.loader import Data, InMemorySource, Loader, subset_indices
from hgnp.train import as_device

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
PIXELS = 3 * 32 * 32
VAL_BATCH = 1000  # at least, on a GPU, which smaller ones do not fill
LAYOUTS = (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", ""))


def cifar10(
    folder: str | os.PathLike[str],
    *,
    batch: int,
    device: str | torch.device = "cpu",
    flip: bool = True,
    crop: int = 0,
    cutout: int = 0,
    limit: int | None = None,
    holdout: int = 0,
    drop_last: bool = False,
) -> Data:
    """50,000 training and 10,000 test images of 32 px, in device memory.

    `folder` holds the official files (data_batch_1.bin … test_batch.bin, or the same without .bin) or their folder. `crop=4`
    adds the usual random crops to the paper's flips, `cutout=8` squares of that side in the mean colour. `limit` takes only
    that many training images, balanced over the classes. `holdout=5000` is for choices between settings: it validates on that
    many training images, balanced over the classes and always the same ones, trains on the others, and does not use the test
    images.
    """
    where = as_device(device)
    home, ending = _layout(Path(folder))
    read = _read_binary if ending else _read_python
    parts = [read(home / f"{name}{ending}") for name in TRAIN]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not isinstance(holdout, int) or isinstance(holdout, bool) or not 0 <= holdout < len(labels):
        raise InputError(f"holdout must be an integer from 0 to {len(labels) - 1}, got {holdout!r}")
    held: tuple[Tensor, Tensor] | None = None
    if holdout:
        chosen = torch.zeros(len(labels), dtype=torch.bool)
        chosen[subset_indices(labels, holdout)] = True
        held = images[chosen], labels[chosen]
        images, labels = images[~chosen], labels[~chosen]
    keep = subset_indices(labels, limit)
    train = InMemorySource(images[keep], labels[keep], where)
    val = InMemorySource(*(held or read(home / f"{TEST}{ending}")), where)
    return Data(
        train=Loader(
            train, batch=batch, mean=MEAN, std=STD, device=where, shuffle=True, flip=flip, crop=crop, cutout=cutout,
            drop_last=drop_last,
        ),
        val=Loader(val, batch=batch if where.type == "cpu" else max(batch, VAL_BATCH), mean=MEAN, std=STD, device=where),
        classes=10,
        image_side=32,
        train_samples=train.samples,
        val_samples=val.samples,
        about=f"CIFAR-10: {train.samples:,} training and {val.samples:,} {'held-out training' if holdout else 'validation'} "
        "images, 32 px, 10 classes",
    )  # fmt: skip


def _layout(folder: Path) -> tuple[Path, str]:
    for name, ending in LAYOUTS:
        for home in (folder, folder / name):
            if any((home / f"{file}{ending}").is_file() for file in (*TRAIN, TEST)):
                return home, ending
    raise FileNotFoundError(
        f"{folder} must hold data_batch_1.bin … data_batch_5.bin and test_batch.bin, or the same files without .bin, itself or "
        f"in {LAYOUTS[0][0]} or {LAYOUTS[1][0]}, got none; hgnp data cifar10 DIR downloads them"
    )


def _read_binary(file: Path) -> tuple[Tensor, Tensor]:
    """Records of one label and 3,072 pixels: the red plane, the green one, the blue one."""
    if not file.is_file():
        raise FileNotFoundError(f"folder must hold CIFAR-10, five data_batch files and test_batch, got none at {file}")
    size, record = file.stat().st_size, 1 + PIXELS
    if size == 0 or size % record:
        raise InputError(
            f"{file} must have a multiple of {record:,} bytes (30,730,000 in the official file), got {size:,}"
        )
    rows = torch.from_numpy(np.fromfile(file, dtype=np.uint8)).view(-1, record)
    return _checked(file, rows[:, 1:], rows[:, 0].long())


def _read_python(file: Path) -> tuple[Tensor, Tensor]:
    if not file.is_file():
        raise FileNotFoundError(f"folder must hold CIFAR-10, five data_batch files and test_batch, got none at {file}")
    rows, labels = read_batch(file, PIXELS)
    return _checked(file, torch.from_numpy(rows), torch.tensor(labels))


def _checked(file: Path, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if int(labels.max()) > 9 or int(labels.min()) < 0:
        wrong = int(labels[(labels > 9) | (labels < 0)][0])
        raise InputError(f"{file}: labels must be from 0 to 9, got {wrong}; the file is damaged or not CIFAR-10")
    return rows.reshape(-1, 3, 32, 32), labels
