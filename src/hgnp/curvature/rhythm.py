"""From step to step: when v is renewed, and when the term rests.

v is renewed in every `refresh_every` steps. With `skip_inactive`, if the penalty is inactive in the first step along a new v,
the steps until the next renewal are plain ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hgnp.curvature.late import Late


@dataclass(frozen=True)
class Kind:
    """What a step does."""

    term: bool  # whether the term is looked at
    renew: bool  # whether the next v is solved for on the way


class Rhythm:
    def __init__(self, refresh_every: int, skip_inactive: bool, *, lags: bool) -> None:
        if isinstance(refresh_every, bool) or not isinstance(refresh_every, int) or refresh_every < 1:
            raise ValueError(f"refresh_every must be a whole number ≥ 1, got {refresh_every!r}")
        if not isinstance(skip_inactive, bool):
            raise ValueError(f"skip_inactive must be True or False, got {skip_inactive!r}")
        if refresh_every > 1 and not lags:
            raise ValueError(
                f"refresh_every must be 1 with direction_from='this_batch', which renews v in every step, got {refresh_every}"
            )
        if skip_inactive and not lags:
            raise ValueError(
                "skip_inactive must be False with direction_from='this_batch', which looks at the term in every step, got True"
            )
        self._every, self._rest_closed, self._lags = refresh_every, skip_inactive, lags
        self._age = 0  # steps since v was renewed
        self._resting = False
        self._first_q: Late | None = None  # q of the first step along this v, on its way
        self.rested = False
        """Whether the last step was a plain one, as the term rests."""

    def next(self, bound: float) -> Kind:
        """The next step's kind. Waits for the first q along this v, if that is on its way."""
        if self._first_q is not None:
            self._resting, self._first_q = not self._first_q.item() > bound, None
        return Kind(term=not self._resting, renew=self._lags and self._age + 1 >= self._every)

    def done(self, kind: Kind, q: Tensor | None) -> None:
        """A step of this kind is over; q is the one last seen."""
        self.rested = not kind.term
        if kind.renew:
            self._age, self._resting = 0, False
            return
        if self._rest_closed and self._age == 0:
            assert q is not None
            self._first_q = Late.of(q)
        self._age += 1

    def wake(self) -> None:
        """The network has changed: the term is looked at again."""
        self._resting, self._first_q = False, None

    def state_dict(self, bound: float) -> dict[str, Any]:
        self.next(bound)
        return {"age": self._age, "resting": self._resting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._age, self._resting, self._first_q = state["age"], state["resting"], None
