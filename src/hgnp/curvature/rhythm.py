"""From step to step: when v is renewed, and when the term rests.

v is renewed in every so many steps. With `rest_closed`, if the hinge is closed in the first step along a new v, the steps until
the next renewal are plain ones.
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
    def __init__(self, v_every: int, rest_closed: bool, *, lags: bool) -> None:
        if isinstance(v_every, bool) or not isinstance(v_every, int) or v_every < 1:
            raise ValueError(f"v_every: {v_every!r} was given; a whole number of at least 1 would do")
        if not isinstance(rest_closed, bool):
            raise ValueError(f"rest_closed: {rest_closed!r} was given; True or False would do")
        if v_every > 1 and not lags:
            raise ValueError(
                f"v_every: {v_every} was given with v_from='this_batch', which renews v in every step; 1 would do"
            )
        if rest_closed and not lags:
            raise ValueError(
                "rest_closed: True was given with v_from='this_batch', which looks in every step; False would do"
            )
        self._every, self._rest_closed, self._lags = v_every, rest_closed, lags
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
