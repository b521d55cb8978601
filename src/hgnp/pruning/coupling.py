"""Coupling: which slots must be removed together, and which must stay.

A *slot* is one position along one dimension of one parameter or buffer: row 3 of `conv1.weight`, entry 3 of `bn1.bias`.
Every slot has a number; 0 stands for everything that can never be removed (the network's inputs, constants, outputs).
Label propagation (`propagation.py`) unites slots in a disjoint-set forest and freezes those that must stay, each with the
reason. A *group* is one set of the forest; its *root* is the slot that represents it.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

FROZEN = 0
MAX_UNFILTERED_PAIRS = 2048
"""Up to this many pairs of slots, repeated ones are not looked for."""


class Coupling:
    """A disjoint-set forest over the slots of the given tensors (name → shape)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.slots: dict[tuple[str, int], Tensor] = {}
        """(name, dim) → the numbers of its slots. A dimension of size 1 has none: it cannot be cut."""
        count = 1
        for name, shape in shapes.items():
            for dim, size in enumerate(shape):
                if size > 1:
                    self.slots[name, dim] = torch.arange(count, count + size)
                    count += size
        self._parent = list(range(count))
        self._reason: dict[int, str] = {FROZEN: "it is not a parameter"}

    def __len__(self) -> int:
        return len(self._parent)

    def find(self, slot: int) -> int:
        """The root of the slot's group."""
        parent = self._parent
        while parent[slot] != slot:
            parent[slot] = slot = parent[parent[slot]]
        return slot

    def union(self, a: Tensor, b: Tensor, reason: str) -> None:
        """Unites a and b, entry by entry (they broadcast). A slot paired with 0 is frozen, for the reason given."""
        if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
            return
        a, b = torch.broadcast_tensors(a, b)
        if a.numel() > MAX_UNFILTERED_PAIRS:
            differ = a != b
            pairs = torch.unique(a[differ] * len(self) + b[differ])  # one number per pair: unique rows are slow
            a, b = pairs // len(self), pairs % len(self)
        for one, other in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True):
            if one == other:
                continue
            if one == FROZEN or other == FROZEN:
                self._freeze(one or other, reason)
                continue
            one, other = self.find(one), self.find(other)
            if one != other:
                self._join(one, other, reason)

    def _join(self, one: int, other: int, reason: str) -> None:
        self._parent[other] = one
        if other in self._reason:
            self._reason.setdefault(one, self._reason.pop(other))

    def snapshot(self) -> tuple[list[int], dict[int, str]]:
        """The groups and reasons as they are, for `restore`."""
        return list(self._parent), dict(self._reason)

    def restore(self, snapshot: tuple[list[int], dict[int, str]]) -> None:
        self._parent, self._reason = list(snapshot[0]), dict(snapshot[1])

    def freeze(self, slots: Tensor, reason: str) -> None:
        """Freezes the groups of these slots. A group that is frozen already keeps its first reason."""
        for slot in torch.unique(slots).tolist():
            self._freeze(slot, reason)

    def _freeze(self, slot: int, reason: str) -> None:
        if slot != FROZEN:
            self._reason.setdefault(self.find(slot), reason)

    def reason(self, slot: int) -> str | None:
        """Why the slot is frozen, or None if it can be removed."""
        return self._reason.get(self.find(slot))

    def roots_of(self, slots: Tensor) -> Tensor:
        """The same tensor with roots in place of slots, and 0 in place of frozen ones."""
        unique, positions = torch.unique(slots, return_inverse=True)
        roots = [self.find(slot) for slot in unique.tolist()]
        return torch.tensor([FROZEN if root in self._reason else root for root in roots])[positions]

    def roots(self) -> Tensor:
        """The root of every slot. Slots with equal roots are removed together."""
        parent = torch.tensor(self._parent)
        while not torch.equal(parent, above := parent[parent]):
            parent = above
        return parent

    def frozen(self, roots: Tensor) -> Tensor:
        """For every slot, given its root, whether it is frozen."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[list(self._reason)] = True
        return mask[roots]


class NewCouplingError(Exception):
    """A forward pass couples or freezes more slots than the traced ones do."""


class ReadOnlyCoupling(Coupling):
    """An existing coupling that must not change for slots with these roots, those of neurons: a new union or frozen slot raises
    NewCouplingError. Others, such as entries of a table of positions, are never removed."""

    def __init__(self, coupling: Coupling, roots: Collection[int]) -> None:
        self.slots, self._parent, self._reason = coupling.slots, coupling._parent, coupling._reason
        self._roots = roots

    def roots_of(self, slots: Tensor) -> Tensor:
        found = super().roots_of(slots)
        return torch.where(torch.isin(found, torch.tensor(sorted(self._roots))), found, FROZEN)

    def _join(self, one: int, other: int, reason: str) -> None:
        if any(root in self._roots and root not in self._reason for root in (one, other)):
            raise NewCouplingError(self._reason.get(one) or self._reason.get(other) or reason)

    def _freeze(self, slot: int, reason: str) -> None:
        root = self.find(slot)
        if root in self._roots and root not in self._reason:
            raise NewCouplingError(reason)
