"""Surgery: cuts tensors and all state per entry of them, atomically.

A removal has two phases. In the first, everything is prepared: new tensors are created beside the old ones, and anything may
fail. In the second, the changes are committed by assignments alone. If even that fails, those already made are undone.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.errors import InputError
from hgnp.pruning.graph import tensors_of
from hgnp.removal import Removal, cut

_PER_ENTRY = frozenset(
    """momentum_buffer exp_avg exp_avg_sq max_exp_avg_sq exp_inf square_avg grad_avg acc_delta sum prev step_size ax variance
    exp_avg_var exp_avg_diff neg_pre_grad""".split()  # noqa: SIM905
)
"""State of PyTorch's optimizers, AdaBelief and Adan that has an entry for each of the parameter's."""


@dataclass(frozen=True)
class Change:
    """One assignment, and its inverse."""

    apply: Callable[[], None]
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
    # cuDNN wants a recurrent layer's weights in one chunk of memory, and PyTorch warns at every call if they are not
    changes += [Change(module.flatten_parameters) for module in modules.values() if isinstance(module, nn.RNNBase)]
    return changes


def changes_to_optimizer(nets: Sequence[nn.Module], optimizer: torch.optim.Optimizer, removal: Removal) -> list[Change]:
    """`nets`: all networks that are cut, whose parameters one optimizer may hold."""
    check_optimizer(nets, optimizer, removal.slices)
    names, changes = _names(nets), []
    for parameter, state in optimizer.state.items():
        slices = removal.slices.get(names.get(id(parameter), ""), {})
        for key, value in state.items() if slices else ():
            if isinstance(value, Tensor) and value.dim():  # counters are scalars
                new = cut(
                    value, {dim: left for dim, left in slices.items() if value.shape[dim] == parameter.shape[dim]}
                )
                changes.append(Change(_assign_item(state, key, new), _assign_item(state, key, value)))
    return changes


def check_optimizer(nets: Sequence[nn.Module], optimizer: torch.optim.Optimizer, tensors: Collection[str]) -> None:
    """InputError if the optimizer's state could not be cut with these tensors of the networks."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):  # all parameters are one vector, whose length its first step sets
        raise InputError("optimizer must keep its state by parameter, as SGD and AdamW do, got LBFGS")
    names = _names(nets)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in names for parameter in held):
        raise InputError("optimizer must hold parameters of the network, got one that holds none of them")
    per_entry = _PER_ENTRY | _shaped_like_parameters(optimizer)
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        # also where the parameter keeps its shape: the state of all parameters may be stored with the first one
        for key, value in state.items() if name is not None else ():
            what = f"{type(optimizer).__name__}'s state {key!r} of {name}"
            _check_state(value, parameter, what, is_cut=name in tensors, per_entry=key in per_entry)


def _names(nets: Iterable[nn.Module]) -> dict[int, str]:
    return {id(parameter): name for net in nets for name, parameter in net.named_parameters()}


def _shaped_like_parameters(optimizer: torch.optim.Optimizer) -> set[Any]:
    """The keys of state that has the parameter's shape wherever there is one, also for a matrix that is not square: a square
    preconditioner has another shape there. Other weights tell nothing, as an optimizer may treat matrices alone so."""
    shapes: dict[Any, list[tuple[torch.Size, torch.Size]]] = defaultdict(list)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                shapes[key].append((value.shape, parameter.shape))
    return {
        key
        for key, pairs in shapes.items()
        if all(own == given for own, given in pairs)
        and any(len(given) == 2 and given[0] != given[1] for _, given in pairs)
    }


def _check_state(value: Any, parameter: Tensor, what: str, *, is_cut: bool, per_entry: bool) -> None:
    """A factored optimizer has size 1 along dimensions that it averages. Shape alone does not tell whether a square state of a
    square weight has an entry for each weight."""
    if isinstance(value, list | tuple | dict) and any(
        isinstance(v, Tensor) for v in (value.values() if isinstance(value, dict) else value)
    ):
        raise InputError(f"{what} must be a tensor or a number to be cut with the neurons, got a collection of tensors")
    if not isinstance(value, Tensor) or value.dim() == 0:
        return
    fits = value.dim() == parameter.dim() and all(
        mine in (1, full) for mine, full in zip(value.shape, parameter.shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"{what} must have the parameter's shape {tuple(parameter.shape)} or size 1, got {tuple(value.shape)}"
        )
    if is_cut and not per_entry and value.dim() == 2 and len({*value.shape, *parameter.shape}) == 1:
        raise InputError(
            f"{what} must be known to have an entry for each weight, got an unknown square tensor {tuple(value.shape)} of a "
            "square weight, which may be a preconditioner; delete it from optimizer.state, or use an optimizer of torch.optim"
        )


def check_copies(net: nn.Module, also: Iterable[nn.Module]) -> list[nn.Module]:
    """The networks as a list. InputError unless each has the same tensors in the same shapes as `net`."""
    if isinstance(also, nn.Module) or not isinstance(also, Iterable):
        raise InputError(f"also must be a list of networks, got {type(also).__name__}")
    copies = list(also)
    for index, copy in enumerate(copies):
        _check_copy(net, copy, index)
    return copies


def _check_copy(net: nn.Module, copy: nn.Module, index: int) -> None:
    if not isinstance(copy, nn.Module):
        raise InputError(f"also[{index}] must be an nn.Module, got {type(copy).__name__}")
    if copy is net:
        raise InputError(f"also[{index}] must be another network than net, which is cut in any case, got net; omit it")
    hint = "; pass its .module" if isinstance(getattr(copy, "module", None), nn.Module) else ""
    mine, its = tensors_of(net), tensors_of(copy)
    for name in [*mine, *its]:
        if name not in mine or name not in its or mine[name].shape != its[name].shape:
            theirs = f"shape {tuple(its[name].shape)}" if name in its else "none"
            expected = f"of shape {tuple(mine[name].shape)}" if name in mine else "missing"
            raise InputError(f"also[{index}] must have the tensors of net, {name} {expected}, got {theirs}{hint}")


def commit(changes: Iterable[Change]) -> None:
    """Makes all changes, or none."""
    done: list[Change] = []
    try:
        for change in changes:
            done.append(change)
            change.apply()
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise


def replace_data(tensor: Tensor, data: Tensor, grad: Tensor | None) -> Change:
    old_data, old_grad = tensor.data, tensor.grad

    def assign(data: Tensor, grad: Tensor | None) -> None:
        tensor.grad = None  # a gradient must have the shape of its tensor at all times
        if tensor.requires_grad:
            # A loss that still exists holds the node that accumulates this gradient, with the old shape. PyTorch creates a new
            # node only when the dtype changes, so the dtype changes for a moment.
            other = torch.float32 if data.dtype != torch.float32 else torch.float64
            tensor.data = data.new_empty(0, dtype=other)
        tensor.data = data
        tensor.grad = grad

    return Change(lambda: assign(data, grad), lambda: assign(old_data, old_grad))


def set_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> Change:
    before = {attribute: getattr(module, attribute) for attribute in attributes}
    return Change(lambda: module.__dict__.update(attributes), lambda: module.__dict__.update(before))


def _assign_item(mapping: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: mapping.__setitem__(key, value)
