"""CIFAR-10's Python files, read without unpickling them: nothing in them is imported or called."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from hgnp.errors import InputError
from hgnp.experiments.pickle_reader import DAMAGED, Record, UnsafePickleError, values

LARGEST = 64 * 2**20  # an official file has 31 MB
ARRAY, KIND, MAKE = "numpy ndarray", "numpy dtype", "numpy.core.multiarray _reconstruct"


def read_batch(file: Path, pixels: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """The rows of `pixels` bytes and the labels of one official file."""
    size = file.stat().st_size
    if size > LARGEST:
        raise InputError(f"{file} must have about 31,000,000 bytes, as the official CIFAR-10 files, got {size:,}")
    try:
        content = values(file.read_bytes(), (ARRAY, KIND, MAKE), "official CIFAR-10 file")
    except UnsafePickleError as error:
        raise InputError(
            f"{file} must be an official CIFAR-10 file, got another pickle: {error}; nothing in it was run"
        ) from None
    except DAMAGED as error:
        raise InputError(
            f"{file} must be an official CIFAR-10 file, got a damaged or another one ({' '.join(str(error).split())[:80]})"
        ) from None
    problem = (
        f"{file} must be an official CIFAR-10 file, 'data' in rows of {pixels:,} bytes and as many 'labels', got others"
    )
    match content:
        case {
            "data": Record(name=name, state=(1, (int(count), int(width)), Record(args=("u1", 0, 1)), bool(fortran), str(raw))),
            "labels": list(labels),
        } if name == MAKE and width == pixels and count == len(labels) > 0:  # fmt: skip
            try:
                data = np.frombuffer(bytearray(raw, "latin-1"), dtype=np.uint8)
            except UnicodeEncodeError:
                raise InputError(problem) from None
        case _:
            raise InputError(problem)
    if data.size != count * width or not all(type(label) is int for label in labels):
        raise InputError(problem)
    return np.ascontiguousarray(data.reshape((count, width), order="F" if fortran else "C")), labels
