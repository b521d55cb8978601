"""Everything that going on needs, in one file without pickle.

A tree of dicts, lists, tuples, numbers, strings, None, tensors and numpy arrays becomes a safetensors file: tensors under
running numbers, the tree itself as JSON beside them. Keys that are not strings, tuples and infinities survive.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hgnp.errors import InputError, InputTypeError
from hgnp.io.weights import digest, read_tensors, write_tensors

FORMAT = 1
KEY = "hgnp-checkpoint"


@dataclass(frozen=True)
class Packed:
    """A copy of a tree, ready to be written."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def packed(tree: dict[str, Any]) -> Packed:
    tensors: dict[str, Tensor] = {}
    return Packed(tensors, {"format": FORMAT, "tree": _packed(tree, tensors, "")})


def unpacked(ready: Packed) -> dict[str, Any]:
    tree: dict[str, Any] = _unpacked(ready.about["tree"], ready.tensors)
    return tree


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
                raise InputError("its content does not match its checksum")
            return unpacked(Packed(tensors, content))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{file}: not a checkpoint of hgnp, or a damaged one") from error
    raise InputError(f"{file}: written in format {version} by another hgnp; this one reads {FORMAT}")


def _packed(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        name = str(len(tensors))
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value.copy())
            return {"array": name}
        elsewhere = value.detach().contiguous() if value.is_cuda else value.detach()  # laid out where that is quick
        tensors[name] = elsewhere.cpu() if value.is_cuda else elsewhere.clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, np.generic):
        return _packed(value.item(), tensors, where)
    if isinstance(value, dict):
        return {"dict": [[_packed(k, tensors, where), _packed(v, tensors, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    raise InputTypeError(f"{where.lstrip('.')}: a {type(value).__name__} cannot be kept in a checkpoint without pickle")


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in content}
    if kind in ("list", "tuple"):
        parts = [_unpacked(part, tensors) for part in content]
        return parts if kind == "list" else tuple(parts)
    return tensors[content] if kind == "tensor" else tensors[content].numpy()
