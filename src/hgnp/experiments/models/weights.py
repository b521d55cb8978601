"""Published weights for a network: tensors that match by name and shape are loaded, and the rest is reported."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hgnp.errors import InputError
from hgnp.io.weights import read_tensors


@dataclass(frozen=True)
class Loaded:
    """Which tensors of a file of weights were loaded, by name."""

    file: str
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    """Tensors of the network that are missing in the file or have another shape there: unchanged."""
    unused: tuple[str, ...]
    """Tensors of the file that match none of the network."""

    @property
    def about(self) -> str:
        """One line for a report."""
        total = len(self.loaded) + len(self.fresh)
        line = f"{len(self.loaded)} of {total} tensors from {self.file}"
        line += f"; at random: {_layers(self.fresh)}" if self.fresh else ""
        return line + (f"; not used: {_layers(self.unused)}" if self.unused else "")


def load_weights(net: nn.Module, path: str | os.PathLike[str]) -> Loaded:
    """Fill `net` with the tensors of a safetensors file that have the names and shapes of its own.

    Nothing is unpickled: .pt and .pth files are refused, `hgnp weights` converts them. InputError if nothing fits; `net` is
    then unchanged.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"weights must be an existing .safetensors file, got {file}")
    if file.suffix != ".safetensors":
        raise InputError(
            f"weights must be a .safetensors file, got {str(file)!r}; "
            f"`hgnp weights {file.name} {file.stem}.safetensors` converts it"
        )
    stored, _ = read_tensors(file)
    own = net.state_dict()
    fits = {
        name: tensor
        for name, tensor in stored.items()
        if name in own
        and tensor.shape == own[name].shape
        and tensor.is_floating_point() == own[name].is_floating_point()
    }
    # a counter that old files lack, and which changes nothing in these networks
    weights = [name for name in own if not name.endswith("num_batches_tracked")]
    loaded = tuple(name for name in weights if name in fits)
    if not loaded:
        raise InputError(
            f"{file} must have tensors of {type(net).__name__} ({_layers(weights)}), got {len(stored)} that do not fit "
            f"({_layers(stored)})"
        )
    with torch.no_grad():
        for name, tensor in fits.items():
            own[name].copy_(tensor)
    fresh = tuple(name for name in weights if name not in fits)
    return Loaded(file.name, loaded, fresh, tuple(sorted(name for name in stored if name not in fits)))


def _layers(names: Iterable[str], most: int = 6) -> str:
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return ", ".join(layers[:most]) + (f" and {len(layers) - most} more" if len(layers) > most else "")
