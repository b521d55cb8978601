"""The demo's data and network."""

import pytest
import torch

from hgnp.experiments.digits import DigitsNet, digits


def test_the_split_is_always_the_same_and_nothing_is_in_both_parts() -> None:
    torch.manual_seed(1)
    first = digits(batch=100)
    torch.manual_seed(2)
    again = digits(batch=100)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.val.y, again.val.y)
    assert (len(first.train.x), len(first.val.x)) == (first.train_samples, first.val_samples) == (1347, 450)
    assert 0 <= float(first.train.x.min()) < float(first.train.x.max()) <= 1
    assert first.val.y.bincount().min() > 30


def test_an_epoch_goes_through_every_picture_once_in_a_new_order() -> None:
    train = digits(batch=100).train
    epochs = [torch.cat([x for x, _ in train]).flatten(1) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert torch.allclose(epochs[0].sum(0), train.x.flatten(1).sum(0))
    assert [len(y) for _, y in digits(batch=500, drop_last=True).train] == [500, 500]


def test_a_batch_that_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch: 0 was given"):
        digits(batch=0)


def test_most_of_the_networks_work_is_in_convolutions() -> None:
    net = DigitsNet()
    sizes = {name: each.numel() for name, each in net.named_parameters()}
    assert 200_000 <= sum(sizes.values()) <= 500_000
    assert sizes["classifier.weight"] < 0.01 * sum(sizes.values())
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
