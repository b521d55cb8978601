"""Save and load pruned networks: `save` writes tensors and widths, `load` shrinks a fresh instance of the class to fit.

One safetensors file holds every parameter and buffer; its metadata holds, as JSON, the format's version, the classes of the
network and its modules, the attributes that state widths, and a SHA-256 of everything. Nothing is unpickled.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hgnp.errors import InputError, InputTypeError, first_line
from hgnp.io.atomic import as_path, atomic_path, check_file_path
from hgnp.pruning.config import update_config
from hgnp.pruning.graph import tensors_of
from hgnp.pruning.surgery import Change, commit, replace_data, set_attributes
from hgnp.pruning.validation import check_prunable
from hgnp.pruning.widths import integer_attributes, stated_widths, with_integers

FORMAT = 1
FILE = "model.safetensors"
DAMAGED = "its metadata must describe a network, got something else; the file is damaged"
OUTPUTS = ("out_features", "out_channels", "num_features", "num_channels")
PER_OUTPUT = ("weight", "bias", "running_mean", "running_var")
Net = TypeVar("Net", bound=nn.Module)


def save(net: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write `net` as safetensors, atomically and without pickle.

    Neither the class nor its code is stored: `load` needs an instance of it.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> hgnp.save(net, "small/").as_posix()
    'small/model.safetensors'

    Args:
        net: The network, pruned or not.
        path: A file if it ends in .safetensors, else a folder for model.safetensors. Folders are created.

    Returns:
        The file.
    """
    file = _file(path)
    check_file_path(file)
    tensors, about = describe(net)
    # copies: safetensors refuses tensors that share memory
    tensors = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    about["sha256"] = digest(tensors, about)
    write_tensors(file, tensors, {"hgnp": json.dumps(about)})
    return file


def describe(net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of `net`, and the description that `changes_to_fit` needs to shrink a fresh instance."""
    check_prunable(net)
    for name, module in net.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputTypeError(
                f"layer {name!r} ({type(module).__name__}) must have no extra state, as only pickle could save it, got some"
            )
    tensors = {name: tensor.detach() for name, tensor in tensors_of(net).items()}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.complex128:
            raise InputTypeError(
                f"{name} must have a dtype that safetensors supports, got {tensor.dtype}; convert it to complex64"
            )
        if tensor.is_meta:
            raise InputError(f"{name} must be on a device with data, got meta; move net to a CPU or a GPU and fill it")
    about: dict[str, Any] = {
        "format": FORMAT,
        "class": type(net).__qualname__,
        "modules": {name: [type(m).__qualname__, _widths(m)] for name, m in net.named_modules()},
        "counts": {name: counts for name, m in net.named_modules() if (counts := integer_attributes(m))},
        "channels_last": sorted(name for name, tensor in tensors.items() if _is_channels_last(tensor)),
    }
    return tensors, about


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write one safetensors file atomically."""
    try:
        with atomic_path(file) as draft:
            save_file(dict(tensors), draft, metadata)
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{file} must be a safetensors file, but cannot be read: {first_line(error)}") from error


def load(path: str | os.PathLike[str], net: Net) -> Net:
    """Load a network that `save` wrote: shrink `net` to the saved widths and fill it with the saved tensors.

    Outputs are then bit-equal to those of the saved network. Shapes and dtypes are the file's; device, mode and
    `requires_grad` stay those of `net`. Tensors on meta become new ones on the CPU. Create an optimizer after loading: the
    state of one from before has the old shapes.

    >>> import torch, hgnp
    >>> def make():
    ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net = make()
    >>> _ = hgnp.Neurons(net, torch.zeros(1, 4)).remove({"0": [0, 3]})
    >>> _ = hgnp.save(net, "small/")
    >>> loaded = hgnp.load("small/", make())
    >>> loaded[0].weight.shape, torch.equal(loaded[0].weight, net[0].weight)
    (torch.Size([6, 4]), True)

    Args:
        path: The file, or the folder with model.safetensors.
        net: A fresh, unpruned instance of the class that was saved; changed in place.

    Returns:
        `net`.

    Raises:
        InputError: If the file is damaged or does not fit. `net` is then unchanged.
    """
    file = _file(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file or folder that hgnp.save wrote, got {file}, which does not exist")
    check_prunable(net)
    about, tensors = read_saved(file)
    try:
        changes = changes_to_fit(about, tensors, net)
    except ValueError as error:
        raise InputError(f"{file}: {error}") from None
    commit(changes)
    update_config(net)
    return net


def read_saved(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors in a file that `save` wrote."""
    tensors, metadata = read_tensors(file)
    try:
        return _read_description(metadata, tensors), tensors
    except ValueError as error:
        raise InputError(f"{file}: {error}") from None


def changes_to_fit(about: Mapping[str, Any], tensors: Mapping[str, Tensor], net: nn.Module) -> list[Change]:
    """The changes that turn `net` into the network that `about` describes; InputError if there are none."""
    _check_fits(about, tensors, net)
    changes = [*_tensor_changes(about, tensors, net), *_width_changes(about, tensors, net)]
    return [*changes, *_count_changes(about, tensors, net)]


def _file(path: str | os.PathLike[str]) -> Path:
    path = as_path(path)
    return path if path.suffix == ".safetensors" else path / FILE


def _read_description(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if "hgnp" not in metadata:
        raise InputError("it must be written by hgnp.save, got a file without its metadata")
    try:
        about = json.loads(metadata["hgnp"])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise InputError(DAMAGED)
    if about["format"] > FORMAT:
        raise InputError(
            f"format must be at most {FORMAT}, got {about['format']}, which a newer hgnp wrote; upgrade hgnp"
        )
    expected = about.pop("sha256", None)
    if expected != digest(tensors, about):
        raise InputError("its content must match its checksum, got another; the file is damaged")
    well_formed = (
        isinstance(about.get("class"), str)
        and isinstance(about.get("channels_last"), list)
        and isinstance(about.get("modules"), dict)
        and isinstance(about.get("counts", {}), dict)
        and all(isinstance(counts, dict) for counts in about.get("counts", {}).values())
        and all(
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], dict)
            for entry in about["modules"].values()
        )
    )
    if not well_formed:
        raise InputError(DAMAGED)
    return about


def _check_fits(about: Mapping[str, Any], tensors: Mapping[str, Tensor], net: nn.Module) -> None:
    if about["class"] != type(net).__qualname__:
        raise InputError(f"net must be a {about['class']}, got {type(net).__qualname__}")
    here = {name: type(module).__qualname__ for name, module in net.named_modules()}
    there = {name: kind for name, (kind, _) in about["modules"].items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise InputError(
                f"layer {name!r} must be {here.get(name, 'absent')} as in net, got {there.get(name, 'none')} in the file"
            )
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise InputError(
                    f"{key} of layer {name!r} must be a buffer to be loaded onto meta, got a plain tensor; register it"
                )
    mine = tensors_of(net)
    for name in [*mine, *tensors]:
        if name not in mine or name not in tensors:
            raise InputError(
                f"{name} must be in net and in the file, got it only in {'net' if name in mine else 'the file'}"
            )
        theirs, ours = tuple(tensors[name].shape), tuple(mine[name].shape)
        if len(theirs) != len(ours) or any(a > b for a, b in zip(theirs, ours, strict=True)):
            raise InputError(
                f"{name} must have a shape of at most {ours} as in net, got {theirs} in the file; "
                "pass a fresh, unpruned instance"
            )
        if tensors[name].dtype.is_floating_point != mine[name].dtype.is_floating_point:
            raise InputError(
                f"{name} must have dtype {mine[name].dtype} as in net, got {tensors[name].dtype} in the file"
            )


def _tensor_changes(about: Mapping[str, Any], tensors: Mapping[str, Tensor], net: nn.Module) -> list[Change]:
    last = set(map(str, about["channels_last"]))
    changes = []
    for name, tensor in tensors_of(net).items():
        data = tensors[name].to("cpu" if tensor.is_meta else tensor.device)
        if name in last and data.dim() in (4, 5):
            data = data.contiguous(memory_format=torch.channels_last if data.dim() == 4 else torch.channels_last_3d)
        changes.append(_materialise(net, tensor, data) if tensor.is_meta else replace_data(tensor, data, None))
    return changes


def _materialise(net: nn.Module, old: Tensor, data: Tensor) -> Change:
    """Replace a tensor on meta, which cannot take data of another device, by a new one in every module that holds it."""
    new = nn.Parameter(data, old.requires_grad) if isinstance(old, nn.Parameter) else data
    vars(new).update(vars(old))
    own = [(module, {**module._parameters, **module._buffers}) for module in net.modules()]
    places = [(module, key) for module, held in own for key, tensor in held.items() if tensor is old]

    def put(tensor: Tensor) -> None:
        for module, key in places:
            setattr(module, key, tensor)

    return Change(lambda: put(new), lambda: put(old))


def _width_changes(about: Mapping[str, Any], tensors: Mapping[str, Tensor], net: nn.Module) -> list[Change]:
    names = {id(tensor): name for name, tensor in tensors_of(net).items()}
    changes = []
    for name, module in net.named_modules():
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        stored, current = about["modules"][name][1], _widths(module)
        if stored.keys() != current.keys() or not all(_shrunk(stored[key], current[key]) for key in current):
            raise InputError(f"layer {name!r} must have at least the widths of the file, {stored}, got {current}")
        shapes = {key: tuple(tensors[names[id(tensor)]].shape) for key, tensor in own.items()}
        stored = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
        due = stated_widths(module, shapes.get, lambda: (), stored.get("groups", stored.get("num_groups")))
        if any(stored[key] != value for key, value in due.items()):
            raise InputError(f"layer {name!r} of the file must have the widths of its tensors, {due}, got {stored}")
        width = next((stored[out] for out in OUTPUTS if out in stored), None)
        for key in PER_OUTPUT if width is not None else ():
            if len(shapes.get(key, ())) == 1 and shapes[key] != (width,):
                raise InputError(
                    f"{name}.{key} must have {width} entries, the width of its layer, got {shapes[key][0]}"
                )
        changes.append(set_attributes(module, stored))
    return changes


def _count_changes(about: Mapping[str, Any], tensors: Mapping[str, Tensor], net: nn.Module) -> list[Change]:
    """Integers that are smaller in the file, in modules whose tensors are smaller too: numbers of heads."""
    shrunk = [name for name, tensor in tensors_of(net).items() if tensor.shape != tensors[name].shape]
    changes = []
    for name, module in net.named_modules():
        stored, current = about.get("counts", {}).get(name, {}), integer_attributes(module)
        smaller = {key: stored[key] for key in current if key in stored and stored[key] != current[key]}
        smaller = {key: value for key, value in smaller.items() if _shrunk(value, current[key])}
        if smaller and any(tensor.startswith(f"{name}." if name else "") for tensor in shrunk):
            changes.append(set_attributes(module, with_integers(module, smaller)))
    return changes


def _shrunk(stored: Any, current: Any) -> bool:
    if isinstance(current, list):
        return isinstance(stored, list) and len(stored) == len(current) and all(map(_shrunk, stored, current))
    return type(stored) is int and 1 <= stored <= current


def _widths(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` that state widths, with their values."""
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    stated = stated_widths(module, {key: tuple(t.shape) for key, t in own.items()}.get, lambda: (1,) * 8, None)
    values = {key: getattr(module, key) for key in stated}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)


def digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    sha = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
