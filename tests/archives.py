"""The datasets in their official layouts, a few images each, as archives with sources that describe them."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from hgnp.experiments.download import OFFICIAL, File, Source


class Quiet:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[str, int, int | None]] = []

    def bytes(self, what: str, done: int, total: int | None) -> None:
        self.seen.append((what, done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def tar(members: dict[str, bytes] | list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for member, content in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def jpeg(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


def mat(**values: Any) -> bytes:
    stream = io.BytesIO()
    savemat(stream, {name: np.array(value) for name, value in values.items()})
    return stream.getvalue()


def cifar_files(records: int = 3) -> dict[str, bytes]:
    numbers = np.random.default_rng(0)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    batches = {}
    for name in names:
        rows = numbers.integers(0, 256, (records, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        batches[f"cifar-10-batches-bin/{name}"] = rows.tobytes()
    return {"cifar-10-binary.tar.gz": tar({**batches, "cifar-10-batches-bin/readme.html": b"<html>"})}


def flowers_files() -> dict[str, bytes]:
    return {
        "102flowers.tgz": tar({f"jpg/image_{number:05}.jpg": jpeg(number) for number in range(1, 7)}),
        "imagelabels.mat": mat(labels=[[1, 2, 3, 1, 2, 3]]),
        "setid.mat": mat(trnid=[[1]], valid=[[2]], tstid=[[3, 4, 5, 6]]),
    }


def cub_files() -> dict[str, bytes]:
    names = [f"00{kind}.Bird/Bird_{number}.jpg" for kind in (1, 2) for number in range(2)]
    tables = {"images": names, "image_class_labels": [1, 1, 2, 2], "train_test_split": [1, 0, 1, 0]}
    members = {f"CUB_200_2011/images/{name}": jpeg(number) for number, name in enumerate(names)}
    for table, values in tables.items():
        lines = "".join(f"{number} {value}\n" for number, value in enumerate(values, 1))
        members[f"CUB_200_2011/{table}.txt"] = lines.encode()
    return {"CUB_200_2011.tgz": tar({"./attributes.txt": b"beside it", **members})}


FILES: dict[str, Callable[[], dict[str, bytes]]] = {
    "cifar10": cifar_files,
    "flowers102": flowers_files,
    "cub200": cub_files,
}


def small(name: str, files: dict[str, bytes]) -> Source:
    """The official source with the checksums and sizes of `files`."""
    official = OFFICIAL[name]
    described = tuple(
        File(
            file.url,
            hashlib.md5(files[file.name]).hexdigest(),
            len(files[file.name]) if file.size else None,
            hashlib.sha256(files[file.name]).hexdigest() if file.sha256 else None,
            file.unpacks,
            file.most_files,
            file.most_bytes,
        )
        for file in official.files
    )
    return Source(name, official.title, described, official.page, official.terms)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
