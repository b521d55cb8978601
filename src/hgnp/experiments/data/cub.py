"""Caltech-UCSD Birds-200-2011 from its official files."""

import os
from pathlib import Path

import torch

from hgnp.errors import InputError
from hgnp.experiments.data.images import MEMORY, Files, from_files
from hgnp.experiments.data.loader import Data


def cub200(
    folder: str | os.PathLike[str],
    *,
    batch: int,
    side: int = 160,
    device: str | torch.device = "cpu",
    flip: bool = False,
    resize: bool = False,
    limit: int | None = None,
    drop_last: bool = False,
    cache: bool = True,
    memory: int = MEMORY,
    workers: int | None = None,
) -> Data:
    """5,994 training and 5,794 validation images of 200 kinds of birds.

    `folder` holds images.txt, image_class_labels.txt, train_test_split.txt and images/, or is the folder around CUB_200_2011.
    As in the paper, images are cropped to `side` (the centre, in the image's own pixels) and not flipped;
    `resize=True` scales the central square instead. The other options are those of `flowers102`.
    """
    home = Path(folder)
    if not (home / "images.txt").is_file() and (home / "CUB_200_2011").is_dir():
        home /= "CUB_200_2011"
    paths = _table(home / "images.txt")
    labels, split = (_whole(home / name, paths) for name in ("image_class_labels.txt", "train_test_split.txt"))
    classes = max(labels.values())
    if min(labels.values()) < 1:
        raise InputError(f"{home / 'image_class_labels.txt'}: classes must start at 1, got {min(labels.values())}")

    def of(part: int) -> Files:
        ids = [name for name in paths if split[name] == part]
        if not ids:
            raise InputError(
                f"{home / 'train_test_split.txt'} must mark training images by 1 and validation images by 0, got no {part}"
            )
        return Files([home / "images" / paths[name] for name in ids], torch.tensor([labels[name] - 1 for name in ids]))

    return from_files(
        "CUB-200-2011", of(1), of(0), classes,
        side=side, batch=batch, device=device, flip=flip, limit=limit, drop_last=drop_last, cache=cache, memory=memory,
        workers=workers, resize=resize,
    )  # fmt: skip


def _table(file: Path) -> dict[str, str]:
    """Lines of a number, a space and a value."""
    if not file.is_file():
        raise FileNotFoundError(
            f"folder must hold CUB-200-2011, images.txt, image_class_labels.txt, train_test_split.txt and images/, got no "
            f"{file}"
        )
    table: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        name, _, value = line.partition(" ")
        if not name.isdecimal() or not value or name in table:
            raise InputError(
                f"{file}: line {number} must be the number of an image, listed once, and a value, got {line[:40]!r}"
            )
        table[name] = value
    if not table:
        raise InputError(f"{file} must list images, got an empty file")
    return table


def _whole(file: Path, paths: dict[str, str]) -> dict[str, int]:
    table = _table(file)
    for name in paths:
        if not table.get(name, "").isdecimal():
            raise InputError(f"{file}: the value of image {name} must be an integer, got {table.get(name)!r}")
    return {name: int(table[name]) for name in paths}
