"""Oxford Flowers-102 (M.-E. Nilsback and A. Zisserman) from its official files."""

import os
from pathlib import Path

import numpy as np
import torch
from scipy.io import loadmat

from hgnp.errors import InputError
from hgnp.experiments.data.images import MEMORY, Files, from_files
from hgnp.experiments.data.loader import Data


def flowers102(
    folder: str | os.PathLike[str],
    *,
    batch: int,
    side: int = 224,
    device: str | torch.device = "cpu",
    flip: bool = True,
    limit: int | None = None,
    drop_last: bool = False,
    cache: bool = True,
    memory: int = MEMORY,
    workers: int | None = None,
) -> Data:
    """2,040 training images (`trnid` and `valid`) and 6,149 for validation (`tstid`), as in the paper.

    `folder` holds jpg/image_00001.jpg …, imagelabels.mat and setid.mat. Decoded images are cached in the user's cache folder
    unless `cache=False`; more than `memory` bytes of them are streamed by `workers` processes during training.
    """
    home = Path(folder)
    labels = _numbers(home / "imagelabels.mat", "labels")
    ids = {name: _numbers(home / "setid.mat", name) for name in ("trnid", "valid", "tstid")}
    for name, numbers in ids.items():
        if numbers.min() < 1 or numbers.max() > len(labels):
            low, high = numbers.min(), numbers.max()
            raise InputError(f"{home / 'setid.mat'}: {name} must be from 1 to {len(labels)}, got {low} to {high}")
    if labels.min() < 1:
        raise InputError(f"{home / 'imagelabels.mat'}: labels must start at 1, got {labels.min()}")

    def of(numbers: np.ndarray) -> Files:
        files = [home / "jpg" / f"image_{number:05}.jpg" for number in numbers]
        return Files(files, torch.from_numpy(labels[numbers - 1] - 1))

    return from_files(
        "Flowers-102", of(np.concatenate([ids["trnid"], ids["valid"]])), of(ids["tstid"]), int(labels.max()),
        side=side, batch=batch, device=device, flip=flip, limit=limit, drop_last=drop_last, cache=cache, memory=memory,
        workers=workers,
    )  # fmt: skip


def _numbers(file: Path, name: str) -> np.ndarray:
    if not file.is_file():
        raise FileNotFoundError(f"folder must hold jpg/, imagelabels.mat and setid.mat of Flowers-102, got no {file}")
    try:
        values = loadmat(file)[name]
        numbers = np.asarray(values, dtype=np.int64).reshape(-1)
    # a damaged file can fail anywhere in scipy's reader
    except Exception as error:
        raise InputError(
            f"{file} must hold integers named {name!r}, but cannot be read ({type(error).__name__})"
        ) from None
    if not len(numbers):
        raise InputError(f"{file}: {name!r} must list images, got none")
    return numbers
