"""From what a loader yields to inputs and target on the network's device, and what can be wrong with them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hgnp.curvature.forward import Output, layer_of, run, samples_in
from hgnp.curvature.losses import CrossEntropy, Loss, loss_curvature
from hgnp.messages import first_line
from hgnp.modes import evaluating

Unpack = Callable[[Any], tuple[Any, Any]]


def unpack(batch: Any) -> tuple[Any, Any]:
    """(x, y) as it is; of a mapping, `labels` and the rest."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(f"train: a batch has {', '.join(map(str, batch))} but no 'labels'; give unpack")
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    raise ValueError(f"train: a batch is {kind}; (x, y) or a mapping with 'labels' would do, or give unpack")


class Batches:
    """A loader's batches as (inputs, target) on a device."""

    def __init__(self, loader: Iterable[Any], name: str, unpack: Unpack, device: torch.device) -> None:
        self.loader, self.name, self._unpack, self.device = loader, name, unpack, device
        self.count: int | None = len(loader) if isinstance(loader, Sized) else None
        """Batches in an epoch, known once one has been seen."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number = 0
        for number, batch in enumerate(self.loader, 1):  # noqa: B007
            inputs, target = self._unpack(batch)
            yield self._moved(inputs), self._moved(target)
        if number == 0:
            raise ValueError(f"{self.name}: the loader yields nothing; it must yield batches anew every epoch, as a DataLoader does")  # fmt: skip # noqa: E501
        self.count = number

    def _moved(self, value: Any) -> Any:
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, value)


def pick(inputs: Any, index: Tensor) -> Any:
    """The samples at `index`."""
    n = samples_in(inputs)
    return tree_map(
        lambda x: x[index.to(x.device)] if isinstance(x, Tensor) and x.dim() and x.shape[0] == n else x, inputs
    )


def is_classification(loss: Loss, target: Any) -> bool:
    known = isinstance(loss_curvature(loss), CrossEntropy)
    return known and isinstance(target, Tensor) and not target.is_floating_point()


def check_first(net: nn.Module, loss: Loss, output: Output | None, inputs: Any, target: Any) -> Any:
    """The output on a first batch; one line if it does not fit the target."""
    try:
        with evaluating(net), torch.no_grad():
            out = run(net, inputs, output=output)
    except Exception as error:
        layer = layer_of(net, error)
        raise ValueError(
            f"net: its forward failed on the first batch{f' in {layer}' if layer else ''}: {first_line(error)}"
        ) from error
    if is_classification(loss, target):
        check_classes(loss, out, target)
    try:
        with torch.no_grad():
            value = loss(out, target)
    except Exception as error:
        raise ValueError(
            f"loss: it failed on the first batch, output {_shape(out)} and target {_shape(target)}: {first_line(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"loss: it returned {_shape(value)}; a mean over the batch, one number, would do")
    return out


def check_classes(loss: Loss, out: Any, target: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise ValueError(f"net: it returned a {type(out).__name__}; output=lambda o: o.logits, or the like, would do")
    if out.dim() < 2 or out.shape[0] != target.shape[0] or out.shape[2:] != target.shape[1:]:
        raise ValueError(
            f"net: its output {_shape(out)} does not fit labels {_shape(target)}; (samples, classes, …) would do"
        )
    check_labels(loss, target, out.shape[1])


def check_labels(loss: Loss, target: Tensor, classes: int) -> None:
    known = loss_curvature(loss)
    ignored = known.ignore_index if isinstance(known, CrossEntropy) else None
    wrong = target[((target < 0) | (target >= classes)) & (target != ignored)]
    if wrong.numel():
        raise ValueError(f"train: label {int(wrong.flatten()[0])} is out of range; the network has {classes} outputs, "
                         f"0 to {classes - 1}")  # fmt: skip


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"(a {type(value).__name__})"
