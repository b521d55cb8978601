"""Labels: which slot each entry of a tensor stands and falls with.

A tensor carries zero or more *labels*, integer tensors that broadcast to its shape; an entry of the tensor is gone when
the slot in any of its labels is. A feature map (N, C, H, W) has one label of shape (1, C, 1, 1). A weight (O, I, 3, 3) has
one for its rows, (O, 1, 1, 1), and one for its columns, (1, I, 1, 1). Labels are kept with size 1 wherever they do not
vary, so the dimensions along which a label varies can be read off its shape.
"""

from dataclasses import dataclass

from torch import Tensor

from hgnp.pruning.coupling import FIXED


def compact(label: Tensor) -> Tensor:
    """The same label with size 1 along every dimension in which it does not vary."""
    for dim, size in enumerate(label.shape):
        if size > 1:
            first = label.narrow(dim, 0, 1)
            if label.stride(dim) == 0 or bool((label == first).all()):
                label = first
    return label


def varies(label: Tensor) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(label.shape) if size > 1)


def vector(entries: Tensor, dim: int, ndim: int) -> Tensor:
    """A label that varies along `dim` alone."""
    shape = [1] * ndim
    shape[dim] = len(entries)
    return entries.reshape(shape)


@dataclass(frozen=True)
class Labelled:
    """What is known of one tensor."""

    shape: tuple[int, ...]
    labels: tuple[Tensor, ...] = ()
    weight: bool = False
    """Made of parameters alone. Elsewhere a dead entry reads as zero, so sums over it stay exact; here it does not."""
    filler: bool = False
    """One value everywhere, or noise: fits whatever width it is given."""
    repeated: tuple[bool, ...] = ()
    aside: bool = False
    """A by-product whose size is nobody's business."""
    carried: bool = False
    """Its channels came through a product over other dimensions: what that layer adds is not theirs."""

    def solid(self, dim: int) -> bool:
        """Whether the entries along `dim` differ and so must be cut where a neighbour is cut."""
        return self.shape[dim] > 1 and not self.filler and not (self.repeated and self.repeated[dim])

    def loose(self, dim: int) -> bool:
        """Whether the size along `dim` says nothing: one entry repeated, without a label."""
        return bool(self.repeated) and self.repeated[dim] and self.along(dim) is None

    def along(self, dim: int) -> Tensor | None:
        """The label that varies along `dim`, if there is one."""
        return next((label for label in self.labels if label.shape[dim] > 1), None)


def tidy(labels: list[Tensor]) -> tuple[Tensor, ...]:
    """Compact labels, without those that are fixed throughout."""
    result = []
    for label in labels:
        label = compact(label)
        if label.numel() > 1 or int(label.reshape(-1)[0]) != FIXED:
            result.append(label)
    return tuple(result)


def tail(label: Tensor, ndim: int) -> Tensor:
    """The label with leading dimensions of size 1 added, as broadcasting does."""
    return label if label.dim() == ndim else label.reshape((1,) * (ndim - label.dim()) + tuple(label.shape))


@dataclass(frozen=True)
class Result:
    """What a rule says of a result: its labels, whether it is filler (None: if all it was made of is), and whether it is
    a by-product (the statistics a norm returns beside its output)."""

    labels: list[Tensor]
    filler: bool | None = None
    aside: bool = False
    carried: bool | None = None
    """None: if something it was made of, entry by entry, is."""
