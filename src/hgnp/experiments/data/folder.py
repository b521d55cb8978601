"""A user's own images: a folder for each class, in train/ and in val/."""

import os
from pathlib import Path

import torch

from hgnp.errors import InputError
from hgnp.experiments.data.images import MEMORY, Files, from_files
from hgnp.experiments.data.loader import Data

ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def image_folder(
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
    """`folder`/train/CLASS/… and `folder`/val/CLASS/…: folder names are the classes, in alphabetical order.

    Hidden files and files without an image suffix are skipped. The other options are those of `flowers102`.
    """
    home = Path(folder)
    classes = _classes(home / "train")
    extra = [name for name in _classes(home / "val") if name not in classes]
    if extra:
        raise InputError(f"{home / 'val'} must have the classes of {home / 'train'}, got also {extra[0]}")

    def of(part: str) -> Files:
        files, labels = [], []
        for label, name in enumerate(classes):
            inside = home / part / name
            entries = sorted(inside.iterdir()) if inside.is_dir() else []
            images = [file for file in entries if file.suffix.lower() in ENDINGS and not file.name.startswith(".")]
            if part == "train" and not images:
                raise InputError(f"{inside} must hold images ({', '.join(sorted(ENDINGS))}), got none")
            files += images
            labels += [label] * len(images)
        if not files:
            raise InputError(f"{home / part} must hold images ({', '.join(sorted(ENDINGS))}), got none")
        return Files(files, torch.tensor(labels))

    return from_files(
        home.resolve().name, of("train"), of("val"), len(classes),
        side=side, batch=batch, device=device, flip=flip, limit=limit, drop_last=drop_last, cache=cache, memory=memory,
        workers=workers,
    )  # fmt: skip


def _classes(part: Path) -> list[str]:
    if not part.is_dir():
        raise FileNotFoundError(f"{part} must be a folder with one folder per class, got no such folder")
    names = sorted(inside.name for inside in part.iterdir() if inside.is_dir() and not inside.name.startswith("."))
    if not names:
        raise InputError(f"{part} must have one folder per class, got none")
    return names
