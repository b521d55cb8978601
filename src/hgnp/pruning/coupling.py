"""Which slots live and die together.

A *slot* is one position along one dimension of one parameter or buffer: row 3 of `conv1.weight`, entry 3 of `bn1.bias`.
Every slot is a number; 0 stands for what can never go (the network's inputs, constants, outputs). Following the channels
ties slots to each other (union–find) and fixes those that must stay, each with the reason.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FIXED = 0


class Ties:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.slots: dict[tuple[str, int], Tensor] = {}
        """(name, dim) → the numbers of its slots. A dimension of one entry has none: it cannot be cut."""
        count = 1
        for name, shape in shapes.items():
            for dim, size in enumerate(shape):
                if size > 1:
                    self.slots[name, dim] = torch.arange(count, count + size)
                    count += size
        self._parent = list(range(count))
        self._reason: dict[int, str] = {FIXED: "it is not a parameter"}

    def __len__(self) -> int:
        return len(self._parent)

    def find(self, slot: int) -> int:
        parent = self._parent
        while parent[slot] != slot:
            parent[slot] = slot = parent[parent[slot]]
        return slot

    def tie(self, a: Tensor, b: Tensor, reason: str) -> None:
        """Tie a to b, entry by entry (they broadcast). What meets 0 is fixed, for the reason given."""
        if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
            return
        a, b = torch.broadcast_tensors(a, b)
        differ = a != b
        pairs = torch.unique(a[differ] * len(self) + b[differ])  # one number a pair: unique rows are slow
        for one, other in zip((pairs // len(self)).tolist(), (pairs % len(self)).tolist(), strict=True):
            if one == FIXED or other == FIXED:
                self._fix(one or other, reason)
                continue
            one, other = self.find(one), self.find(other)
            if one != other:
                self._join(one, other, reason)

    def _join(self, one: int, other: int, reason: str) -> None:
        self._parent[other] = one
        if other in self._reason:
            self._reason.setdefault(one, self._reason.pop(other))

    def fix(self, slots: Tensor, reason: str) -> None:
        for slot in torch.unique(slots).tolist():
            self._fix(slot, reason)

    def _fix(self, slot: int, reason: str) -> None:
        if slot != FIXED:
            self._reason.setdefault(self.find(slot), reason)

    def reason(self, slot: int) -> str | None:
        """Why the slot is fixed, or None if it may go."""
        return self._reason.get(self.find(slot))

    def roots_of(self, slots: Tensor) -> Tensor:
        """The same tensor with representatives for slots, and 0 for all that is fixed."""
        unique, places = torch.unique(slots, return_inverse=True)
        roots = [self.find(slot) for slot in unique.tolist()]
        return torch.tensor([FIXED if root in self._reason else root for root in roots])[places]

    def roots(self) -> Tensor:
        """One representative for every slot: equal numbers live and die together."""
        parent = torch.tensor(self._parent)
        while not torch.equal(parent, above := parent[parent]):
            parent = above
        return parent

    def fixed(self, roots: Tensor) -> Tensor:
        """For every slot, given its representative, whether it is fixed."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[list(self._reason)] = True
        return mask[roots]


class UnsettledError(Exception):
    """More is tied or fixed than was known."""


class Settled(Ties):
    """Ties that are known already. One more is an error."""

    def __init__(self, ties: Ties) -> None:
        self.slots, self._parent, self._reason = ties.slots, ties._parent, ties._reason

    def _join(self, one: int, other: int, reason: str) -> None:
        if one not in self._reason or other not in self._reason:
            raise UnsettledError(self._reason.get(one) or self._reason.get(other) or reason)

    def _fix(self, slot: int, reason: str) -> None:
        if slot != FIXED and self.find(slot) not in self._reason:
            raise UnsettledError(reason)
