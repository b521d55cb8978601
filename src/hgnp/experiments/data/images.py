"""From lists of image files and labels to `Data`: in device memory if they fit, else streamed during training."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hgnp.errors import InputError
from hgnp.experiments.data.decode import decoded
from hgnp.experiments.data.loader import Data, ImageSource, InMemorySource, Loader, subset_indices
from hgnp.experiments.data.streaming import StreamingSource
from hgnp.train import as_device

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, as pretrained weights expect
MEMORY = 8 * 2**30
VAL_BATCH = 256  # at least, on a GPU, which smaller ones do not fill


@dataclass(frozen=True)
class Files:
    """Images and their labels, from 0."""

    files: Sequence[Path]
    labels: Tensor


def from_files(
    title: str,
    train: Files,
    val: Files,
    classes: int,
    *,
    side: int,
    batch: int,
    device: str | torch.device,
    flip: bool,
    limit: int | None,
    drop_last: bool,
    cache: bool,
    memory: int,
    workers: int | None,
    resize: bool = True,
) -> Data:
    where = as_device(device)
    if workers is None:
        workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for field, value in (("side", side), ("batch", batch), ("memory", memory), ("workers", workers)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{field} must be an integer ≥ 1, got {value!r}")
    keep = subset_indices(train.labels, limit)
    train = Files([train.files[number] for number in keep.tolist()], train.labels[keep])
    every = [*train.files, *val.files]
    _all_there(title, every)
    sources: tuple[ImageSource, ImageSource]
    fits = len(every) * 3 * side**2 <= memory
    if fits:
        name = "".join(letter for letter in title.lower() if letter.isalnum())
        pixels = torch.from_numpy(decoded(every, side, name=name, workers=workers, cache=cache, resize=resize))
        images = pixels.split([len(train.files), len(val.files)])
        sources = InMemorySource(images[0], train.labels, where), InMemorySource(images[1], val.labels, where)
    else:
        sources = (
            StreamingSource(train.files, train.labels, side, where, workers, resize=resize),
            StreamingSource(val.files, val.labels, side, where, workers, resize=resize),
        )
    return Data(
        train=Loader(
            sources[0], batch=batch, mean=MEAN, std=STD, device=where, shuffle=True, flip=flip, drop_last=drop_last
        ),
        val=Loader(
            sources[1], batch=batch if where.type == "cpu" else max(batch, VAL_BATCH), mean=MEAN, std=STD, device=where
        ),
        classes=classes,
        image_side=side,
        train_samples=len(train.files),
        val_samples=len(val.files),
        about=f"{title}: {len(train.files):,} training and {len(val.files):,} validation images, {side} px, "
        f"{classes} classes{'' if fits else ', streamed'}",
    )


def _all_there(title: str, files: Sequence[Path]) -> None:
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"folder must hold the {len(files):,} images of {title}, got {len(missing):,} fewer; the first "
            f"missing is {missing[0]}"
        )
