"""Labels through reshapes: without a copy of what repeats."""

import math
import random

import pytest
import torch

from hgnp.pruning.rules.views import independent_dims, rearrangement

VIEW = torch.ops.aten.view.default


def reshaped(label: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    rearranged = rearrangement(VIEW)
    assert rearranged is not None
    return rearranged(label, [sizes], {})[0]


def random_case(generator: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Sizes of a tensor, those of a label of it, and those that it is reshaped to."""
    old = [generator.choice([1, 2, 3, 4]) for _ in range(generator.randint(0, 4))]
    new, left = [], math.prod(old)
    for _ in range(generator.randint(0, 3)):
        new.append(generator.choice([size for size in range(1, left + 1) if left % size == 0]))
        left //= new[-1]
    new.insert(generator.randint(0, len(new)), left)
    if generator.random() < 0.3:
        new[generator.randrange(len(new))] = -1
    return old, [size if generator.random() < 0.5 else 1 for size in old], new


@pytest.mark.parametrize("seed", range(20))
def test_a_reshaped_label_broadcasts_to_the_reshape_of_all_its_entries(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        old, own, new = random_case(generator)
        label = torch.arange(math.prod(own)).reshape(own).expand(old)
        whole = label.reshape(new)
        assert torch.equal(reshaped(label, new).expand(whole.shape), whole)


@pytest.mark.parametrize(
    ("own", "new", "expected"),
    [
        ([1, 197, 1], [394, 768], [394, 1]),
        ([1, 1, 768], [394, 768], [1, 768]),
        ([1, 1, 768], [2, 197, 12, -1], [1, 1, 12, 64]),
        ([1, 197, 1], [2, 197, 12, 64], [1, 197, 1, 1]),
    ],
)
def test_entries_along_dimensions_that_are_reshaped_by_themselves_are_not_copied(
    own: list[int], new: list[int], expected: list[int]
) -> None:
    label = torch.arange(math.prod(own)).reshape(own).expand(2, 197, 768)
    assert list(reshaped(label, new).shape) == expected


def test_dimensions_that_a_reshape_mixes_belong_together() -> None:
    assert independent_dims((2, 12, 197, 64), (24, 197, 64)) == [
        (range(2), range(1)), (range(2, 3), range(1, 2)), (range(3, 4), range(2, 3)),
    ]  # fmt: skip
    assert independent_dims((4, 6), (6, 4)) == [(range(2), range(2))]
    assert independent_dims((0, 6), (6, 0)) == [(range(2), range(2))]
