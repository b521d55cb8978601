"""A training task, and the state that callbacks see."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hgnp.curvature.autodiff.forward import Output
from hgnp.curvature.losses import Loss
from hgnp.flatness import Flatness
from hgnp.pruning import Neurons
from hgnp.reducer import LOCAL, Reducer
from hgnp.result import Row
from hgnp.training.data import Batches
from hgnp.training.evaluate import Metric


@dataclass(frozen=True)
class CallbackState:
    """What `on_step` and `on_epoch` see. The objects are the run's own: changes to them take effect.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> def on_epoch(state):
    ...     print(state.epoch, state.neurons.count)
    >>> recipe = hgnp.Recipe(keep=0.5, warmup_epochs=1, neurons_per_round=8, finetune_epochs=0, seed=0)
    >>> batches = [(torch.randn(16, 4), torch.arange(16) % 2)]
    >>> result = hgnp.prune(net, batches, recipe=recipe, on_epoch=on_epoch, verbose=False)
    0 8
    1 3

    Attributes:
        epoch: The epoch's number, from 0.
        step: The number of the optimizer's step within the epoch, from 0; None in `on_epoch`.
        row: The epoch's row of the history; empty in `on_step`.
        history: One row per completed epoch.
        net: The network that is being trained.
        optimizer: The optimizer of the run.
        neurons: Its neurons: `neurons.kept`, `neurons.layers`, `neurons.version` and so on.
        flatness: The penalty's state: `flatness.radius`, `flatness.curvature`, `flatness.block` of the last step. NaN and None
            for methods without the penalty.
    """

    epoch: int
    step: int | None
    row: Row
    history: list[Row]
    net: nn.Module
    optimizer: torch.optim.Optimizer
    neurons: Neurons
    flatness: Flatness


Callback = Callable[[CallbackState], object]


@dataclass(frozen=True)
class Task:
    """Data, loss and metric of a run. `output` picks the logits from what the network returns. A step of the optimizer takes
    `accumulate` training batches. `reducer` has the ranks that share the run."""

    train: Batches
    val: Batches | None
    loss: Loss
    metric: Metric | None
    output: Output | None
    accumulate: int = 1
    loss_needs_training_mode: bool = False
    """Whether the network returns what the loss takes in training mode only, as torchvision's detectors do. Then the loss is
    that of training mode with norms and dropout in evaluation mode, and a metric takes what the network returns in evaluation
    mode."""
    reducer: Reducer = LOCAL

    @property
    def steps(self) -> int | None:
        """Steps of the optimizer per epoch; None if that is not known yet."""
        return None if self.train.count is None else -(-self.train.count // self.accumulate)
