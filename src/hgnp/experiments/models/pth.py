"""Converts published weights (.pth) to safetensors without unpickling them.

`torch.save` writes a pickle that describes the tensors, and their storages as raw bytes: since PyTorch 1.6 as records of a
zip file, before that one after the other, following several pickles. `experiments.pickle_reader` interprets the pickle and
calls nothing; only the contents of a state dict are accepted.
"""

import hashlib
import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hgnp import __version__
from hgnp.errors import InputError
from hgnp.experiments.pickle_reader import DAMAGED, Name, Persistent, Record, UnsafePickleError, values
from hgnp.io.atomic import check_file_path
from hgnp.io.weights import write_tensors

LARGEST_PICKLE = 16 * 2**20  # ResNet-18's has 40 KB
MOST_BYTES = 4  # tensors may share storages; together they may take this many times the file's size
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the format before 1.6
DTYPES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
ORDERED = "collections OrderedDict"
TENSOR, OLD_TENSOR = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor"
PARAMETERS = ("torch._utils _rebuild_parameter", "torch.nn.parameter Parameter")
NAMES = {ORDERED, TENSOR, OLD_TENSOR, *PARAMETERS, *DTYPES}
FILE_TYPE = "file of PyTorch weights"


@dataclass(frozen=True)
class Converted:
    """A state dict converted to safetensors."""

    path: Path
    source: str
    sha256: str
    """SHA-256 of the source."""
    tensors: int
    bytes: int
    """Bytes of all tensors."""

    @property
    def as_named(self) -> bool:
        """Whether the source's name ends in the first digits of its SHA-256, as torchvision's names do."""
        digits = re.search(r"-([0-9a-f]{8,64})\.\w+$", self.source)
        return digits is not None and self.sha256.startswith(digits[1])


@dataclass(frozen=True)
class Storage:
    """A storage as the pickle refers to it; `view` is the part of it that is meant, as (first entry, entries)."""

    key: str
    dtype: torch.dtype
    numel: int
    view: tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A tensor as the pickle describes it."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.storage.dtype.itemsize


Load = Callable[[dict[str, Storage]], Iterator[tuple[str, Tensor]]]


def convert(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> Converted:
    """Write the state dict in `source` (.pth) to `out` (.safetensors), with the source's name and SHA-256 as metadata.

    InputError if it is damaged, or anything but a mapping of names to tensors. `out` is written atomically.
    """
    file, path = Path(source), Path(out)
    if path.suffix != ".safetensors":
        raise InputError(f"OUT must end in .safetensors, got {str(path)!r}")
    check_file_path(path)
    tensors = read_state_dict(file)
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    about = {"format": "pt", "source": file.name, "source_sha256": sha256, "converted_by": f"hgnp {__version__}"}
    write_tensors(path, tensors, about)
    return Converted(path, file.name, sha256, len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict that `torch.save` wrote, each with its own memory."""
    if not file.is_file():
        raise FileNotFoundError(f"file must be an existing .pth file of weights, got {file}")
    with file.open("rb") as stream:
        try:
            read = _read_zip if stream.read(4) == b"PK\x03\x04" else _read_legacy
            stream.seek(0)
            return read(stream, file.stat().st_size)
        except UnsafePickleError as error:
            raise InputError(
                f"{file} must be a {FILE_TYPE}, got another pickle: {error}; nothing in it was run"
            ) from None
        # OSError: a damaged zip file has negative offsets
        except (*DAMAGED, struct.error, zipfile.BadZipFile, EOFError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            raise InputError(f"{file} must be a {FILE_TYPE}, got a damaged or another file ({reason})") from None


def _read_zip(stream: BinaryIO, size: int) -> dict[str, Tensor]:
    with zipfile.ZipFile(stream) as archive:
        roots = [
            name.removesuffix("/data.pkl") for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)
        ]
        if len(roots) != 1:
            raise InputError(f"the zip file has {len(roots)} records named data.pkl")

        def record(name: str, expected: int | None = None) -> bytearray:
            info = archive.getinfo(f"{roots[0]}/{name}")
            # PyTorch does not compress: what is read is never larger than the file
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
                raise InputError(f"record {name} is compressed")
            if info.file_size > LARGEST_PICKLE if expected is None else info.file_size != expected:
                raise InputError(f"record {name} has {info.file_size:,} bytes")
            return bytearray(archive.read(info))

        if f"{roots[0]}/byteorder" in archive.namelist() and record("byteorder") != b"little":
            raise InputError("its numbers are big-endian")

        def load(wanted: dict[str, Storage]) -> Iterator[tuple[str, Tensor]]:
            for key, storage in wanted.items():
                yield key, _numbers(record(f"data/{key}", storage.numel * storage.dtype.itemsize), storage)

        return _tensors(values(bytes(record("data.pkl")), NAMES, FILE_TYPE), load, size)


def _read_legacy(stream: BinaryIO, size: int) -> dict[str, Tensor]:
    head = io.BytesIO(stream.read(LARGEST_PICKLE))  # the pickles, and as much of the storages as is in it
    if type(magic := values(head, (), FILE_TYPE)) is not int or magic != MAGIC:
        raise InputError("its magic number is not PyTorch's")
    if type(protocol := values(head, (), FILE_TYPE)) is not int or protocol != PROTOCOL:
        raise InputError("it is in an unknown version of PyTorch's format")
    match values(head, (), FILE_TYPE):
        case {"little_endian": True}:
            pass
        case _:
            raise InputError("its numbers are not said to be little-endian")
    described = values(head, NAMES, FILE_TYPE)
    keys = values(head, (), FILE_TYPE)
    stream.seek(head.tell())

    def load(wanted: dict[str, Storage]) -> Iterator[tuple[str, Tensor]]:
        if (
            not isinstance(keys, list)
            or not all(isinstance(key, str) for key in keys)
            or sorted(keys) != sorted(wanted)
        ):
            raise InputError("its list of storages does not match its tensors")
        for key in keys:
            storage = wanted[key]
            (numel,) = struct.unpack("<q", stream.read(8))
            if numel != storage.numel:
                raise InputError(f"storage {key} has {numel:,} entries where {storage.numel:,} are described")
            yield key, _numbers(bytearray(stream.read(numel * storage.dtype.itemsize)), storage)

    return _tensors(described, load, size)


def _numbers(raw: bytearray, storage: Storage) -> Tensor:
    if len(raw) != storage.numel * storage.dtype.itemsize:
        raise InputError("it ends within a storage")
    return torch.frombuffer(raw, dtype=storage.dtype) if raw else torch.empty(0, dtype=storage.dtype)


def _tensors(described: Any, load: Load, size: int) -> dict[str, Tensor]:
    layouts = {name: _layout(name, value) for name, value in _mapping(described).items()}
    if not layouts:
        raise InputError("it has no tensors")
    wanted: dict[str, Storage] = {}
    for layout in layouts.values():
        known = wanted.setdefault(layout.storage.key, layout.storage)
        if (known.dtype, known.numel) != (layout.storage.dtype, layout.storage.numel):
            raise InputError(f"storage {known.key} is described in two ways")
    stored = sum(storage.numel * storage.dtype.itemsize for storage in wanted.values())
    total = sum(layout.bytes for layout in layouts.values())
    if stored > size or total > MOST_BYTES * size:
        raise InputError(f"its tensors would take {max(stored, total):,} bytes, the file has {size:,}")
    storages = dict(load(wanted))
    # copies: tensors that share a storage are refused by safetensors
    return {
        name: storages[it.storage.key]
        .as_strided(it.size, it.stride, it.storage.view[0] + it.offset)
        .clone(memory_format=torch.contiguous_format)
        for name, it in layouts.items()
    }


def _mapping(described: Any) -> dict[str, Any]:
    match described:
        case dict():
            return described
        case Record(name=name, args=(), items=items) if name == ORDERED:
            return items
        case Record(name=name, args=(list(pairs),), items={}) if name == ORDERED:  # as Python 2 wrote it
            if all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
                return dict(pairs)
    raise UnsafePickleError(f"it holds {_kind(described)}, not a state dict (a mapping of names to tensors)")


def _layout(name: str, value: Any) -> Layout:
    match value:
        case Record(name=call, args=(Record() as data, *_)) if call in PARAMETERS:
            return _layout(name, data)
        case Record(name=call, args=(Persistent(id=stored), offset, tuple(size), tuple(stride), *rest)) if (
            call == TENSOR and not any(rest[2:])
        ) or (call == OLD_TENSOR and not rest):
            layout = Layout(_storage(name, stored), offset, size, stride)
        case _:
            raise UnsafePickleError(f"{name!r} is {_kind(value)}, not a tensor; a state dict has only tensors")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)) or len(size) != len(stride):
        raise InputError(f"{name!r} has no valid size, stride and offset")
    available, entries = layout.storage.view[1], math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if entries else offset - 1
    if last >= available or entries > available or len(size) > 64:
        raise InputError(f"{name!r} reaches beyond its storage of {available:,} entries")
    return layout


def _storage(name: str, stored: Any) -> Storage:
    match stored:
        case ("storage", Name(name=kind), str(key), str(), int(numel), *view) if kind in DTYPES and numel >= 0:
            match view:
                case [] | [None]:
                    return Storage(key, DTYPES[kind], numel, (0, numel))
                case [(str(), int(first), int(entries))] if 0 <= first <= first + entries <= numel:
                    return Storage(key, DTYPES[kind], numel, (first, entries))
    raise UnsafePickleError(f"{name!r} is stored in a way that no {FILE_TYPE} has")


def _kind(value: Any) -> str:
    return (
        value.name.replace(" ", ".") if isinstance(value, Record | Name) else f"a value of type {type(value).__name__}"
    )
