"""CIFAR-10 in both official layouts; damaged files are named, hostile ones run nothing."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hgnp.experiments.data import cifar10
from hgnp.experiments.data.cifar import MEAN, STD, TEST, TRAIN

Rows = npt.NDArray[np.uint8]


def images(seed: int, count: int = 10) -> tuple[Rows, list[int]]:
    stream = np.random.default_rng(seed)
    return stream.integers(0, 256, (count, 3072), dtype=np.uint8), stream.integers(0, 10, count).tolist()


def python_file(rows: Rows, labels: list[int], *, fortran: bool = False) -> bytes:
    """As Python 2 wrote the official files: protocol 2, byte strings, memo entries all over."""

    def string(text: bytes) -> bytes:
        return (b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + struct.pack("<i", len(text))) + text

    def whole(number: int) -> bytes:
        return b"K" + bytes([number]) if number < 256 else b"M" + struct.pack("<H", number)

    raw = rows.tobytes(order="F" if fortran else "C")
    kind = b"cnumpy\ndtype\nq\x0b" + string(b"u1") + b"K\x00K\x01\x87Rq\x0c(K\x03" + string(b"|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = whole(len(rows)) + whole(3072) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\t" + string(b"b") + b"\x87Rq\n"
    )
    array += b"(K\x01" + shape + kind + (b"\x88" if fortran else b"\x89") + string(raw) + b"tb"
    names = b"".join(
        string(b"picture_%d.png" % number) + b"r" + struct.pack("<I", 300 + number) for number in range(len(rows))
    )
    return (
        b"\x80\x02}q\x01(" + string(b"batch_label") + b"q\x02" + string(b"training batch 1 of 5") + b"q\x03"
        + string(b"labels") + b"q\x04]q\x05(" + b"".join(map(whole, labels)) + b"e"
        + string(b"data") + b"q\x06" + array + string(b"filenames") + b"q\r]q\x0e(" + names + b"eu."
    )  # fmt: skip


def write(folder: Path, layout: str, count: int = 10) -> Path:
    home = folder / f"cifar-10-batches-{layout}"
    home.mkdir()
    for seed, name in enumerate((*TRAIN, TEST)):
        rows, labels = images(seed, count)
        if layout == "bin":
            records = np.concatenate([np.array(labels, np.uint8)[:, None], rows], axis=1)
            (home / f"{name}.bin").write_bytes(records.tobytes())
        else:
            (home / name).write_bytes(python_file(rows, labels, fortran=seed == 1))
    return home


def test_the_files_made_here_are_pickles_of_arrays() -> None:
    rows, labels = images(0)
    for fortran in (False, True):
        found = pickle.loads(python_file(rows, labels, fortran=fortran), encoding="latin-1")  # noqa: S301
        assert np.array_equal(found["data"], rows)
        assert found["labels"] == labels


@pytest.mark.parametrize("layout", ["bin", "py"])
def test_images_and_labels_are_those_of_the_files(layout: str, tmp_path: Path) -> None:
    home = write(tmp_path, layout)
    for folder in (tmp_path, home):
        data = cifar10(folder, batch=4)
        assert (data.train_samples, data.val_samples, data.classes, data.image_side) == (50, 10, 10, 32)
        assert data.about == "CIFAR-10: 50 training and 10 validation images, 32 px, 10 classes"
        batches = list(data.val)
        rows, labels = images(5)
        assert torch.cat([y for _, y in batches]).tolist() == labels
        planes = torch.from_numpy(rows).view(10, 3, 32, 32).double()  # red, green, blue, row by row
        expected = (planes - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        torch.testing.assert_close(torch.cat([x for x, _ in batches]).double(), expected, rtol=1e-5, atol=1e-5)
        stored = np.concatenate([images(seed)[0] for seed in range(5)])
        assert np.array_equal(data.train.source.images.flatten(1).numpy(), stored)  # type: ignore[attr-defined]


def test_options_reach_the_training_loader(tmp_path: Path) -> None:
    data = cifar10(write(tmp_path, "bin"), batch=8, crop=4, flip=False, limit=20, drop_last=True)
    assert (data.train.crop, data.train.flip, data.train.samples, data.train_samples) == (4, False, 16, 20)
    assert next(iter(data.train))[0].is_contiguous()  # the run chooses the memory format
    assert not data.val.shuffle
    assert data.val.samples == 10


def test_a_holdout_is_a_fixed_part_of_the_training_images(tmp_path: Path) -> None:
    home = write(tmp_path, "bin")
    whole = cifar10(home, batch=8)
    data, again = (cifar10(home, batch=size, holdout=10) for size in (8, 4))
    assert (data.train_samples, data.val_samples) == (40, 10)
    assert data.about == "CIFAR-10: 40 training and 10 held-out training images, 32 px, 10 classes"
    parts = [data.train.source.images, data.val.source.images]  # type: ignore[attr-defined]
    assert torch.equal(parts[1], again.val.source.images)  # type: ignore[attr-defined]

    def pictures(images: torch.Tensor) -> list[bytes]:
        return sorted(bytes(image.flatten().tolist()) for image in images)

    assert pictures(torch.cat(parts)) == pictures(whole.train.source.images)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="holdout must be an integer from 0 to 49, got 50"):
        cifar10(home, batch=4, holdout=50)


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere must hold data_batch_1.bin"):
        cifar10(tmp_path / "nowhere", batch=4)
    home = write(tmp_path, "bin")
    (home / "data_batch_3.bin").rename(home / "aside")
    with pytest.raises(
        FileNotFoundError, match=r"folder must hold CIFAR-10, five data_batch files .*, got none at .*data_batch_3.bin"
    ):
        cifar10(home, batch=4)
    whole = (home / "aside").read_bytes()
    (home / "data_batch_3.bin").write_bytes(whole[:-100])
    with pytest.raises(
        ValueError,
        match=r"data_batch_3.bin must have a multiple of 3,073 bytes \(30,730,000 in the official file\), got 30,630",
    ):
        cifar10(home, batch=4)
    (home / "data_batch_3.bin").write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_3.bin: labels must be from 0 to 9, got 11"):
        cifar10(home, batch=4)


class Exploit:
    """Pickled, it has a command run by whoever unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo ran > {self.file}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("smuggled", [False, True])
def test_hostile_files_run_nothing(protocol: int, smuggled: bool, tmp_path: Path) -> None:
    home, trace = write(tmp_path, "py"), tmp_path / "trace"
    payload = pickle.dumps(Exploit(trace), protocol)
    if smuggled:  # among the labels of an otherwise official file
        body = payload[2 if protocol >= 2 else 0 : -1]
        payload = (home / "data_batch_2").read_bytes().replace(b"]q\x05(", b"]q\x05(" + body, 1)
    pickle.loads(payload, encoding="latin-1")  # noqa: S301  # the payload works
    assert trace.read_text() == "ran\n"
    trace.unlink()
    (home / "data_batch_2").write_bytes(payload)
    with pytest.raises(
        ValueError,
        match=r"data_batch_2 must be an official CIFAR-10 file, got another pickle: .*; nothing in it was run$",
    ) as caught:
        cifar10(home, batch=4)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def test_numpy_names_alone_cannot_be_put_to_other_use(tmp_path: Path) -> None:
    home = write(tmp_path, "py")
    whole = (home / TEST).read_bytes()
    for damaged in (
        whole.replace(b"U\x02u1", b"U\x02O8"),  # an array of objects
        whole.replace(b"U\x04data", b"U\x04dato"),
        whole.replace(b"M\x00\x0c", b"M\x00\x0d"),
        whole.replace(b"]q\x05(", b"]q\x05(K\x01"),  # one label too many
        b"\x80\x02cnumpy\nndarray\n.",
        b"\x80\x02}.",
        b"",
    ):
        assert damaged != whole
        (home / TEST).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"test_batch must be an official CIFAR-10 file, .*got"):
            cifar10(home, batch=4)


def test_a_damaged_python_file_is_named_wherever_it_is_cut_or_changed(tmp_path: Path) -> None:
    home = write(tmp_path, "py", count=2)
    whole = (home / TEST).read_bytes()
    stream = np.random.default_rng(0)
    for cut in stream.integers(0, len(whole), 60):
        (home / TEST).write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="test_batch must be an official CIFAR-10 file"):
            cifar10(home, batch=4)
    for place in range(400):
        changed = bytearray(whole)
        changed[place if place < 200 else -place + 199] ^= int(stream.integers(1, 256))
        (home / TEST).write_bytes(changed)
        try:
            cifar10(home, batch=4)
        except ValueError as error:
            assert str(error).startswith((f"{home / TEST} must be ", f"{home / TEST}: labels must be "))  # noqa: PT017
