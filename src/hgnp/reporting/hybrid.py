"""The hybrid: Taylor's network above a threshold κ, HGNP's below it; the threshold is predicted from data and network.

The paper regresses the threshold on nine features of data and architecture with a Lasso over its four experiments, `PAPER`
here; a user's own pairs of runs are further samples. `fit` is that Lasso (standardised features, penalty by
leave-one-out); `fit(features=PAPERS_CHOICE)` is least squares on the two features the paper ended with. Both clip
their prediction to [0, 1] and refuse features outside the range of the samples. An experiment that is itself among the samples
is predicted from the others (`fit_without`). `limitations` lists what the model cannot tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linprog
from sklearn.linear_model import LassoCV, LinearRegression, lasso_path
from sklearn.model_selection import LeaveOneOut
from sklearn.preprocessing import StandardScaler

from hgnp.errors import InputError

FEATURES = (
    "train_samples",
    "val_samples",
    "image_side",
    "classes",
    "conv_layers",
    "linear_layers",
    "parameters",
    "mean_kernel",
    "kernels",
)
PAPERS_CHOICE = ("classes", "train_samples")
IDENTITY = ("train_samples", "classes", "conv_layers", "linear_layers", "kernels")
"""The features that tell datasets and networks apart, whatever the size of images and the choice of validation data."""
SMALLEST = 1e-2  # where the Lasso's path ends, as a fraction of the penalty at which it is empty


@dataclass(frozen=True)
class Sample:
    """One experiment: its features, and the κ below which HGNP was ahead of Taylor."""

    name: str
    features: Mapping[str, float]
    threshold: float


def _sample(name: str, threshold: float, *values: float) -> Sample:
    return Sample(name, dict(zip(FEATURES, values, strict=True)), threshold)


# Thresholds are those of the paper's table, which are its regression's predictions; the crossings it states in words differ.
# Architectures: AlexNet and, at 160 px, ResNet-18 as in torchvision, the classifier made for the dataset's classes. For
# CIFAR-10, which the paper does not spell out, the usual forms for 32 px: ResNet-18 with a 3×3 stem, VGG-16-BN with biases in
# its convolutions and one linear layer. Convolutions of shortcuts count. mean_kernel is the mean side over convolutions,
# kernels the sum of their output channels. tests/reporting/test_hybrid.py counts all of it layer by layer.
PAPER = (
    _sample("AlexNet / Flowers-102 (paper)", 0.910, 2040, 6149, 224, 102, 5, 3, 57_421_734, 5.0, 1152),
    _sample("ResNet-18 / CIFAR-10 (paper)", 0.878, 50_000, 10_000, 32, 10, 20, 1, 11_173_962, 2.7, 4800),
    _sample("ResNet-18 / Birds (paper)", 0.480, 5994, 5794, 160, 200, 20, 1, 11_279_112, 2.9, 4800),
    _sample("VGG-16-BN / CIFAR-10 (paper)", 0.878, 50_000, 10_000, 32, 10, 13, 1, 14_728_266, 3.0, 4224),
)


@dataclass(frozen=True)
class PathSegment:
    """A segment of the Lasso path: at this penalty and below, these features have non-zero coefficients."""

    penalty: float
    features: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A linear prediction of the threshold κ: intercept + Σ coefficient · feature, in the features' own units."""

    samples: tuple[Sample, ...]
    intercept: float
    coefficients: Mapping[str, float]
    """The features with a non-zero coefficient."""
    ranges: Mapping[str, tuple[float, float]]
    """Of those features, over the samples and those left out."""
    least_squares: bool
    """Whether the model is least squares on given features rather than the Lasso over all features."""
    penalty: float | None
    """The Lasso's, chosen by leave-one-out."""
    path: tuple[PathSegment, ...]
    left_out: tuple[Sample, ...] = ()
    """Experiments whose features count as covered but whose thresholds are not used."""

    @cached_property
    def error(self) -> float:
        """Leave-one-out root mean square error in κ, feature selection included."""
        names = tuple(self.coefficients) if self.least_squares else FEATURES
        return _left_out(*_arrays(self.samples, names), _least_squares if self.least_squares else _lasso)

    @property
    def error_of_mean(self) -> float:
        """The same error of the mean of the other thresholds, which uses no feature."""
        return _left_out(*_arrays(self.samples, ()), lambda x, y: (float(y.mean()), np.zeros(x.shape[1]), None))

    def predict(self, features: Mapping[str, Any]) -> float:
        """The threshold κ in [0, 1]. ValueError, with the range, for a feature that is unknown or out of range."""
        total = self.intercept
        for name, coefficient in self.coefficients.items():
            value, (low, high) = features.get(name), self.ranges[name]
            if value is None:
                raise InputError(f"{name} must be known to predict the threshold, got none")
            if not low <= value <= high:
                raise InputError(
                    f"{name} must be from {low:g} to {high:g}, which past experiments cover, got {value:g}"
                )
            total += coefficient * value
        return min(max(total, 0.0), 1.0)

    def extrapolation(self, features: Mapping[str, Any]) -> str | None:
        """The feature that lies within the range of all experiments but outside that of the fitted ones; None if none does."""
        for name in self.coefficients:
            known = [sample.features[name] for sample in self.samples]
            if not min(known) <= features[name] <= max(known):
                return f"{name} is {features[name]:g} here and {min(known):g} to {max(known):g} there"
        return None

    def surrounded(self, features: Mapping[str, Any]) -> bool:
        """Whether `features` lie between the samples (in their convex hull), and not only within each feature's range."""
        known = np.array([[sample.features[name] for sample in self.samples] for name in self.coefficients])
        if not known.size:
            return True
        scale = np.ptp(known, axis=1)
        point = np.array([features[name] for name in self.coefficients]) / scale
        rows = np.vstack([known / scale[:, None], np.ones(len(self.samples))])
        return bool(linprog(np.zeros(len(self.samples)), A_eq=rows, b_eq=[*point, 1.0], bounds=(0, 1)).success)


def usable(sample: Sample) -> str | None:
    """None, or why the sample cannot be used in the fit."""
    missing = [name for name in FEATURES if sample.features.get(name) is None]
    return f"{', '.join(missing)} not known" if missing else None


def same_experiment(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two experiments have the same dataset and network, judged by their features."""
    return all(one.get(name) is not None and one.get(name) == other.get(name) for name in IDENTITY)


def fit_without(features: Mapping[str, Any], samples: Sequence[Sample]) -> Model:
    """The Lasso for an experiment with `features`, without the samples that are that experiment itself."""
    own = [sample for sample in samples if same_experiment(sample.features, features)]
    return fit([sample for sample in samples if sample not in own], left_out=own)


def fit(
    samples: Sequence[Sample] = PAPER, *, features: Sequence[str] | None = None, left_out: Sequence[Sample] = ()
) -> Model:
    """The Lasso over all features of `samples`; with `features`, least squares on those alone.

    `left_out` are experiments to predict, not to fit on; they widen the accepted range of features.
    """
    if len(samples) < 3:
        raise InputError(f"samples must be at least 3 experiments, got {len(samples)}")
    for sample in (*samples, *left_out):
        if (reason := usable(sample)) is not None:
            raise InputError(f"sample {sample.name!r} must have every feature, got {reason}")
    names = FEATURES if features is None else tuple(features)
    inputs, thresholds = _arrays(samples, names)
    intercept, slopes, penalty = (_lasso if features is None else _least_squares)(inputs, thresholds)
    used = {name: float(slope) for name, slope in zip(names, slopes, strict=True) if slope != 0}
    columns = {name: np.array([sample.features[name] for sample in (*samples, *left_out)]) for name in used}
    return Model(
        samples=tuple(samples),
        intercept=intercept,
        coefficients=used,
        ranges={name: (float(column.min()), float(column.max())) for name, column in columns.items()},
        least_squares=features is not None,
        penalty=penalty,
        path=_path(inputs, thresholds, names) if features is None else (),
        left_out=tuple(left_out),
    )


def _arrays(samples: Sequence[Sample], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.array([[sample.features[name] for name in names] for sample in samples], dtype=float)
    return inputs, np.array([sample.threshold for sample in samples])


def _lasso(inputs: np.ndarray, thresholds: np.ndarray) -> tuple[float, np.ndarray, float | None]:
    scaler = StandardScaler().fit(inputs)
    if np.ptp(thresholds) == 0:
        return float(thresholds[0]), np.zeros(inputs.shape[1]), None
    lasso = LassoCV(cv=LeaveOneOut(), eps=SMALLEST, max_iter=1_000_000).fit(scaler.transform(inputs), thresholds)
    slopes = _without_noise(lasso.coef_) / scaler.scale_
    return float(lasso.intercept_ - slopes @ scaler.mean_), slopes, float(lasso.alpha_)


def _without_noise(standard: np.ndarray) -> np.ndarray:
    """Coordinate descent leaves 1e-17 for collinear features."""
    return np.where(np.abs(standard) > 1e-9, standard, 0.0)


def _least_squares(inputs: np.ndarray, thresholds: np.ndarray) -> tuple[float, np.ndarray, float | None]:
    scaler = StandardScaler().fit(inputs)
    line = LinearRegression().fit(scaler.transform(inputs), thresholds)
    slopes = line.coef_ / scaler.scale_
    return float(line.intercept_ - slopes @ scaler.mean_), slopes, None


def _left_out(inputs: np.ndarray, thresholds: np.ndarray, solve: Any) -> float:
    errors = []
    for rest, one in LeaveOneOut().split(inputs):
        intercept, slopes, _ = solve(inputs[rest], thresholds[rest])
        errors.append(float(np.clip(intercept + inputs[one[0]] @ slopes, 0, 1) - thresholds[one[0]]))
    return float(np.sqrt(np.mean(np.square(errors))))


def _path(inputs: np.ndarray, thresholds: np.ndarray, names: Sequence[str]) -> tuple[PathSegment, ...]:
    standard = StandardScaler().fit_transform(inputs)
    if np.ptp(thresholds) == 0:
        return ()
    penalties, slopes, _ = lasso_path(standard, thresholds - thresholds.mean(), eps=SMALLEST, max_iter=1_000_000)
    steps: list[PathSegment] = []
    for penalty, column in zip(penalties, _without_noise(slopes).T, strict=True):
        chosen = tuple(name for name, slope in zip(names, column, strict=True) if slope != 0)
        if not steps or chosen != steps[-1].features:
            steps.append(PathSegment(float(penalty), chosen))
    return tuple(steps)


def sample_counts(model: Model) -> str:
    """The numbers of experiments, distinct inputs and coefficients, in a sentence."""
    used = tuple(model.coefficients)
    from_paper = sum(sample in PAPER for sample in model.samples)
    about = f"{len(model.samples)} experiments, {from_paper} of them the paper's"
    if not used:
        return f"{about}; no feature is used."
    distinct = len({tuple(sample.features[name] for name in used) for sample in model.samples})
    return (
        f"{about}; in the features used ({', '.join(used)}) they have {distinct} distinct inputs, for "
        f"{len(used) + 1} coefficients" + (": any thresholds would fit exactly." if distinct <= len(used) + 1 else ".")
    )


def limitations(model: Model) -> tuple[str, ...]:
    """Why the threshold is uncertain, in sentences."""
    used = tuple(model.coefficients)
    from_paper = sum(sample in PAPER for sample in model.samples)
    sentences = [
        sample_counts(model),
        f"The leave-one-out error is {100 * model.error:.0f} points of κ (root mean square); "
        f"that of the mean of the other thresholds is {100 * model.error_of_mean:.0f}."
        + (" So the features show no benefit." if model.error >= model.error_of_mean else ""),
    ]
    if not used:
        sentences.append(
            "No feature is selected, so the prediction is the mean of the known thresholds for every dataset."
        )
    unseen = [name for name in PAPERS_CHOICE if all(name not in step.features for step in model.path)]
    if model.path and unseen:
        sentences.append(f"The Lasso selects at no penalty {' or '.join(unseen)}, which the paper uses.")
    if from_paper:
        sentences.append(
            "The paper's thresholds are its regression's own predictions; the crossings it states in words (AlexNet about 91, "
            "ResNet-18 85, VGG-16 90, Birds 14 %) differ, and its p-values do not follow from either. Its two features, "
            "classes and training samples, have three distinct inputs for three coefficients: any thresholds would fit."
        )
    return tuple(sentences)


@dataclass(frozen=True)
class Recommendation:
    """Which method to use for a new dataset; `threshold` is None where no prediction can be made, `reason` says why."""

    threshold: float | None
    reason: str | None
    sentences: tuple[str, ...]


def recommend(features: Mapping[str, Any], model: Model | None = None) -> Recommendation:
    """Taylor or HGNP, at which κ, for data and a network with `features` (as in run.json); by default as the Lasso says."""
    model = fit() if model is None else model
    below = [sample.threshold for sample in model.samples]
    known = f"In the {len(below)} experiments known, HGNP was ahead below κ of {min(below):.0%} to {max(below):.0%}."
    try:
        threshold = model.predict(features)
    except ValueError as error:
        advice = (
            f"Below κ = {min(below):.0%} HGNP is the better guess, above {max(below):.0%} Taylor; in between run both."
        )
        return Recommendation(None, str(error), (f"No threshold is predicted: {error}.", known, advice))
    sentences = [
        f"Use Taylor above κ = {threshold:.0%} and HGNP below it.",
        f"Take it as {threshold:.0%} ± {100 * model.error:.0f} points: near it, run both and compare.",
        known,
    ]
    if not model.surrounded(features):
        sentences.append(
            "Each feature is within its range, but no past experiments lie around this combination of them."
        )
    return Recommendation(threshold, None, (*sentences, *limitations(model)))
