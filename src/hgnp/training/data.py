"""From what a loader yields to inputs and target on the network's device, and what can be wrong with them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hgnp.curvature.autodiff.forward import Output, run, samples_in
from hgnp.curvature.losses import CrossEntropy, Loss, loss_curvature
from hgnp.errors import InputError, InputTypeError, brief, first_line
from hgnp.state_guards import evaluating, module_that_raised

Unpack = Callable[[Any], tuple[Any, Any]]


def unpack(batch: Any, name: str = "train") -> tuple[Any, Any]:
    """(x, y) as it is; of a mapping, `labels` and the rest."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise InputError(f"{name}: a batch has {', '.join(map(str, batch))} but no 'labels'; give unpack")
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = _kind(batch)
    raise InputError(f"{name}: a batch is {kind}; (x, y) or a mapping with 'labels' would do, or give unpack")


class Batches:
    """A loader's batches as (inputs, target) on a device."""

    def __init__(self, loader: Any, name: str, own_unpack: Unpack | None, device: torch.device) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise InputTypeError(f"{name}: {_kind(loader)} was given; a DataLoader or a list of batches would do")
        # loaders of one's own may be their own iterators and start anew; these cannot
        if isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools"):
            raise InputError(
                f"{name}: {_kind(loader)} was given, which is used up after an epoch; a DataLoader or a list would do"
            )
        self.loader, self.name, self.device = loader, name, device
        self._own = own_unpack
        self.count = _length(loader)
        """Batches in an epoch, known once one has been seen."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number = 0
        for number, batch in enumerate(self.loader, 1):  # noqa: B007
            pair = self._pair(batch)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InputError(f"unpack: it returned {_kind(pair)}; (inputs, target) would do")
            yield self._moved(pair[0]), self._moved(pair[1])
        if number == 0:
            raise InputError(f"{self.name}: the loader yields nothing; it must yield batches anew every epoch, as a DataLoader does")  # fmt: skip # noqa: E501
        self.count = number

    def _pair(self, batch: Any) -> Any:
        if self._own is None:
            return unpack(batch, self.name)
        try:
            return self._own(batch)
        except Exception as error:
            raise InputError(f"unpack: it failed on a batch of {self.name}: {brief(error)}") from error

    def _moved(self, value: Any) -> Any:
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, value)


class Ahead:
    """Batches, the next of which may be fetched while the device is busy with this one."""

    def __init__(self, batches: Iterable[tuple[Any, Any]]) -> None:
        self._batches = iter(batches)
        self._next: tuple[Any, Any] | Exception | None = None

    def fetch(self) -> tuple[Any, Any] | None:
        """The next batch, if there is one. What its loader raises is raised when its turn comes."""
        if self._next is None:
            try:
                self._next = next(self._batches)
            except Exception as error:
                self._next = error
        return None if isinstance(self._next, Exception) else self._next

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            self.fetch()
            batch, self._next = self._next, None
            if isinstance(batch, StopIteration):
                return
            if isinstance(batch, Exception):
                try:
                    raise batch
                finally:
                    del batch  # it holds this frame
            assert batch is not None
            yield batch


def pick(inputs: Any, index: Tensor) -> Any:
    """The samples at `index`."""
    n = samples_in(inputs)
    return tree_map(
        lambda x: x[index.to(x.device)] if isinstance(x, Tensor) and x.dim() and x.shape[0] == n else x, inputs
    )


def is_classification(loss: Loss, target: Any) -> bool:
    known = isinstance(loss_curvature(loss), CrossEntropy)
    return known and isinstance(target, Tensor) and not target.is_floating_point()


def check_first(net: nn.Module, loss: Loss, output: Output | None, batch: tuple[Any, Any], name: str) -> Any:
    """The output on the first batch of train or val; one line if it does not fit the target."""
    inputs, target = batch
    try:
        with evaluating(net), torch.no_grad():
            out = run(net, inputs)
    except Exception as error:
        layer = module_that_raised(net, error)
        raise InputError(
            f"net: its forward failed on the first batch of {name}{f' in {layer}' if layer else ''}: {first_line(error)}"
        ) from error
    try:
        out = out if output is None else output(out)
    except Exception as error:
        what = f"a mapping with {', '.join(map(str, out))}" if isinstance(out, Mapping) else f"a {type(out).__name__}"
        raise InputError(f"output: it failed on what net returns, {what}: {brief(error)}") from error
    if is_classification(loss, target):
        check_classes(loss, out, target, name)
    try:
        with torch.no_grad():
            value = loss(out, target)
    except Exception as error:
        raise InputError(
            f"loss: it failed on the first batch of {name}, output {_shape(out)} and target {_shape(target)}: "
            f"{first_line(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(f"loss: it returned {_shape(value)}; a mean over the batch, one number, would do")
    return out


def check_classes(loss: Loss, out: Any, target: Tensor, name: str) -> None:
    if not isinstance(out, Tensor):
        raise InputError(f"net: it returned a {type(out).__name__}; output=lambda o: o.logits, or the like, would do")
    if out.dim() < 2 or out.shape[0] != target.shape[0] or out.shape[2:] != target.shape[1:]:
        raise InputError(
            f"net: its output {_shape(out)} does not fit {name}'s labels {_shape(target)}; (samples, classes, …) would do"
        )
    check_labels(loss, target, out.shape[1], name)


def ignored_label(loss: Loss) -> int | None:
    known = loss_curvature(loss)
    return known.ignore_index if isinstance(known, CrossEntropy) else None


def check_labels(loss: Loss, target: Tensor, classes: int, name: str) -> None:
    wrong = target[((target < 0) | (target >= classes)) & (target != ignored_label(loss))]
    if wrong.numel():
        raise InputError(f"{name}: label {int(wrong.flatten()[0])} is out of range; the network has {classes} outputs, "
                         f"0 to {classes - 1}")  # fmt: skip


def checked(
    batches: Iterable[tuple[Any, Any]], loss: Loss, classes: int | None, name: str
) -> Iterator[tuple[Any, Any]]:
    """The batches, with a look at labels that are classes."""
    for batch in batches:
        if classes is not None:
            check_labels(loss, batch[1], classes, name)
        yield batch


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader has a length that fails if its data set has none
        return None


def _kind(value: Any) -> str:
    return f"{len(value)} parts" if isinstance(value, tuple | list) else f"a {type(value).__name__}"


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"(a {type(value).__name__})"
