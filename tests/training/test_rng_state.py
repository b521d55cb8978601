"""Loaders that keep a state of their own: every epoch is whole, and a resumed run ends as if it had never stopped."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import hgnp
from train_cases import made, recipe, stripes

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """An iterable dataset whose state is its position, as torchdata asks for. It draws from a generator of its own."""

    def __init__(self) -> None:
        self.position, self.generator = 0, torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = stripes()
        while self.position < len(x):
            at = self.position
            self.position += 1
            yield x[at] + 0.1 * torch.randn(x[at].shape, generator=self.generator), y[at]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class OwnLoader:
    """A custom loader with a state_dict: the next iteration continues at the loaded position."""

    def __init__(self) -> None:
        self.order, self.at, self.batches = torch.Generator().manual_seed(2), 0, 6
        self.shuffled_from = self.order.get_state()

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = stripes()
        start, self.at = self.at % self.batches, self.at % self.batches
        if start:
            self.order.set_state(self.shuffled_from)
        self.shuffled_from = self.order.get_state()
        chunks = torch.randperm(len(x), generator=self.order).chunk(self.batches)
        for chunk in itertools.islice(chunks, start, None):
            self.at += 1
            yield x[chunk], y[chunk]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "from": self.shuffled_from, "order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.shuffled_from = state["at"], state["from"]
        self.order.set_state(state["order"])


class Wrapper:
    """A loader of the user's around another, without a length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Several:
    """A loader of the user's over a dict of others, with a generator of its own, in slots."""

    __slots__ = ("draws", "loaders")

    def __init__(self) -> None:
        self.loaders, self.draws = {"a": shuffled()}, torch.Generator().manual_seed(8)

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders.values():
            for x, y in loader:
                yield x + 0.1 * torch.randn(x.shape, generator=self.draws), y


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*stripes()), 16, shuffle=True, generator=torch.Generator().manual_seed(3))


def stateful(workers: int, **given: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(
        TensorDataset(*stripes()),
        batch_size=16,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator(),
        **given,
    )


def distributed() -> StatefulDataLoader[Any]:
    data = TensorDataset(*stripes())
    return StatefulDataLoader(data, 16, sampler=StatefulDistributedSampler(data, num_replicas=1, rank=0))


class EpochBatches:
    """A batch sampler whose order depends on the epoch alone."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch))
        yield from order.view(6, 16).tolist()


LOADERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: stateful(1),
    "no workers": lambda: stateful(0),
    "persistent workers": lambda: stateful(1, persistent_workers=True),
    "plain, persistent workers": lambda: DataLoader(
        TensorDataset(*stripes()), 16, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "distributed sampler": distributed,
    "batch sampler": lambda: DataLoader(TensorDataset(*stripes()), batch_sampler=EpochBatches()),
    "stream": lambda: StatefulDataLoader(Stream(), batch_size=16),
    "own": OwnLoader,
    "wrapped": lambda: Wrapper(Wrapper(shuffled())),
    "several": Several,
}


class StoppedError(Exception):
    pass


def trained(
    loader: Any, *, val: Any = None, stop: int | None = None, **given: Any
) -> tuple[list[list[Tensor]], hgnp.Result]:
    """The inputs of every epoch's steps, and the result."""
    epochs: list[list[Tensor]] = [[]]
    net, last = made(), []
    net.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: epochs[-1].append(last[-1]))

    def on_epoch(state: Any) -> None:
        epochs.append([])
        if state.epoch == stop:
            raise StoppedError

    quick = {"method": "taylor", "measure": "none", "keep": 0.8, "warmup_epochs": 1, "finetune_epochs": 1}
    r = recipe(**quick | given.pop("recipe", {}))
    result = hgnp.prune(net, loader, val, recipe=r, optimizer=optimizer, on_epoch=on_epoch, **given)
    return epochs[:-1], result


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_every_epoch_has_all_samples_once(name: str, validated: bool) -> None:
    everyone = stripes()[0].sum((1, 2, 3)).sort().values
    val = LOADERS[name]() if validated else None
    epochs, _ = trained(LOADERS[name](), val=val)
    assert [len(steps) for steps in epochs] == [6] * len(epochs)
    if name in ("stream", "several"):  # their samples are noisy
        return
    for steps in epochs:
        torch.testing.assert_close(torch.cat(steps).sum((1, 2, 3)).sort().values, everyone)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_batch_sampler_gets_the_epoch(wrapped: bool) -> None:
    loader = LOADERS["batch sampler"]()
    epochs, _ = trained(Wrapper(loader) if wrapped else loader)
    for epoch, steps in enumerate(epochs):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        torch.testing.assert_close(torch.cat(steps), stripes()[0][order])


@pytest.mark.parametrize(
    "name",
    ["no workers", "persistent workers", "distributed sampler", "batch sampler", "stream", "own", "wrapped", "several"],
)
def test_a_resumed_run_ends_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    settings = {"recipe": {"schedule": "cosine", "anneal": "run", "finetune_epochs": 2}}

    def run(out: str, **given: Any) -> hgnp.Result:
        return trained(LOADERS[name](), val=LOADERS[name](), out=tmp_path / out, **settings, **given)[1]

    whole = run("whole")
    for stop in (0, 2):  # before that epoch's checkpoint: it resumes from the one before
        with pytest.raises(StoppedError):
            run("pieces", resume=True, stop=stop)
    pieces = run("pieces", resume=True)
    assert pieces.parts == 3
    for one, other in zip(pieces.history, whole.history, strict=True):
        seconds = {key: one[key] for key in one if "seconds" in key}
        assert one == other | seconds
    torch.testing.assert_close(pieces.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_run_without_validation_data_measures_on_its_first_batch(tmp_path: Path) -> None:
    """Rounds come in the middle of an epoch, where the loader must not be iterated a second time."""
    epochs, result = trained(OwnLoader(), recipe={"prune_unit": "steps", "prune_every": 4, "measure": "full"})
    assert [len(steps) for steps in epochs] == [6] * len(epochs)
    assert result.before.sharpness is not None


def test_a_loader_position_that_a_user_loaded_does_not_shorten_an_epoch() -> None:
    loader = stateful(0)
    next(iter(loader))
    loader.load_state_dict(copy.deepcopy(loader.state_dict()))
    epochs, _ = trained(loader)
    assert [len(steps) for steps in epochs] == [6] * len(epochs)


def test_a_loader_without_a_length_has_the_snapshots_of_one_with_it() -> None:
    batches = list(shuffled())
    found = []
    for loader in (Wrapper(batches), batches):
        _, result = trained(loader, val=batches, recipe={"snapshots": (0.9,), "keep": 0.7, "schedule": "constant"})
        found.append([(each.kept, each.metric, each.val_loss) for each in result.snapshots])
    assert found[0] == found[1] != []
