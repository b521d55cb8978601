"""The state of a run: epoch, phase, target, schedule position, history."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from hgnp.errors import InputTypeError
from hgnp.recipe import Recipe
from hgnp.result import Row
from hgnp.training import schedule


@dataclass
class RunState:
    """Progress through Algorithm 2, and what follows from it: when to prune, when to stop, μ, the schedule's position."""

    recipe: Recipe
    epoch: int = 0
    """The next epoch, from 0."""
    pruning_ended: int | None = None
    """The epoch in which the target was met, or in which no more neurons could be removed."""
    switched: int | None = None
    """The first epoch with the flatness penalty; None before method "hybrid" has switched."""
    last_round: int | None = None
    """The epoch of the last round of pruning."""
    steps: int = 0
    """Steps since pruning started."""
    position: float = 0.0
    """Position in the learning-rate schedule, from 0 to 1."""
    parts: int = 1
    """1, plus one for each time the run was resumed."""
    seconds: float = 0.0
    """Of all epochs so far, including those before a resume."""
    stopped: str | None = None
    """Why the run ended early, if it did."""
    before: dict[str, Any] | None = None
    """`NetworkStats` of the network before the first removal."""
    snapshots: dict[float, int] = field(default_factory=dict)
    """Value of `recipe.snapshots` → the epoch in which a round reached it."""
    history: list[Row] = field(default_factory=list)
    """One row per epoch."""

    def __post_init__(self) -> None:
        self.update_switch(1.0)

    def update_switch(self, kept: float) -> None:
        """Record the epoch in which method "hybrid" switches from Taylor to HGNP."""
        if self.switched is None and self.recipe.uses_penalty(kept):
            self.switched = self.epoch

    @property
    def pruning(self) -> bool:
        return self.pruning_ended is None and self.epoch >= self.recipe.warmup_epochs

    @property
    def round_due(self) -> bool:
        """Whether neurons are removed before this epoch's training."""
        return self.pruning and self.recipe.prune_unit == "epochs" and self.epoch % self.recipe.prune_every == 0

    @property
    def phase(self) -> Literal["warmup", "prune", "finetune"]:
        if self.epoch < self.recipe.warmup_epochs:
            return "warmup"
        return "finetune" if self.pruning_ended is not None and self.epoch > self.pruning_ended else "prune"

    def mark_target_met(self, left: float) -> None:
        """Record that the target was met before this epoch, also if no neuron had to be removed."""
        if self.pruning and left <= self.recipe.keep:
            self.pruning_ended = self.epoch - 1

    @property
    def done(self) -> bool:
        over = self.pruning_ended is not None and self.epoch > self.pruning_ended + self.recipe.finetune_epochs
        return over or self.stopped is not None

    @property
    def validation_due(self) -> bool:
        """Whether this epoch is validated. The last one is, unless a callback ends the run after it."""
        last = self.pruning_ended is not None and self.epoch >= self.pruning_ended + self.recipe.finetune_epochs
        return last or self.stopped is not None or (self.epoch + 1) % self.recipe.validate_every == 0

    def record_snapshots(self, left: float) -> list[float]:
        """Record and return the values of `recipe.snapshots` that this epoch's rounds reached."""
        values = [value for value in self.recipe.snapshots if left <= value and value not in self.snapshots]
        self.snapshots |= dict.fromkeys(values, self.epoch)
        return values

    @property
    def ends_this_epoch(self) -> bool:
        """Whether a schedule over the whole run ends with this epoch, in which the target was met."""
        return self.pruning_ended == self.epoch and self.recipe.finetune_epochs == 0 and self.recipe.anneal == "run"

    def epochs_left(self, *, left: float, neurons: int, at_start: int, steps: int | None) -> int:
        """Estimated number of epochs left, this one included. `left`: the fraction left of the target's quantity; `steps`:
        steps per epoch."""
        recipe = self.recipe
        if self.pruning_ended is not None:
            return max(self.pruning_ended + recipe.finetune_epochs + 1 - self.epoch, 1)
        first = max(self.epoch, recipe.warmup_epochs)
        if left <= recipe.keep:
            return max(first - self.epoch + recipe.finetune_epochs, 1)
        more = schedule.rounds_left(recipe, left=left, neurons=neurons, at_start=at_start) - 1  # after the next round
        if recipe.prune_unit == "steps":
            last = _round_up(recipe.prune_every, self.steps) + more * recipe.prune_every - self.steps  # steps from now
            return first - self.epoch + last // (steps or 1) + 1 + recipe.finetune_epochs
        due = first + 1 if self.last_round == first else first
        last = _round_up(recipe.prune_every, due) + more * recipe.prune_every
        return last - self.epoch + 1 + recipe.finetune_epochs

    def advance(self, epochs_left: int) -> tuple[float, float]:
        """Advance the schedule by this epoch; returns its position at the start and at the end."""
        start, share = self.position, 1 / epochs_left
        if self.recipe.anneal == "finetune" and (self.pruning_ended is None or self.epoch <= self.pruning_ended):
            share = 0.0
        self.position = start + (1 - start) * share
        return start, self.position

    def mu(self, share: float) -> float:
        """The weight of the flatness penalty when `share` of this epoch is over."""
        if self.switched is None:
            return 0.0
        warmup, since = self.recipe.mu_warmup_epochs, self.epoch - self.switched
        return self.recipe.training_mu * (min(1.0, (since + share) / warmup) if warmup else 1.0)

    def state_dict(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "recipe"}
        return state | {
            "history": [json.dumps(row) for row in self.history]
        }  # a long history is faster to copy as text

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.history = read_history(state)


def check_row(row: Row) -> None:
    """InputTypeError if a callback has added what a file of rows cannot hold."""
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InputTypeError(
                f"row must hold numbers, strings, lists and dictionaries, got {type(value).__name__} as {name!r} ({error}); "
                "convert it, such as by tensor.item()"
            ) from None


def read_history(state: dict[str, Any]) -> list[Row]:
    """The history in a stored state."""
    return [json.loads(row) for row in state["history"]]


def _round_up(every: int, least: int) -> int:
    """The smallest multiple of `every` that is at least `least`."""
    return -(-least // every) * every
