"""How steps run: in which memory format and, on a CPU, with how many threads.

Both change how fast a step is, and its last digits. So that a run is the same when it is repeated, "auto" goes by a fixed rule.
What "measured" finds by timing steps of copies is found once, before the first epoch, and kept in the checkpoint, so that a run
that is resumed goes on the same way. `torch.compile` is not among the ways: benchmarks/cpu.md has what it costs and saves.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.forward import run
from hgnp.messages import first_line
from hgnp.modes import evaluating
from hgnp.neurons import Neurons
from hgnp.recipe import Recipe
from hgnp.timing import side_by_side
from hgnp.training.epoch import Epochs, Steps
from hgnp.training.task import Task
from hgnp.training.trainer import make_flatness, make_trainer

SECONDS = 5.0
WIDE = 256  # channels; narrower networks gain less than a tenth
Batch = tuple[Any, Any]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LAID_OUT = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Way:
    """A memory format of the weights of 2-d convolutions, which all that is computed from them takes on, and a number of
    threads; None is as it was found."""

    memory_format: str | None = None
    threads: int | None = None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f" with {self.threads} thread{'s' * (self.threads > 1)}"
        return (self.memory_format or "as found").replace("_", " ") + threads

    @contextmanager
    def taken(self, net: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, str]) -> Iterator[None]:
        """Inside the block, steps run this way; afterwards threads are as before, and weights as `formats_of` found them."""
        threads = torch.get_num_threads()
        try:
            self.apply(net)
            _follow(optimizer)
            yield
        finally:
            torch.set_num_threads(threads)
            for name, form in found.items() if self.memory_format is not None else ():
                _lay_out(net.get_submodule(name), form)
            _follow(optimizer)

    def apply(self, net: nn.Module) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        for module in net.modules() if self.memory_format is not None else ():
            if isinstance(module, LAID_OUT):
                _lay_out(module, str(self.memory_format))


def formats_of(net: nn.Module) -> dict[str, str]:
    """The memory format of each 2-d convolution's weight."""
    return {
        name: "contiguous" if module.weight.is_contiguous() else "channels_last"
        for name, module in net.named_modules()
        if isinstance(module, LAID_OUT)
    }


def _lay_out(module: nn.Module, form: str) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight.data = weight.data.contiguous(memory_format=FORMATS[form])


def _follow(optimizer: torch.optim.Optimizer) -> None:
    """Lays out what an optimizer keeps of each parameter as the parameter is: fused ones go through both as if they were, and
    are silently wrong otherwise. A checkpoint holds all of it contiguous."""
    for parameter, state in optimizer.state.items():
        for name, kept in state.items():
            if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)


@dataclass(frozen=True)
class Choice:
    """A way, with what was seen when it was chosen."""

    way: Way
    step_ms: dict[str, float] | None = None
    """Way → milliseconds of a step, where they were measured."""
    notes: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.way) | {"step_ms": self.step_ms}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Choice":
        return cls(Way(state["memory_format"], state["threads"]), state["step_ms"])


def choose(
    net: nn.Module, task: Task, recipe: Recipe, batch: Batch, neurons_of: Callable[[nn.Module], Neurons]
) -> Choice:
    """The way of a run that begins. `net` and the number of threads stay as they are."""
    if recipe.execution == "eager":
        return Choice(Way())
    if recipe.execution == "auto" or task.train.device.type != "cpu":
        return _by_rule(net, task, recipe, batch)
    try:
        typical = copy.deepcopy(net)
        _thin(neurons_of(typical), recipe)
    except Exception as error:  # the user's code may raise anything
        return Choice(Way(), notes=(f"nothing is measured, as net cannot be copied and pruned: {first_line(error)}",))
    return _fastest(typical, task, recipe, batch)


def _by_rule(net: nn.Module, task: Task, recipe: Recipe, batch: Batch) -> Choice:
    """Channels last for a network that is wide, or on a GPU, and whose code will have it: a `view` of a picture's rows will
    not."""
    convolutions = [module for module in net.modules() if isinstance(module, LAID_OUT)]
    wide = WIDE if task.train.device.type == "cpu" else 1
    if max((module.out_channels for module in convolutions), default=0) < wide:
        return Choice(Way())
    try:
        _step(net, task, recipe, batch, "channels_last")
    except Exception as error:  # the user's code may raise anything
        return Choice(Way(), notes=(f"steps run as found, as a step with channels last failed: {first_line(error)}",))
    return Choice(Way("channels_last"))


def _thin(neurons: Neurons, recipe: Recipe) -> None:
    """Removes neurons at random, down to as many as are left midway from the whole network to the target."""
    gone = (1 - recipe.keep ** (1.0 if recipe.target == "neurons" else 0.5)) / 2
    scores = {layer.name: torch.rand(layer.alive) for layer in neurons.layers}
    neurons.remove(neurons.least(scores, round(gone * neurons.count), floor=recipe.floor))


def _fastest(net: nn.Module, task: Task, recipe: Recipe, batch: Batch) -> Choice:
    """The fastest of all ways, by steps of copies in turns. Ways that fail are left out."""
    found = torch.get_num_threads()
    ways: dict[Way, Callable[[], None]] = {}
    notes = []
    for form in FORMATS if formats_of(net) else (None,):
        try:
            step = _step(net, task, recipe, batch, form)
        except Exception as error:
            notes.append(f"{Way(form)} is left out: {first_line(error)}")
            continue
        for threads in sorted({1, max(found // 2, 1), found}, reverse=True):
            ways[Way(form, threads)] = partial(_with_threads, threads, step)
    if not ways:
        return Choice(Way(), notes=tuple(notes))
    try:
        timings = side_by_side(list(ways.values()), device=task.train.device, warmup=1, budget=SECONDS)
    except Exception as error:
        return Choice(Way(), notes=(*notes, f"steps run as found, as measuring failed: {first_line(error)}"))
    finally:
        torch.set_num_threads(found)
    step_ms = {str(way): round(timing.median, 3) for way, timing in zip(ways, timings, strict=True)}
    best = min(ways, key=lambda way: step_ms[str(way)])
    times = ", ".join(f"{way} {ms:.1f} ms" for way, ms in sorted(step_ms.items(), key=lambda item: item[1]))
    return Choice(best, step_ms, (*notes, f"steps run {best}, as measured midway: {times}"))


def _with_threads(number: int, step: Callable[[], None]) -> None:
    torch.set_num_threads(number)
    step()


def _step(net: nn.Module, task: Task, recipe: Recipe, batch: Batch, form: str | None) -> Callable[[], None]:
    """A step of training on a copy of `net`, which has gone well once, as has an evaluation. With a learning rate of 0 all
    steps are alike."""
    mine = copy.deepcopy(net)
    Way(form).apply(mine)
    with evaluating(mine), torch.no_grad():
        run(mine, batch[0], output=task.output)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    trainer = make_trainer(make_flatness(mine, task, recipe), task, recipe)
    epochs = Epochs(mine, trainer, optimizer, recipe, task.train.device)
    mine.train()
    epochs.step(batch, Steps())
    return lambda: epochs.step(batch, Steps())
