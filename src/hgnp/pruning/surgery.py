"""Cut tensors, and everything that keeps a number for each of their entries, all or nothing.

A removal has two phases. First everyone prepares: new tensors are made beside the old ones and anything may fail. Then
everyone commits: ready tensors are put in place. Should even that fail, what was put in place is taken back.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError
from hgnp.pruning.graph import tensors_of
from hgnp.removal import Removal, Slices, cut


@dataclass(frozen=True)
class Change:
    """One assignment, ready to be made or taken back."""

    make: Callable[[], None]
    undo: Callable[[], None] = lambda: None


def changes_to_net(net: nn.Module, removal: Removal) -> list[Change]:
    changes = []
    for name, tensor in tensors_of(net).items():
        if name in removal.slices:
            grad = None if tensor.grad is None else cut(tensor.grad, removal.slices[name])
            changes.append(replace_data(tensor, removal.cut(name, tensor), grad))
    modules = dict(net.named_modules())
    for name, widths in removal.widths.items():
        module = modules[name]
        changes.append(set_attributes(module, widths))
    # cuDNN reads a recurrent layer's weights from one chunk of memory, and PyTorch warns at every call where they are not
    changes += [Change(module.flatten_parameters) for module in modules.values() if isinstance(module, nn.RNNBase)]
    return changes


def changes_to_optimizer(net: nn.Module, optimizer: torch.optim.Optimizer, removal: Removal) -> list[Change]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer: {optimizer!r} was given; a torch.optim.Optimizer of the network would do")
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in names for parameter in held):
        raise InputError("optimizer holds none of the network's parameters")
    changes = []
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        # also where the parameter keeps its shape: LBFGS keeps the state of all parameters with the first
        for key, value in state.items() if name is not None else ():
            what = f"{type(optimizer).__name__}'s state {key!r} of {name}"
            new = _cut_state(value, parameter, removal.slices.get(str(name), {}), what)
            if new is not value:
                changes.append(Change(_assign_item(state, key, new), _assign_item(state, key, value)))
    return changes


def _cut_state(value: Any, parameter: Tensor, slices: Slices, what: str) -> Any:
    """The state with what stays. A factored optimizer keeps size 1 where it averaged; counters have no shape."""
    if isinstance(value, list | tuple | dict) and any(
        isinstance(v, Tensor) for v in (value.values() if isinstance(value, dict) else value)
    ):
        raise InputError(f"{what} is a collection of tensors, which cannot be cut with the neurons")
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    fits = value.dim() == parameter.dim() and all(
        mine in (1, full) for mine, full in zip(value.shape, parameter.shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"{what} has shape {tuple(value.shape)} and cannot be cut with a parameter of shape {tuple(parameter.shape)}"
        )
    if not slices:
        return value
    return cut(value, {dim: stay for dim, stay in slices.items() if value.shape[dim] == parameter.shape[dim]})


def twins_of(net: nn.Module, also: Iterable[nn.Module]) -> list[nn.Module]:
    """A list of networks that have the same tensors in the same shapes as `net`; ValueError if one has not."""
    if isinstance(also, nn.Module) or not isinstance(also, Iterable):
        raise InputError(f"also: a {type(also).__name__} was given; a list of networks would do")
    twins = list(also)
    for place, twin in enumerate(twins):
        _check_twin(net, twin, place)
    return twins


def _check_twin(net: nn.Module, twin: nn.Module, place: int) -> None:
    if not isinstance(twin, nn.Module):
        raise InputError(f"also[{place}]: a {type(twin).__name__} was given; a network would do")
    hint = "; pass its .module" if isinstance(getattr(twin, "module", None), nn.Module) else ""
    mine, its = tensors_of(net), tensors_of(twin)
    for name in [*mine, *its]:
        if name not in mine or name not in its or mine[name].shape != its[name].shape:
            found = tuple(its[name].shape) if name in its else "missing"
            due = tuple(mine[name].shape) if name in mine else "absent"
            raise InputError(f"also[{place}] is not a network of the same shape: {name} is {found}, here {due}{hint}")


def commit(changes: Iterable[Change]) -> None:
    done: list[Change] = []
    try:
        for change in changes:
            done.append(change)
            change.make()
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise


def replace_data(tensor: Tensor, data: Tensor, grad: Tensor | None) -> Change:
    old_data, old_grad = tensor.data, tensor.grad

    def put(data: Tensor, grad: Tensor | None) -> None:
        tensor.grad = None  # a gradient must fit its tensor at every moment
        if tensor.requires_grad:
            # A loss that is still alive keeps the node that accumulates this gradient, with the old shape. Torch makes a new
            # one only when the dtype changes, so it changes for a moment.
            other = torch.float32 if data.dtype != torch.float32 else torch.float64
            tensor.data = data.new_empty(0, dtype=other)
        tensor.data = data
        tensor.grad = grad

    return Change(lambda: put(data, grad), lambda: put(old_data, old_grad))


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> Change:
    before = {attribute: getattr(module, attribute) for attribute in attributes}
    return Change(lambda: module.__dict__.update(attributes), lambda: module.__dict__.update(before))


def _assign_item(mapping: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: mapping.__setitem__(key, value)
