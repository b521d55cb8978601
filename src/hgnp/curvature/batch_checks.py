"""Whether network, output, loss and target fit together on a batch, in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Output, run
from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.curvature.losses import CrossEntropy, Loss, loss_curvature
from hgnp.errors import HgnpError, InputError, brief, first_line
from hgnp.state_guards import evaluating, module_that_raised, preserve_generators


def is_classification(loss: Loss, target: Any) -> bool:
    known = isinstance(loss_curvature(loss), CrossEntropy)
    return known and isinstance(target, Tensor) and not target.is_floating_point()


def check_batch(
    net: nn.Module,
    loss: Loss,
    output: Output | None,
    batch: tuple[Any, Any],
    name: str,
    *,
    where: str | None = None,
    loss_needs_training_mode: bool = False,
) -> Any:
    """The network's output on a batch of the argument `name`; InputError if network, output, loss and target do not fit
    together. With `loss_needs_training_mode`, the output in training mode. `where` names the batch if it is not the
    first."""
    inputs, target = batch
    where = where or f"the first batch of {name}"
    try:
        with evaluating(net, loss_needs_training_mode=loss_needs_training_mode), torch.no_grad():
            out = run(net, inputs)
    except Exception as error:
        layer = module_that_raised(net, error)
        raise InputError(
            f"net must take {where}, but its forward failed{f' in {layer}' if layer else ''}: {first_line(error)}"
        ) from error
    try:
        out = out if output is None else output(out)
    except Exception as error:
        what = f"a mapping with {', '.join(map(str, out))}" if isinstance(out, Mapping) else f"a {type(out).__name__}"
        raise InputError(f"output must take what net returns, {what}, but failed: {brief(error)}") from error
    if is_classification(loss, target):
        check_class_outputs(loss, out, target, name)
    try:
        with torch.no_grad():
            value = loss(out, target)
    except Exception as error:
        raise InputError(
            f"loss must take {where}, output {describe_shape(out)} and target {describe_shape(target)}, but failed: "
            f"{first_line(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(f"loss must return one number, the mean over the batch, got a value {describe_shape(value)}")
    if value.is_complex():
        raise InputError(f"loss must return a real number, got a complex one ({value.dtype})")
    if not value.isfinite():
        _check_finite(net, batch, where)
    return out


def _check_finite(net: nn.Module, batch: tuple[Any, Any], where: str) -> None:
    """Of a loss that is not finite: InputError if network or batch are the cause."""
    for name, parameter in net.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"net must have finite weights, got {_first_not_finite(parameter)} in {name}")
    for part, value in zip(("inputs", "target"), batch, strict=True):
        for tensor in tensors_in(value):
            if not tensor.isfinite().all():
                raise InputError(f"{where} must have finite {part} and a finite loss, got {_first_not_finite(tensor)}")


def _first_not_finite(tensor: Tensor) -> Any:
    return tensor[~tensor.isfinite()][0].item()


def check_class_outputs(loss: Loss, out: Any, target: Tensor, name: str) -> None:
    if not isinstance(out, Tensor):
        part = "[0]" if isinstance(out, tuple | list) else ".logits"
        if isinstance(out, Mapping) and out and "logits" not in out:
            part = f"[{next(iter(out))!r}]"
        raise InputError(f"net must return a tensor, got {type(out).__name__}; pass output, such as lambda o: o{part}")
    if out.dim() < 2 or out.shape[0] != target.shape[0] or out.shape[2:] != target.shape[1:]:
        raise InputError(
            f"net must return (samples, classes, …) for {name}'s labels {describe_shape(target)}, got an output "
            f"{describe_shape(out)}"
        )
    check_labels(loss, target, out.shape[1], name)


def ignored_label(loss: Loss) -> int | None:
    known = loss_curvature(loss)
    return known.ignore_index if isinstance(known, CrossEntropy) else None


def check_labels(loss: Loss, target: Tensor, classes: int, name: str) -> None:
    wrong = target[((target < 0) | (target >= classes)) & (target != ignored_label(loss))]
    if wrong.numel():
        raise InputError(f"{name}: labels must be from 0 to {classes - 1}, as the network has {classes} outputs, "
                         f"got {int(wrong.flatten()[0])}")  # fmt: skip


def explain_failure(
    net: nn.Module,
    loss: Loss,
    output: Output | None,
    batch: tuple[Any, Any],
    name: str,
    *,
    where: str,
    loss_needs_training_mode: bool,
) -> None:
    """InputError if a batch on which something failed does not fit; leaves random numbers alone."""
    with preserve_generators(net):
        check_batch(net, loss, output, batch, name, where=where, loss_needs_training_mode=loss_needs_training_mode)


@contextmanager
def failure_explained(
    net: nn.Module,
    loss: Loss,
    output: Output | None,
    batch: tuple[Any, Any],
    name: str,
    *,
    where: str,
    loss_needs_training_mode: bool | None = None,
) -> Iterator[None]:
    """If the block fails and `check_batch` fails too, raises the latter's InputError: a batch that fits costs nothing.
    `loss_needs_training_mode`: by default as the network's mode."""
    try:
        yield
    except (HgnpError, torch.OutOfMemoryError):  # another pass would run out of memory, too
        raise
    except Exception:
        training = net.training if loss_needs_training_mode is None else loss_needs_training_mode
        explain_failure(net, loss, output, batch, name, where=where, loss_needs_training_mode=training)
        raise


def describe_shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
