"""The paper's numbers and settings, transcribed from its source; every number occurs once.

Accuracies and κ are in percent, as printed. The curves of its figures are not available as
numbers; statements about them in its text are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

METHODS = {"hgnp": "HGNP", "taylor": "Taylor"}
LEAVES_OPEN: Any = object()
"""Marks a setting that the paper does not state."""


@dataclass(frozen=True)
class StatedTraining:
    """A row of Table 1, total training and pruning time, with the number of GPUs of each method from the text."""

    kept: float
    hardware: str
    hours: Mapping[str, float]
    gpus: Mapping[str, int]


@dataclass(frozen=True)
class StatedAreas:
    """A row of Table 4: gains in the area under accuracy against κ over Taylor's, in percent, and the hybrid's threshold κ."""

    hybrid: float
    hgnp: float
    threshold: float


@dataclass(frozen=True)
class StatedAccuracy:
    """An accuracy stated in the text, at κ."""

    method: str
    kept: float
    value: float


@dataclass(frozen=True)
class StatedGap:
    """HGNP's accuracy over Taylor's at κ, in percent of Taylor's; `at_least` if the text gives a lower bound."""

    kept: float
    value: float
    at_least: bool = False


@dataclass(frozen=True)
class StatedLead:
    """A statement that HGNP is more accurate at every κ up to `kept`; `words` paraphrase the text."""

    kept: float
    words: str


@dataclass(frozen=True)
class PaperExperiment:
    """One model on one dataset."""

    key: str
    """The name of its preset and of its study."""
    title: str
    figure: str
    model: str
    data: str
    start: Literal["random", "ImageNet"]
    fresh: tuple[str, ...]
    """The layers initialised at random although the rest is pretrained."""
    features: Mapping[str, int]
    data_args: Mapping[str, Any]
    hgnp: Mapping[str, Any]
    """Fields of `Recipe` as the paper states them; LEAVES_OPEN for what it does not state."""
    taylor: Mapping[str, Any]
    """The same for the Taylor baseline, where it differs."""
    training: StatedTraining
    areas: StatedAreas
    accuracies: tuple[StatedAccuracy, ...] = ()
    gaps: tuple[StatedGap, ...] = ()
    ahead: tuple[StatedLead, ...] = ()
    cropping: str = ""
    """Image preprocessing that the paper leaves open, and ours."""

    def recipe(self, method: str) -> dict[str, Any]:
        return {**COMMON, **self.hgnp, **(self.taylor if method == "taylor" else {})}


COMMON = {
    "target": "params",
    "prune_every": 5,
    "prune_unit": "epochs",
    "neurons_per_round": 100,
    "mu": 0.001,
    "mu_warmup_epochs": 0,
    "bound": 0.5,
    "momentum": 0.9,
    "nesterov": False,
    "score_batches": 1,
    "floor": 1,
    "round_to": 1,
    "max_removed": 1.0,
    "approximate": False,
    "clip_norm": None,
}
ONE_PER_EPOCH = {"neurons_per_round": 1, "prune_every": 1, "finetune_epochs": LEAVES_OPEN}

EXPERIMENTS = (
    PaperExperiment(
        key="alexnet-flowers",
        title="AlexNet / Flowers-102",
        figure="Figure 1",
        model="AlexNet",
        data="flowers102",
        start="ImageNet",
        fresh=("classifier.6",),
        features={"train_samples": 2040, "val_samples": 6149, "image_side": 224, "classes": 102},
        data_args={"batch": 32, "flip": True},
        hgnp={
            "keep": 0.35,
            "warmup_epochs": 5,
            "finetune_epochs": 50,
            "lr": 0.001,
            "weight_decay": 0.0001,
            "schedule": "constant",
        },
        taylor={
            "warmup_epochs": 20,
            "prune_every": 30,
            "prune_unit": "steps",
            "neurons_per_round": 1,
            "finetune_epochs": LEAVES_OPEN,
        },
        training=StatedTraining(35.1, "Tesla K80", {"hgnp": 57.3, "taylor": 3.8}, {"hgnp": 1, "taylor": 3}),
        areas=StatedAreas(9.33, 9.20, 91.0),
        accuracies=(
            StatedAccuracy("hgnp", 50, 78.9),
            StatedAccuracy("taylor", 50, 71.1),
            StatedAccuracy("hgnp", 40, 77.0),
            StatedAccuracy("taylor", 40, 60),
            StatedAccuracy("hgnp", 35, 75.5),
            StatedAccuracy("taylor", 35, 34),
        ),
        gaps=(StatedGap(35, 120),),
        ahead=(StatedLead(91, "Taylor works better down to around κ = 91 %, HGNP below"),),
        cropping="the central square of each image, resized to {side} px (left open by the paper)",
    ),
    PaperExperiment(
        key="resnet18-cifar10",
        title="ResNet-18 / CIFAR-10",
        figure="Figure 2",
        model="ResNet18",
        data="cifar10",
        start="random",
        fresh=(),
        features={"train_samples": 50_000, "val_samples": 10_000, "image_side": 32, "classes": 10},
        data_args={"batch": 128, "flip": True, "crop": 0, "cutout": 0},
        hgnp={
            "keep": 0.045,
            "warmup_epochs": 50,
            "finetune_epochs": 20,
            "lr": 0.1,
            "weight_decay": 0.0005,
            "schedule": LEAVES_OPEN,
            "coupling": "paper",
        },
        taylor={**ONE_PER_EPOCH, "warmup_epochs": 200},
        training=StatedTraining(4.5, "GeForce RTX 2080", {"hgnp": 121.0, "taylor": 10.7}, {"hgnp": 4, "taylor": 1}),
        areas=StatedAreas(0.47, 0.42, 87.8),
        ahead=(StatedLead(85, "HGNP outperforms consistently at κ = 85 % and below, not drastically"),),
    ),
    PaperExperiment(
        key="resnet18-birds",
        title="ResNet-18 / Birds",
        figure="Figure 3",
        model="ResNet18",
        data="cub200",
        start="ImageNet",
        fresh=("fc",),
        features={"train_samples": 5994, "val_samples": 5794, "image_side": 160, "classes": 200},
        data_args={"batch": 32, "flip": False, "resize": False},
        hgnp={
            "keep": 0.05,
            "warmup_epochs": 25,
            "finetune_epochs": 20,
            "lr": 0.001,
            "weight_decay": 0.0001,
            "schedule": "constant",
            "coupling": "paper",
        },
        taylor={**ONE_PER_EPOCH, "warmup_epochs": 60, "lr": 0.01},
        training=StatedTraining(5.0, "GeForce RTX 2080", {"hgnp": 129.9, "taylor": 27.3}, {"hgnp": 5, "taylor": 1}),
        areas=StatedAreas(0.08, -0.29, 48.0),
        accuracies=(
            StatedAccuracy("hgnp", 100, 70.5),
            StatedAccuracy("taylor", 100, 70.5),
            StatedAccuracy("hgnp", 5, 51.9),
            StatedAccuracy("taylor", 5, 49.0),
        ),
        gaps=(StatedGap(5, 6),),
        ahead=(StatedLead(14, "HGNP outperforms again at κ = 14 % and below"),),
        cropping="a central crop of {side} px (position left open by the paper)",
    ),
    PaperExperiment(
        key="vgg16-cifar10",
        title="VGG-16 / CIFAR-10",
        figure="Figure 4",
        model="VGG16",
        data="cifar10",
        start="random",
        fresh=(),
        features={"train_samples": 50_000, "val_samples": 10_000, "image_side": 32, "classes": 10},
        data_args={"batch": 128, "flip": True, "crop": 0, "cutout": 0},
        hgnp={
            "keep": 0.045,
            "warmup_epochs": 50,
            "finetune_epochs": 20,
            "lr": 0.1,
            "weight_decay": 0.0005,
            "schedule": LEAVES_OPEN,
        },
        taylor={**ONE_PER_EPOCH, "warmup_epochs": 200},
        training=StatedTraining(4.5, "GeForce RTX 2080", {"hgnp": 115.1, "taylor": 12.7}, {"hgnp": 4, "taylor": 1}),
        areas=StatedAreas(1.63, 1.59, 87.8),
        accuracies=(StatedAccuracy("hgnp", 10, 91.4), StatedAccuracy("taylor", 10, 87.3)),
        gaps=(StatedGap(5, 8, at_least=True),),
        ahead=(StatedLead(90, "HGNP outperforms at all κ below 90 %"),),
    ),
)
BY_KEY = {experiment.key: experiment for experiment in EXPERIMENTS}

ABLATION_KEPT = 58.0
"""Figure 5, AlexNet / Flowers-102: full HGNP is consistently better than both ablations below this κ."""

FULL, WEIGHTS, NEURONS = "full", "weight-pruned", "neuron-pruned"


@dataclass(frozen=True)
class StatedInference:
    """A row of Table 2 or 3: milliseconds of one mini-batch."""

    table: str
    experiment: str
    device: Literal["cpu", "cuda"]
    hardware: str
    network: str
    """FULL, WEIGHTS or NEURONS."""
    kept: float
    batch: int
    ms: float


K80, I5, RTX = ("cuda", "Tesla K80"), ("cpu", "3.4 GHz Intel Core i5"), ("cuda", "GeForce RTX 2080")


def _inference(table: str, experiment: str, rows: tuple[tuple[Any, ...], ...]) -> tuple[StatedInference, ...]:
    return tuple(StatedInference(table, experiment, *where, *rest) for where, *rest in rows)


INFERENCE = (
    *_inference(
        "Table 2",
        "alexnet-flowers",
        ((K80, FULL, 100.0, 5000, 913), (K80, WEIGHTS, 30.4, 5000, 808), (K80, NEURONS, 30.4, 5000, 570)),
    ),
    *_inference(
        "Table 2",
        "resnet18-cifar10",
        (
            (I5, FULL, 100.0, 128, 3437),
            (I5, WEIGHTS, 4.5, 128, 2402),
            (I5, NEURONS, 4.5, 128, 1013),
            (RTX, FULL, 100.0, 2000, 192),
            (RTX, WEIGHTS, 4.5, 2000, 206),
            (RTX, NEURONS, 4.5, 2000, 90),
        ),
    ),
    *_inference(
        "Table 2",
        "vgg16-cifar10",
        (
            (I5, FULL, 100.0, 128, 2251),
            (I5, WEIGHTS, 4.5, 128, 1709),
            (I5, NEURONS, 4.5, 128, 482),
            (RTX, FULL, 100.0, 2000, 132),
            (RTX, WEIGHTS, 4.5, 2000, 187),
            (RTX, NEURONS, 4.5, 2000, 39),
        ),
    ),
    *_inference(
        "Table 3",
        "vgg16-cifar10",
        (
            (I5, WEIGHTS, 3.0, 128, 1605),
            (I5, NEURONS, 14.4, 128, 1414),
            (RTX, WEIGHTS, 3.0, 2000, 184),
            (RTX, NEURONS, 14.4, 2000, 102),
        ),
    ),
)


@dataclass(frozen=True)
class EqualAccuracy:
    """Table 3's premise: the κ at which a network has `accuracy`, by its neuron pruning and by SNIP's weight pruning."""

    experiment: str = "vgg16-cifar10"
    accuracy: float = 92.0
    neurons: float = 14.4
    weights: float = 3.0


EQUAL = EqualAccuracy()
