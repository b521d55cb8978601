"""Batches are what plain code would make of the images, and an epoch follows from the random state at its start."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from hgnp.experiments.data import Loader, digits
from hgnp.experiments.data.loader import InMemorySource, subset_indices
from hgnp.train import as_device

CPU = torch.device("cpu")
MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)


def make(n: int = 21, **options: object) -> Loader:
    images = torch.randint(256, (n, 3, 6, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    kwargs: dict[str, object] = {"batch": 4, "mean": MEAN, "std": STD, "device": CPU} | options
    return Loader(InMemorySource(images, torch.arange(n), CPU), **kwargs)  # type: ignore[arg-type]


def normalised(image: Tensor) -> Tensor:
    channels = [(plane.double() - mean) / std for plane, mean, std in zip(image, MEAN, STD, strict=True)]
    return torch.stack(channels)


def epoch(loader: Loader) -> tuple[Tensor, Tensor]:
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_without_shuffling_images_come_normalised_and_in_order() -> None:
    loader = make()
    x, y = epoch(loader)
    assert x.dtype == torch.float32
    assert torch.equal(y, torch.arange(21))
    expected = torch.stack([normalised(image) for image in loader.source.images])  # type: ignore[attr-defined]
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)


def test_flips_are_of_whole_images_and_about_half_of_them() -> None:
    loader = make(400, shuffle=True, flip=True)
    plain, _ = epoch(make(400))
    x, y = epoch(loader)
    assert sorted(y.tolist()) == list(range(400))
    assert y.tolist() != list(range(400))
    same = (x == plain[y]).flatten(1).all(1)
    mirrored = (x == plain[y].flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 150 < mirrored.sum() < 250


def test_cutout_hides_a_square_around_a_pixel_of_the_image() -> None:
    plain, _ = epoch(make(300))
    x, _ = epoch(make(300, cutout=3))
    hidden = (x != plain).any(1)
    assert (x[hidden.unsqueeze(1).expand_as(x)] == 0).all()
    squares = {(r, c): torch.zeros(6, 6, dtype=torch.bool) for r in range(6) for c in range(6)}
    for (r, c), square in squares.items():
        square[max(r - 1, 0) : r + 2, max(c - 1, 0) : c + 2] = True
    found = {place for mask in hidden for place, square in squares.items() if torch.equal(mask, square)}
    assert all(any(torch.equal(mask, square) for square in squares.values()) for mask in hidden)
    assert found == set(squares)


def test_crops_are_windows_of_the_padded_image() -> None:
    loader = make(60, crop=2)
    images = loader.source.images  # type: ignore[attr-defined]
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    places = set()
    for i, picture in enumerate(epoch(loader)[0]):
        windows = {(r, c): normalised(padded[i, :, r : r + 6, c : c + 6]) for r in range(5) for c in range(5)}
        (found,) = [place for place, window in windows.items() if torch.allclose(window.float(), picture, atol=1e-5)]
        places.add(found)
    assert len(places) > 15


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": True, "flip": True, "crop": 1, "cutout": 2}, {"flip": True}]
)
def test_an_epoch_is_a_function_of_the_global_state_at_its_start(options: dict[str, object]) -> None:
    loader = make(**options)
    epoch(loader)
    state = torch.get_rng_state()
    x, y = epoch(loader)
    after = torch.get_rng_state()
    assert not torch.equal(epoch(loader)[0], x)
    torch.set_rng_state(state)
    batches = iter(make(**options))
    assert torch.equal(torch.get_rng_state(), after)  # drawn when the epoch begins, and nothing later
    torch.rand(3)  # what the network draws in between, dropout for one, does not matter
    again = list(batches)
    assert torch.equal(torch.cat([x for x, _ in again]), x)
    assert torch.equal(torch.cat([y for _, y in again]), y)


def test_batches_made_together_are_those_made_one_by_one() -> None:
    epochs = []
    for together in (1, 3, 16):
        loader = make(shuffle=True, flip=True, crop=2)
        assert loader.batches_per_launch == 1
        loader.batches_per_launch = together
        torch.manual_seed(3)
        epochs.append(list(loader))
    for other in epochs[1:]:
        torch.testing.assert_close(epochs[0], other, rtol=0, atol=0)


def test_validation_touches_no_random_state() -> None:
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    epoch(make())
    epoch(digits(batch=64).val)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


@pytest.mark.parametrize(
    ("n", "options", "sizes"),
    [
        (21, {}, [4, 4, 4, 4, 4, 1]),
        (21, {"shuffle": True}, [4, 4, 4, 4, 4]),  # a single sample, which batch normalisation cannot take
        (22, {"shuffle": True}, [4, 4, 4, 4, 4, 2]),
        (22, {"shuffle": True, "drop_last": True}, [4, 4, 4, 4, 4]),
        (3, {"shuffle": True, "batch": 1}, [1, 1, 1]),
    ],
)
def test_a_loader_has_batches_of_these_sizes_and_counts_their_samples(
    n: int, options: dict[str, object], sizes: list[int]
) -> None:
    loader = make(n, **options)
    assert [len(y) for _, y in loader] == sizes
    assert (len(loader), loader.samples) == (len(sizes), sum(sizes))


def test_a_limit_is_even_over_classes_and_always_the_same() -> None:
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 3)[torch.randperm(83)]
    torch.manual_seed(5)
    keep = subset_indices(labels, 23)
    assert labels[keep].bincount().tolist() == [10, 10, 3]
    assert len(keep.unique()) == 23
    assert torch.equal(keep, subset_indices(labels, 23))
    assert subset_indices(labels, None).tolist() == list(range(83))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(batch=0), "batch must be an integer ≥ 1, got 0"),
        (lambda: make(batch=2.0), "batch must be an integer ≥ 1, got 2.0"),
        (lambda: make(crop=-1), "crop must be an integer ≥ 0, got -1"),
        (lambda: make(cutout=1.5), "cutout must be an integer ≥ 0, got 1.5"),
        (lambda: make(3, drop_last=True), "batch must leave at least one batch of 3 samples, got 4"),
        (lambda: subset_indices(torch.arange(5), 6), "limit must be None or an integer from 1 to 5, got 6"),
        (lambda: as_device("gpu"), "device must be one that PyTorch can use here, got gpu"),
    ],
)  # fmt: skip
def test_a_loader_refuses_bad_options(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"must|device") as caught:
        call()  # type: ignore[operator]
    assert str(caught.value).startswith(message)


def test_digits_are_1797_normalized_images_of_ten_classes() -> None:
    data = digits(batch=64)
    assert (data.train_samples, data.val_samples, data.classes, data.image_side) == (1347, 450, 10, 8)
    x, y = epoch(data.val)
    assert x.shape == (450, 1, 8, 8)
    assert torch.equal(epoch(digits(batch=50).val)[0], x)
    train, labels = epoch(data.train)
    every = torch.cat([train, x])
    assert (every.mean().abs(), (every.std() - 1).abs()) < (1e-3, 1e-3)
    assert torch.cat([labels, y]).bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    few = digits(batch=10, limit=100).train
    assert epoch(few)[1].bincount().tolist() == [10] * 10
