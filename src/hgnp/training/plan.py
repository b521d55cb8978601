"""Where a run stands and what comes next."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from hgnp.recipe import Recipe
from hgnp.result import Row
from hgnp.training import schedule


@dataclass
class Plan:
    """Algorithm 2's clock."""

    recipe: Recipe
    epoch: int = 0
    reached: int | None = None
    """The epoch in which the target was met, or in which nothing more could go."""
    switched: int | None = None
    """The epoch from which the flatness term is used, which the hybrid finds on its way."""
    last_round: int | None = None
    """The epoch of the last round of pruning."""
    steps: int = 0
    """Steps since pruning began."""
    position: float = 0.0
    """Of the learning-rate schedule, from 0 to 1."""
    parts: int = 1
    """How often the run was begun or gone on with."""
    seconds: float = 0.0
    """Of all epochs so far, in all parts."""
    stopped: str | None = None
    """Why it ended before its time."""
    before: dict[str, Any] | None = None
    """Facts about the network when the first neuron went."""
    snapshots: dict[float, int] = field(default_factory=dict)
    """Value of `recipe.snapshots` → the epoch in which a round came down to it."""
    history: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note_kept(1.0)

    def note_kept(self, kept: float) -> None:
        """Takes note of a switch from Taylor to HGNP."""
        if self.switched is None and self.recipe.uses_term(kept):
            self.switched = self.epoch

    @property
    def pruning(self) -> bool:
        return self.reached is None and self.epoch >= self.recipe.warmup_epochs

    @property
    def round_due(self) -> bool:
        """Whether neurons go before this epoch's training."""
        return self.pruning and self.recipe.prune_unit == "epochs" and self.epoch % self.recipe.prune_every == 0

    @property
    def phase(self) -> str:
        if self.epoch < self.recipe.warmup_epochs:
            return "warmup"
        return "finetune" if self.reached is not None and self.epoch > self.reached else "prune"

    def settle(self, left: float) -> None:
        """Takes note of a target that is met without pruning, or met already."""
        if self.pruning and left <= self.recipe.keep:
            self.reached = self.epoch - 1

    @property
    def done(self) -> bool:
        over = self.reached is not None and self.epoch > self.reached + self.recipe.finetune_epochs
        return over or self.stopped is not None

    def reach(self, left: float) -> list[float]:
        """Values of `recipe.snapshots` that this epoch's rounds came down to, from now on in `snapshots`."""
        values = [value for value in self.recipe.snapshots if left <= value and value not in self.snapshots]
        self.snapshots |= dict.fromkeys(values, self.epoch)
        return values

    @property
    def ends_here(self) -> bool:
        """Whether the target was met in this epoch and a schedule over the whole run ends with it."""
        return self.reached == self.epoch and self.recipe.finetune_epochs == 0 and self.recipe.anneal == "run"

    def epochs_left(self, *, left: float, neurons: int, at_start: int, steps: int | None) -> int:
        """Epochs from this one on, by the present estimate. `left` is the fraction that the target counts, `steps` those
        of an epoch."""
        recipe = self.recipe
        if self.reached is not None:
            return max(self.reached + recipe.finetune_epochs + 1 - self.epoch, 1)
        first = max(self.epoch, recipe.warmup_epochs)
        if left <= recipe.keep:
            return max(first - self.epoch + recipe.finetune_epochs, 1)
        more = schedule.rounds_left(recipe, left=left, neurons=neurons, at_start=at_start) - 1  # after the next
        if recipe.prune_unit == "steps":
            last = _multiple(recipe.prune_every, self.steps) + more * recipe.prune_every - self.steps  # steps from now
            return first - self.epoch + last // (steps or 1) + 1 + recipe.finetune_epochs
        due = first + 1 if self.last_round == first else first
        last = _multiple(recipe.prune_every, due) + more * recipe.prune_every
        return last - self.epoch + 1 + recipe.finetune_epochs

    def advance(self, epochs_left: int) -> tuple[float, float]:
        """Moves the schedule over this epoch: where it is at its start and at its end."""
        start, share = self.position, 1 / epochs_left
        if self.recipe.anneal == "finetune" and (self.reached is None or self.epoch <= self.reached):
            share = 0.0
        self.position = start + (1 - start) * share
        return start, self.position

    def mu(self, share: float) -> float:
        """The flatness term's weight when `share` of this epoch is over."""
        if self.switched is None:
            return 0.0
        warmup, since = self.recipe.mu_warmup_epochs, self.epoch - self.switched
        return self.recipe.training_mu * (min(1.0, (since + share) / warmup) if warmup else 1.0)

    def state_dict(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "recipe"}
        return state | {"history": [json.dumps(row) for row in self.history]}  # a long one is quicker to copy as text

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.history = history_of(state)


def history_of(state: dict[str, Any]) -> list[Row]:
    """The rows in a plan's state."""
    return [json.loads(row) for row in state["history"]]


def _multiple(every: int, least: int) -> int:
    return -(-least // every) * every
