"""The composed hybrid of an experiment: Taylor's networks above a threshold κ, HGNP's at and below it, from finished runs.

This is the paper's hybrid, composed afterwards. A run that switches during training (`Recipe(method="hybrid")`) is an ordinary
group of its experiment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hgnp.errors import InputError
from hgnp.reporting import curves, hybrid
from hgnp.reporting.curves import Curve

Choice = Literal["fit", "paper"] | float
LABEL = "hybrid (composed)"


@dataclass(frozen=True)
class ComposedHybrid:
    """HGNP's networks for κ up to a threshold, Taylor's above; gains of the area in percent.

    `threshold` is None where none is predicted, for `reason`. `hindsight` is the lowest crossing, if HGNP is ahead from there
    down; None if there is none.
    """

    hgnp: str
    taylor: str
    source: Literal["fit", "paper", "given"]
    """Origin of the threshold: the Lasso on other experiments, the paper's two features, or the user."""
    samples: tuple[str, ...]
    """The experiments that the threshold is fitted on."""
    left_out: tuple[str, ...]
    """Known experiments excluded from the fit because they have the same dataset and network."""
    caveats: tuple[str, ...]
    """Limitations, in sentences."""
    threshold: float | None
    reason: str | None
    area: float | None
    over_taylor: float | None
    over_hgnp: float | None
    hindsight: float | None
    hindsight_over_taylor: float | None
    hindsight_over_hgnp: float | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result in sentences."""
        sentences = []
        if self.threshold is None:
            sentences.append(f"No threshold is predicted: {self.reason}.")
        else:
            gains = _gains(self.over_taylor, self.over_hgnp)
            sentences.append(
                f"The composed hybrid is {self.taylor} above κ = {self.threshold:.1%}, {self.hgnp} at and below; {gains}."
            )
        sentences += [self._origin(), *self.caveats]
        if self.hindsight is None:
            sentences.append(
                "In these runs HGNP does not stay ahead below any κ, so they add nothing to the experiments of the Lasso."
            )
        else:
            gains = _gains(self.hindsight_over_taylor, self.hindsight_over_hgnp)
            sentences.append(f"In hindsight HGNP is ahead below κ = {self.hindsight:.1%}; with that threshold {gains}.")
        return tuple(sentences)

    def _origin(self) -> str:
        """The origin of the threshold in a sentence."""
        if self.source == "given":
            return "The threshold was set by the user."
        if self.source == "paper":
            return f"The threshold is the paper's, from two features: {formula(hybrid.fit(features=hybrid.PAPERS_CHOICE))}."
        own = f" Left out, as this is that experiment: {', '.join(self.left_out)}." if self.left_out else ""
        return f"The threshold is fitted by a Lasso on {len(self.samples)} other experiments: {', '.join(self.samples)}.{own}"


def check_choice(threshold: Any) -> None:
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0 <= threshold <= 1
    if not number and threshold not in ("fit", "paper"):
        raise InputError(f"threshold must be 'fit', 'paper' or a κ from 0 to 1, got {threshold!r}")


def compose(
    ours: tuple[str, Curve],
    theirs: tuple[str, Curve],
    features: Mapping[str, Any],
    known: Sequence[hybrid.Sample],
    choice: Choice,
) -> ComposedHybrid:
    """The composed hybrid of HGNP's and Taylor's curves, each with its label. `known`: the paper's and other experiments."""
    (hgnp, below), (taylor, above) = ours, theirs
    threshold: float | None = None
    reason: str | None = None
    model: hybrid.Model | None = None
    caveats: list[str] = []
    if choice == "fit":
        model = hybrid.fit_without(features, known)
    elif choice == "paper":
        model = hybrid.fit(features=hybrid.PAPERS_CHOICE)
    else:
        threshold = float(choice)
    if model is not None:
        caveats.append(hybrid.sample_counts(model))
        own = [s.name for s in model.samples if hybrid.same_experiment(s.features, features)]
        if own:
            caveats.append(f"This experiment is one of them ({', '.join(own)}), so its threshold is not a prediction.")
        try:
            threshold = model.predict(features)
            if (beyond := model.extrapolation(features)) is not None:
                caveats.append(f"It extrapolates: {beyond}.")
        except ValueError as error:
            reason = str(error)

    def gains(threshold: float | None) -> tuple[float | None, float | None, float | None]:
        if threshold is None:
            return None, None, None
        area = curves.composed_area(below, above, threshold)
        return area, curves.gain(area, curves.area(above)), curves.gain(area, curves.area(below))

    area, over_taylor, over_hgnp = gains(threshold)
    hindsight = lowest_crossing(below, above)
    return ComposedHybrid(
        hgnp=hgnp,
        taylor=taylor,
        source="given" if model is None else "paper" if choice == "paper" else "fit",
        samples=() if model is None else tuple(sample.name for sample in model.samples),
        left_out=() if model is None else tuple(sample.name for sample in model.left_out),
        caveats=tuple(caveats),
        threshold=threshold,
        reason=reason,
        area=area,
        over_taylor=over_taylor,
        over_hgnp=over_hgnp,
        hindsight=hindsight,
        hindsight_over_taylor=gains(hindsight)[1],
        hindsight_over_hgnp=gains(hindsight)[2],
    )


def lowest_crossing(hgnp: Curve, taylor: Curve) -> float | None:
    """The lowest crossing, if HGNP is ahead at all smaller κ."""
    crossed = curves.crossings(hgnp, taylor)
    return crossed[-1].kept if crossed and crossed[-1].ahead_below else None


def formula(model: hybrid.Model) -> str:
    """The threshold in percent, from features in their own units."""
    terms = "".join(
        f" {'−' if slope < 0 else '+'} {abs(100 * slope):.5g} · {name}" for name, slope in model.coefficients.items()
    )
    return f"{100 * model.intercept:.6g}{terms} (in percent, clipped to [0, 100], refused outside the range of its features)"


def _gains(over_taylor: float | None, over_hgnp: float | None) -> str:
    taylor, hgnp = ("not defined" if gain is None else f"{gain:+.2f} %" for gain in (over_taylor, over_hgnp))
    return f"its area is {taylor} against Taylor's and {hgnp} against HGNP's".replace("-", "−")
