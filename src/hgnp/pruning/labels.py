"""Labels: the slot that each entry of a tensor belongs to.

A tensor carries zero or more *labels*, integer tensors that broadcast to its shape; an entry of the tensor is removed when
the slot in any of its labels is. A feature map (N, C, H, W) has one label of shape (1, C, 1, 1). A weight (O, I, 3, 3) has
one for its rows, (O, 1, 1, 1), and one for its columns, (1, I, 1, 1). A label has size 1 along every dimension in which it
does not vary, so its shape tells the dimensions in which it does.

`alive` is a mask over all slots: False for those that are removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hgnp.errors import InputError
from hgnp.pruning.coupling import FROZEN

NO_SLOTS = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class LabelledTensor:
    """The labels and properties of one tensor."""

    shape: tuple[int, ...]
    labels: tuple[Tensor, ...] = ()
    is_weight: bool = False
    """Computed from parameters alone, not by a layer. Elsewhere a removed entry reads as zero, so sums over it stay exact; here
    it does not."""
    shared: bool = False
    """Computed from parameters alone, by a layer or not: all samples share it."""
    filler: bool = False
    """One value everywhere, or noise: such a tensor fits any width."""
    zero: bool = False
    """A filler of zeros: its products fit any width too."""
    expanded: tuple[bool, ...] = ()
    """Dimensions along which one entry is repeated."""
    byproduct: bool = False
    """A secondary result, such as the statistics that a norm returns, whose size is not checked."""
    passed_through: Tensor = NO_SLOTS
    """Slots of channels that passed through a product over other dimensions: a bias added there is not theirs."""
    nonzero_slots: Tensor = NO_SLOTS
    """Slots whose entries, once removed, are not known to read as zero: a softmax came before. They can be removed with all
    that is computed from them up to a product with entries that do read as zero, as the values in attention do."""

    def distinct(self, dim: int) -> bool:
        """Whether the entries along `dim` differ, so that they must be cut with what they are combined with."""
        return self.shape[dim] > 1 and not self.filler and not (self.expanded and self.expanded[dim])

    def resizable(self, dim: int) -> bool:
        """Whether the size along `dim` is arbitrary: one entry repeated, without a label."""
        return bool(self.expanded) and self.expanded[dim] and self.along(dim) is None

    def repeats(self, dim: int, ndim: int) -> bool:
        """Whether broadcasting to `ndim` dimensions repeats it along `dim`, or its size there is arbitrary."""
        dim -= ndim - len(self.shape)
        return dim < 0 or self.shape[dim] == 1 or self.filler or self.resizable(dim)

    def reads_zero(self, label: Tensor) -> bool:
        """Whether the entries of one of its labels, once removed, read as zero."""
        return not self.is_weight and not bool(torch.isin(label, self.nonzero_slots).any())

    def along(self, dim: int) -> Tensor | None:
        """The label that varies along `dim`, if there is one."""
        return next((label for label in self.labels if label.shape[dim] > 1), None)


@dataclass(frozen=True)
class RuleResult:
    """What a rule says about one result of an operator."""

    labels: list[Tensor]
    filler: bool | None = None
    """None: True if all tensors that it was computed from are."""
    byproduct: bool = False
    passed_through: Tensor | None = None
    """None: those of the tensors that it was computed from, entry by entry."""
    repeated: tuple[int, ...] = ()
    """Dimensions along which one entry is repeated, whatever the strides."""
    nonzero_slots: Tensor | None = None
    """None: the slots that are in one of the tensors that it was computed from."""


def slots_in(labels: Sequence[Tensor]) -> Tensor:
    """All slots of some labels."""
    return torch.cat([NO_SLOTS, *(label.reshape(-1) for label in labels)]).unique()


def compact(label: Tensor) -> Tensor:
    """The same label with size 1 along every dimension in which it does not vary."""
    for dim, size in enumerate(label.shape):
        if size > 1:
            first = label.narrow(dim, 0, 1)
            if label.stride(dim) == 0 or bool((label == first).all()):
                label = first
    return label


def without_repetition(label: Tensor) -> Tensor:
    """The same label with size 1 along every dimension in which it was expanded."""
    for dim, (size, stride) in enumerate(zip(label.shape, label.stride(), strict=True)):
        if size > 1 and stride == 0:
            label = label.narrow(dim, 0, 1)
    return label


def simplify(labels: list[Tensor]) -> tuple[Tensor, ...]:
    """Compact labels, without those that are frozen throughout or of tensors without entries."""
    result = []
    for label in labels:
        label = compact(label)
        if label.numel() > 1 or (label.numel() and int(label.reshape(-1)[0]) != FROZEN):
            result.append(label)
    return tuple(result)


def varying_dims(label: Tensor) -> tuple[int, ...]:
    """The dimensions along which a compact label varies."""
    return tuple(dim for dim, size in enumerate(label.shape) if size > 1)


def heads_dims(tensor: LabelledTensor) -> tuple[int, ...]:
    """The leading dimensions, all but the two of a matrix, along which its labels vary."""
    return tuple(dim for dim in range(len(tensor.shape) - 2) if tensor.along(dim) is not None)


def vector_label(entries: Tensor, dim: int, ndim: int) -> Tensor:
    """A label that varies along `dim` alone."""
    shape = [1] * ndim
    shape[dim] = len(entries)
    return entries.reshape(shape)


def add_leading_dims(label: Tensor, ndim: int) -> Tensor:
    """The label with leading dimensions of size 1 added, as broadcasting does."""
    return label if label.dim() == ndim else label.reshape((1,) * (ndim - label.dim()) + tuple(label.shape))


def keep_masks(tensor: LabelledTensor, alive: Tensor) -> list[Tensor | None]:
    """The positions that remain along each dimension; None where all do. InputError if they form no rectangle."""
    masks: list[Tensor | None] = [None] * len(tensor.shape)
    for label in tensor.labels:
        left = alive[label]
        if bool(left.all()):
            continue
        if not bool(left.any()):
            raise InputError("nothing is left of a tensor")
        if len(varying_dims(label)) > 1:
            left = compact(left)
        dims = varying_dims(left)
        if len(dims) == 1:
            _restrict(masks, dims[0], left.reshape(-1))
            continue
        outer = torch.ones((1,) * left.dim(), dtype=torch.bool)
        for dim in dims:
            mask = left.any(tuple(d for d in dims if d != dim)).reshape(-1)
            outer = outer & mask.reshape([-1 if d == dim else 1 for d in range(left.dim())])
            _restrict(masks, dim, mask)
        if not torch.equal(outer.expand(left.shape), left):
            raise InputError("the remaining entries of a tensor do not form a rectangle")
    return masks


def _restrict(masks: list[Tensor | None], dim: int, mask: Tensor) -> None:
    current = masks[dim]
    masks[dim] = mask if current is None else current & mask


def shape_after(tensor: LabelledTensor, alive: Tensor) -> tuple[int, ...]:
    masks = keep_masks(tensor, alive)
    return tuple(size if mask is None else int(mask.sum()) for size, mask in zip(tensor.shape, masks, strict=True))


def keep(tensor: Tensor, masks: list[Tensor | None]) -> Tensor:
    """The entries of a tensor that remain under these masks, one for each dimension; dimensions of size 1 are broadcast."""
    for dim, mask in enumerate(masks):
        if mask is not None and tensor.shape[dim] > 1:
            tensor = tensor.index_select(dim, mask.nonzero().squeeze(1))
    return tensor
