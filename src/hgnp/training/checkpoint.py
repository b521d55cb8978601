"""A run's whole state in one safetensors file, without pickle.

The state is a tree of dicts, lists, tuples, numbers, strings, None, tensors and numpy arrays. Tensors are numbered entries of
the file; the tree itself is JSON in its metadata. Tuples, infinities and keys that are not strings survive.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from hgnp.errors import InputError, InputTypeError
from hgnp.io.weights import digest, read_tensors, write_tensors
from hgnp.reducer import Reducer

FORMAT = 3
KEY = "hgnp-checkpoint"


@dataclass(frozen=True)
class Packed:
    """A copy of a tree, ready to be written."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def pack(tree: dict[str, Any]) -> Packed:
    tensors: dict[str, Tensor] = {}
    return Packed(tensors, {"format": FORMAT, "tree": _pack(tree, tensors, "")})


def unpack(ready: Packed) -> dict[str, Any]:
    tree: dict[str, Any] = _unpack(ready.about["tree"], ready.tensors)
    return tree


def to_bytes(tree: dict[str, Any]) -> bytes:
    """The tree for another rank."""
    ready = pack(tree)
    return save(ready.tensors, {KEY: json.dumps(ready.about)})


def from_bytes(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
    return unpack(Packed(load(data), about))


def from_rank_zero(reducer: Reducer, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """What `read` returns, on every rank what it returns on rank 0, where alone it is called."""
    if reducer.ranks == 1:
        return read()
    state: dict[str, Any] | None = from_bytes(reducer.on_rank_zero(lambda: to_bytes({"state": read()})))["state"]
    return state


def write(file: Path, ready: Packed) -> None:
    tensors, about = ready.tensors, ready.about
    write_tensors(file, tensors, {KEY: json.dumps(about | {"sha256": digest(tensors, about)})})


def read(file: Path) -> dict[str, Any]:
    tensors, metadata = read_tensors(file)
    try:
        content = json.loads(metadata[KEY])
        version = content["format"]
        if version == FORMAT:
            if content.pop("sha256", None) != digest(tensors, content):
                raise InputError("its content must match its checksum")
            return unpack(Packed(tensors, content))
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise InputError(f"{file} must be a checkpoint of hgnp, got a damaged or foreign file: {error}") from error
    raise InputError(f"{file} must have format {FORMAT}, got {version}, written by another version of hgnp")


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        name = str(len(tensors))
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value.copy())
            return {"array": name}
        value = value.detach()
        if value.is_cpu:
            tensors[name] = value.clone(memory_format=torch.contiguous_format)
        else:
            tensors[name] = value.contiguous().cpu()  # rearranged on the device, which is fast
        return {"tensor": name}
    if isinstance(value, np.generic):
        return _pack(value.item(), tensors, where)
    if isinstance(value, dict):
        return {"dict": [[_pack(k, tensors, where), _pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    raise InputTypeError(
        f"{where.lstrip('.')} must be a tensor, a number, a string or a collection of them, got {type(value).__name__}, "
        "which a checkpoint cannot hold without pickle"
    )


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    if kind in ("list", "tuple"):
        parts = [_unpack(part, tensors) for part in content]
        return parts if kind == "list" else tuple(parts)
    return tensors[content] if kind == "tensor" else tensors[content].numpy()
