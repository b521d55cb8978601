"""Whether a number of the paper and ours agree, by one rule."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

AGREES, DIRECTION, DIFFERS, UNDECIDED = "agrees", "agrees in direction", "differs", "undecided"
NOT_RUN, NONE = "not run", ""
RULE = (
    "Every claim about accuracy is undecided with one seed.",
    "A value or a difference between methods agrees if the paper's is within one standard deviation over seeds (n − 1) of "
    "ours.",
    "A difference that is further off agrees in direction if it has the same sign. It is undecided if ours is "
    "no larger than its standard deviation over seeds. A ratio of times agrees in direction if it is on the same side of 1.",
    "A bound agrees if it is met.",
    "“HGNP is ahead below κ” agrees if its mean curve is above Taylor's at every such κ that both reach.",
    "Times are from different hardware and are not judged; their ratios are.",
)


@dataclass(frozen=True)
class Measured:
    """A mean over seeds with its standard deviation, None for a single seed."""

    mean: float
    spread: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Measured":
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str = ""


NO_VERDICT = Verdict(NONE)
ONE_SEED = Verdict(UNDECIDED, "one seed")


def value(paper: float, ours: Measured) -> Verdict:
    if ours.spread is None:
        return ONE_SEED
    if abs(ours.mean - paper) <= ours.spread:
        return Verdict(AGREES, "within one standard deviation")
    return Verdict(
        DIFFERS, f"{abs(ours.mean - paper) / ours.spread:.1f} standard deviations apart" if ours.spread else ""
    )


def signed(paper: float, ours: Measured) -> Verdict:
    if ours.spread is None:
        return ONE_SEED
    if abs(ours.mean - paper) <= ours.spread:
        return Verdict(AGREES, "within one standard deviation")
    if abs(ours.mean) <= ours.spread:
        return Verdict(UNDECIDED, "smaller than its standard deviation")
    same = math.copysign(1, paper) == math.copysign(1, ours.mean) and ours.mean != 0
    return Verdict(DIRECTION, "same sign") if same else Verdict(DIFFERS, "other sign")


def ratio(paper: float, ours: float) -> Verdict:
    return Verdict(DIRECTION, "same side of 1") if (paper > 1) == (ours > 1) else Verdict(DIFFERS, "other side of 1")


def bound(paper: float, ours: Measured) -> Verdict:
    if ours.spread is None:
        return ONE_SEED
    return Verdict(AGREES, "the bound is met") if ours.mean > paper else Verdict(DIFFERS, "the bound is not met")


def ahead(share: float, seeds: int) -> Verdict:
    if seeds < 2:
        return ONE_SEED
    return Verdict(AGREES, "at every κ") if share > 1 - 1e-9 else Verdict(DIFFERS, "not at every κ")
