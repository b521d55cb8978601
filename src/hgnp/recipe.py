"""`Recipe`: what a user sets for a run, checked when it is made.

Algorithm 2 in the paper's letters: E1 `warmup_epochs`, E2 `prune_every`, N `neurons_per_round`, κ̄ `keep`, E3
`finetune_epochs`; μ `mu` (and `score_mu`), B `bound`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hgnp.curvature.choices import ALLOWED, choose
from hgnp.messages import check_renamed, meant, refuse_renamed

METHODS = ("hgnp", "taylor", "hybrid", "l1", "l2", "bn_scale", "geometric_median", "random", "sam")
SCHEDULES = ("constant", "steps", "cosine", "one_cycle")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained, pruned and fine-tuned. Immutable; `dataclasses.replace` makes a changed one.

    A run prunes before epoch e when e ≥ warmup_epochs and e is a multiple of prune_every, until the target is met; that epoch
    is completed and finetune_epochs more follow.
    """

    keep: float
    """The fraction to be left of what `target` counts: the paper's κ̄. With 1 nothing is pruned."""
    target: str = "params"
    """What `keep` is a fraction of: "params" (the paper's), "neurons" (those that can be removed) or "macs"."""
    snapshots: tuple[float, ...] = ()
    """Fractions of what `target` counts, between `keep` and 1. A copy of the network is taken after the epoch in which a round
    comes down to one of them, and fine-tuned by itself for `finetune_epochs`; the run goes on as if there were none."""
    method: str = "hgnp"
    """"hgnp", "taylor", "hybrid" (Taylor, then HGNP from `threshold` on), "l1", "l2", "bn_scale", "geometric_median" or
    "random" (plain training, another score), or "sam" (Taylor scores, trained by sharpness-aware minimisation)."""
    threshold: float | None = None
    """Where method "hybrid" switches: it trains and scores by Taylor while more than this fraction of the parameters is left
    (the paper's κ, whatever `target` counts), by HGNP from then on. 1 is HGNP throughout, 0 Taylor."""

    warmup_epochs: int = 5
    """Epochs before the first neuron goes. 0 for a network that is trained already."""
    prune_every: int = 1
    """Epochs, or steps (see `prune_unit`), from one round of pruning to the next."""
    prune_unit: str = "epochs"
    """"epochs" or "steps". The Taylor baseline removes a neuron every so many steps."""
    neurons_per_round: int = 100
    """Neurons of single layers in a round; a channel that runs through five layers counts five. The last round takes only what
    the target needs."""
    finetune_epochs: int = 5
    """Epochs after the one in which the target was met."""
    coupling: str = "coupled"
    """"coupled": layers that are added lose the same channels. "paper": the same number of channels, each its own."""
    floor: int = 1
    """Neurons that every layer keeps."""
    round_to: int = 1
    """Layers that lose neurons end at a multiple of this many: hardware likes multiples of 8. Neurons go in bundles then."""
    max_removed: float = 1.0
    """The largest share of a layer's neurons, of those it had at the start, that may be removed."""
    approximate: bool = False
    """Whether channels that a norm mixes (LayerNorm, GroupNorm) may go too."""
    score_batches: int = 1
    """Mini-batches that a round's scores are taken from."""

    mu: float = 1e-3
    """Weight of the flatness term in training."""
    score_mu: float | None = None
    """Its weight in the scores; None: as in training."""
    mu_warmup_epochs: int = 0
    """Epochs over which the term's weight in training rises from 0, from the start or from the hybrid's switch on."""
    bound: float = 0.5
    """Curvature up to this is not penalised."""
    flatness: str | Mapping[str, str] = "default"
    """"default", "paper", or a mapping of `Flatness`'s named choices, such as {"curvature": "hessian", "norm": "frozen"}."""
    refresh_every: int | None = None
    """Steps from one refresh of the penalised direction to the next. None: 8 if it lags by a batch, 1 in the paper's order."""
    skip_inactive: bool | None = None
    """Whether the term is skipped until the next refresh if curvature is within the bound in the first step along a new
    direction. None: True if the direction lags by a batch, False in the paper's order."""
    rho: float = 0.05
    """Radius of the "sam" method."""

    lr: float = 0.05
    """Learning rate of the SGD that is made when no optimizer is given."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    schedule: str | None = None
    """"constant", "steps", "cosine" or "one_cycle": how the learning rate changes over what `anneal` names. None: "cosine", or
    "constant" if `prune` is given a scheduler."""
    anneal: str = "finetune"
    """"finetune": the rate stays at its peak while neurons are removed and the schedule spans the fine-tuning. "run": the
    schedule spans the whole run, whose length is estimated anew at every round."""
    lr_steps: tuple[float, ...] = (0.5, 0.75)
    """Where "steps" multiplies the rate by `lr_factor`, as fractions of the schedule."""
    lr_factor: float = 0.1
    lr_final: float = 0.0
    """What "cosine" and "one_cycle" end at, as a fraction of the peak."""
    precision: str = "auto"
    """"float32", "bf16" or "fp16": mixed precision by autocast, "fp16" with a gradient scaler. "auto": "bf16" on a GPU that has
    it, "float32" elsewhere."""
    execution: str = "auto"
    """"auto": on a GPU, whole steps in CUDA graphs and pictures with their channels last; on a CPU, channels last for networks
    with a convolution of 256 channels or more. "measured": on a CPU, the memory format and the number of threads that are the
    fastest, timed before the first epoch; on a GPU as "auto". "eager": operation by operation, all as it is found."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm if theirs is larger."""
    measure: str = "auto"
    """Sharpness and latency of the full and of the pruned network. "auto": each within 1 % of the run's time so far, or 0.25 s;
    what takes longer is left out. "full": whatever it takes. "none": not at all."""
    seed: int | None = None
    """Seeds every random stream at the start of the run; None: they go on from where they are."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, value := tuple(value))
            if field.name in _CHECKS:
                expected, fits = _CHECKS[field.name]
                if not fits(value):
                    raise ValueError(f"{field.name}: {value!r} was given; {expected} would do")
        if not _distinct_between(self.keep, self.snapshots):
            raise ValueError(
                f"snapshots must be distinct fractions above keep ({self.keep:g}) and below 1, got {self.snapshots!r}; "
                "the run itself ends fine-tuned at keep"
            )
        object.__setattr__(self, "snapshots", tuple(sorted(self.snapshots, reverse=True)))
        if isinstance(self.flatness, Mapping):
            object.__setattr__(self, "flatness", dict(self.flatness))
        bundle, choices = self.flatness_choices
        try:
            choose(bundle, **{name: choices.get(name) for name in ALLOWED})
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith("flatness") else f"flatness.{error}") from None
        if self.method == "hybrid" and self.threshold is None:
            raise ValueError(
                "threshold must be a fraction from 0 to 1 with method 'hybrid', got None; set it, such as 0.48"
            )
        if self.method != "hybrid" and self.threshold is not None:
            raise ValueError(
                f"threshold must be None with method {self.method!r}, got {self.threshold!r}; only 'hybrid' switches"
            )
        if self.precision == "fp16" and self.method == "sam":
            raise ValueError(
                "precision: 'fp16' was given with method 'sam', whose step needs unscaled gradients; 'bf16' would do"
            )

    def uses_term(self, kept: float) -> bool:
        """Whether a network with this fraction of its parameters is trained and scored with the flatness term."""
        return self.method == "hgnp" or (self.threshold is not None and kept <= self.threshold)

    @property
    def scoring_mu(self) -> float:
        """The flatness term's weight in the scores, where they use it."""
        if self.method not in ("hgnp", "hybrid"):
            return 0.0
        return self.mu if self.score_mu is None else self.score_mu

    @property
    def training_mu(self) -> float:
        """The flatness term's weight in training, where it is used."""
        return self.mu if self.method in ("hgnp", "hybrid") else 0.0

    @property
    def flatness_choices(self) -> tuple[str, dict[str, Any]]:
        """The bundle and the choices by name, as `Flatness` takes them."""
        if isinstance(self.flatness, str):
            return self.flatness, {}
        choices = dict(self.flatness)
        bundle = choices.pop("flatness", "default")
        check_renamed(choices, "flatness")
        for name in choices:
            if name not in ALLOWED:
                raise ValueError(f"flatness: it has no choice {name!r}{meant(name, ALLOWED)}")
        return bundle, choices

    def resolved(self, *, scheduler: bool = False) -> "Recipe":
        """The recipe as a run uses it, with a value in place of each None that stands for one. `scheduler`: whether the run has
        a scheduler of the user's."""
        bundle, choices = self.flatness_choices
        lagged = choose(bundle, **choices).direction_from == "last_batch"
        return dataclasses.replace(
            self,
            refresh_every=self.refresh_every or (8 if lagged else 1),
            skip_inactive=lagged if self.skip_inactive is None else self.skip_inactive,
            schedule=self.schedule or ("constant" if scheduler else "cosine"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Every field, in types that JSON and YAML have."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        names = [field.name for field in dataclasses.fields(cls)]
        check_renamed(values, "recipe")
        for name in values:
            if name not in names:
                raise ValueError(f"recipe: there is no field {name!r}{meant(name, names)}")
        if "keep" not in values:
            raise ValueError("recipe: keep is missing; it says what fraction of the parameters is to be left")
        return cls(**values)


Recipe.__init__ = refuse_renamed(Recipe.__init__)  # type: ignore[method-assign]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _distinct_between(keep: float, values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and all(_number(value) and keep < value < 1 for value in values)
        and len(set(values)) == len(values)
    )


def _one_of(*names: str) -> tuple[str, Any]:
    return " or ".join(repr(name) for name in names), lambda value: value in names and isinstance(value, str)


_COUNT = ("a whole number of at least 1", lambda value: _whole(value) and value >= 1)
_EPOCHS = ("a whole number of at least 0", lambda value: _whole(value) and value >= 0)
_WEIGHT = ("a finite number of at least 0", lambda value: _number(value) and value >= 0)
_RATE = ("a finite number above 0", lambda value: _number(value) and value > 0)
_SWITCH = ("True or False", lambda value: isinstance(value, bool))
_CHECKS: dict[str, tuple[str, Any]] = {
    "keep": ("a fraction above 0 and up to 1", lambda value: _number(value) and 0 < value <= 1),
    "target": _one_of("params", "neurons", "macs"),
    "method": _one_of(*METHODS),
    "threshold": ("None or a fraction from 0 to 1", lambda value: value is None or (_number(value) and 0 <= value <= 1)),
    "warmup_epochs": _EPOCHS,
    "prune_every": _COUNT,
    "prune_unit": _one_of("epochs", "steps"),
    "neurons_per_round": _COUNT,
    "finetune_epochs": _EPOCHS,
    "coupling": _one_of("coupled", "paper"),
    "floor": _COUNT,
    "round_to": _COUNT,
    "max_removed": ("a number between 0 and 1", lambda value: _number(value) and 0 <= value <= 1),
    "approximate": _SWITCH,
    "score_batches": _COUNT,
    "mu": _WEIGHT,
    "score_mu": ("None or a finite number of at least 0", lambda value: value is None or (_number(value) and value >= 0)),
    "mu_warmup_epochs": _EPOCHS,
    "bound": ("any finite number", _number),
    "flatness": ("'default', 'paper' or a mapping of named choices", lambda value: isinstance(value, str | Mapping)),
    "refresh_every": ("None or a whole number of at least 1", lambda value: value is None or (_whole(value) and value >= 1)),
    "skip_inactive": ("None, True or False", lambda value: value is None or isinstance(value, bool)),
    "rho": _RATE,
    "lr": _RATE,
    "momentum": ("a number of at least 0 and below 1", lambda value: _number(value) and 0 <= value < 1),
    "weight_decay": _WEIGHT,
    "nesterov": _SWITCH,
    "schedule": (
        f"None, {' or '.join(map(repr, SCHEDULES))}", lambda value: value is None or value in SCHEDULES
    ),
    "anneal": _one_of("run", "finetune"),
    "lr_steps": (
        "fractions between 0 and 1, rising",
        lambda value: isinstance(value, tuple)
        and all(_number(step) and 0 < step < 1 for step in value)
        and list(value) == sorted(value),
    ),
    "lr_factor": _RATE,
    "lr_final": ("a fraction of at least 0 and at most 1", lambda value: _number(value) and 0 <= value <= 1),
    "precision": _one_of("auto", "float32", "bf16", "fp16"),
    "execution": _one_of("auto", "eager", "measured"),
    "clip_norm": ("None or a finite number above 0", lambda value: value is None or (_number(value) and value > 0)),
    "measure": _one_of("auto", "full", "none"),
    "seed": (
        "None or a whole number from 0 to 4294967295",
        lambda value: value is None or (_whole(value) and 0 <= value < 2**32),
    ),
}  # fmt: skip
