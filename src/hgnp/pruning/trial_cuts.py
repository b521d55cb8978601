"""Try every kind of cut on the network's own code before calling a neuron prunable."""

from collections import defaultdict

import torch
from torch import Tensor

from hgnp.pruning.structure import Structure

Family = tuple[int, ...]
"""Roots whose slots lie in the same dimensions of the same tensors: what holds for one holds for all."""


def confirm(structure: Structure, neurons: Tensor) -> None:
    """Fix whatever cannot be cut. `neurons` are the slots of all neurons; only what contains one is tried."""
    _fix_what_would_empty(structure)
    structure.settle()
    families = _families(structure, neurons)
    suspects: list[Family] = []
    while families:
        alive, tried = _sample(structure, families)
        found = structure.misfit(alive)
        if found is None:
            suspects += [family for family in families if family not in tried]
            break
        guilty = set(structure.roots[found.slots].tolist())
        blamed = [family for family in tried if guilty & set(family)] or tried
        suspects += blamed
        families = [family for family in families if family not in blamed]
    for suspect in suspects:
        alive, tried = _sample(structure, [suspect])
        found = structure.misfit(alive) if tried else None
        if found is not None:
            structure.ties.fix(torch.tensor(suspect), found.reason)
    structure.settle()


def _fix_what_would_empty(structure: Structure) -> None:
    roots = structure.ties.roots()
    for (name, _), slots in structure.ties.slots.items():
        if len(roots[slots].unique()) == 1:
            structure.ties.fix(slots[:1], f"all of {name} stands and falls together")


def _families(structure: Structure, neurons: Tensor) -> list[Family]:
    candidates = set(structure.roots[neurons].tolist()) - set(structure.roots[structure.fixed].tolist())
    touches: dict[int, list[int]] = defaultdict(list)
    for place, slots in enumerate(structure.ties.slots.values()):
        for root in structure.roots[slots].unique().tolist():
            if root in candidates:
                touches[root].append(place)
    families: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for root in sorted(candidates):
        families[tuple(touches[root])].append(root)
    return [tuple(family) for family in families.values()]


def _sample(structure: Structure, families: list[Family]) -> tuple[Tensor, list[Family]]:
    """A cut with something from every family and something left of every tensor; and the families it takes from."""
    draw = torch.Generator().manual_seed(len(families))
    tried = list(families)
    while True:
        dead = torch.zeros(len(structure.ties), dtype=torch.bool)
        for family in tried:
            # an odd share, so that a hidden multiple of two or three shows
            count = max(1, len(family) // 3)
            order = torch.randperm(len(family), generator=draw)[:count]
            dead[torch.tensor(family)[order]] = True
        alive = ~dead[structure.roots]
        emptied = [slots for slots in structure.ties.slots.values() if not bool(alive[slots].any())]
        if not emptied:
            return alive, tried
        roots = set(structure.roots[torch.cat(emptied)].tolist())
        # those that empty a tensor between them are tried one by one
        tried = [family for family in tried if not roots & set(family)]
