"""`Recipe`: the settings of a run, validated on construction.

Algorithm 2 in the paper's letters: E1 `warmup_epochs`, E2 `prune_every`, N `neurons_per_round`, κ̄ `keep`, E3
`finetune_epochs`; μ `mu` (and `score_mu`), B `bound`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from hgnp.curvature.choices import ALLOWED, Bundle, choose
from hgnp.curvature.validation import check_schedule
from hgnp.errors import InputError, InputTypeError, check_renamed, did_you_mean, refuse_renamed
from hgnp.pruning.limits import LIMITS, check_limit
from hgnp.pruning.selection import CouplingMode

Quantity = Literal["params", "neurons", "macs"]
Method = Literal["hgnp", "taylor", "hybrid", "l1", "l2", "bn_scale", "geometric_median", "random", "sam"]
PruneUnit = Literal["epochs", "steps"]
Schedule = Literal["constant", "steps", "cosine", "one_cycle"]
Anneal = Literal["finetune", "run"]
SchedulerInterval = Literal["epoch", "step"]
Precision = Literal["auto", "float32", "bf16", "fp16"]
Execution = Literal["auto", "eager"]
Measure = Literal["auto", "full", "none"]

METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained, pruned and fine-tuned. Immutable: `dataclasses.replace` returns a changed copy.

    After `warmup_epochs`, neurons are removed before every epoch whose number is a multiple of `prune_every` (with
    prune_unit="steps": before every step whose number is), until the target is met. That epoch is completed, and
    `finetune_epochs` more follow.

    >>> import dataclasses, hgnp
    >>> recipe = hgnp.Recipe(keep=0.10, warmup_epochs=5, neurons_per_round=50, finetune_epochs=5)
    >>> baseline = dataclasses.replace(recipe, method="taylor")
    >>> baseline.method, baseline.keep
    ('taylor', 0.1)

    Attributes:
        keep: The fraction of the `target` quantity to keep: the paper's κ̄. With 1 nothing is pruned.
        target: The quantity that `keep` refers to: "params" (as in the paper), "neurons" (the removable ones) or "macs".
        snapshots: Fractions between `keep` and 1. For each that pruning reaches, a copy of the network is pruned to that
            fraction, or as little below it as whole neurons allow, and fine-tuned separately for `finetune_epochs`; the run
            itself is not affected.
        method: "hgnp" (the flatness penalty in the training loss, and scores of the loss with that penalty); "taylor" (plain
            training; scores are first-order Taylor estimates of the change in loss when a neuron is removed); "hybrid"
            (Taylor, then HGNP once `threshold` is reached); "l1", "l2", "bn_scale", "geometric_median" or "random" (plain
            training, another score); "sam" (Taylor scores, trained by sharpness-aware minimization).
        threshold: For method "hybrid" only. The run trains and scores by Taylor while more than this fraction of the
            parameters is left (the paper's κ, whatever the target is), by HGNP from then on. 1 is HGNP throughout, 0 Taylor.

        warmup_epochs: Epochs before the first removal. 0 for a network that is already trained.
        prune_every: Epochs, or steps (see `prune_unit`), between two rounds of pruning.
        prune_unit: "epochs" or "steps". The paper's Taylor baseline on AlexNet removes one neuron every 30 steps.
        neurons_per_round: Neurons to remove per round. A channel that is coupled through five layers counts five times. The
            last round removes only as many as the target needs.
        finetune_epochs: Epochs after the one in which the target was met.
        coupling: "coupled": layers whose outputs are added lose the same channels. "paper": they lose the same number of
            channels, each its own.
        floor: Minimum number of neurons that every layer keeps. This and the next two may be set by layer, as in
            {"features.*": 8, "*": 2}: the first name or pattern (`*`, `?`, `[…]`) that matches applies.
        round_to: Pruned layers end at a width that is a multiple of this, such as 8 for tensor cores.
        max_removed: The largest fraction of a layer's initial neurons that may be removed.
        approximate: Whether channels that a norm mixes (LayerNorm, GroupNorm) may be removed, which changes the others.
        score_batches: Mini-batches that the scores of a round are computed on.

        mu: Weight μ of the flatness penalty in training.
        score_mu: Weight of the flatness penalty in the scores. None: the same as `mu`.
        mu_warmup_epochs: Epochs over which μ rises linearly from 0, counted from the start or from the hybrid's switch.
        bound: The bound B: curvature up to B is not penalised.
        flatness: "default", "paper", or a mapping of `Flatness`'s named choices, such as {"curvature": "hessian"}.
        penalty_every: k: the penalty is part of every k-th training step only, with k times the weight. Its mean over steps is
            the same, and the other steps cost as much as plain ones.
        refresh_every: Steps with the penalty between two refreshes of the penalised direction v. None: 8 if v comes from the
            last batch, 2 with direction_over="network" (1 if `penalty_every` is 2 or more), 1 with
            direction_from="this_batch". (`Flatness` itself refreshes every step by default.)
        skip_inactive: Whether the flatness penalty is skipped until the next refresh if it is inactive (curvature within the
            bound) in the first step along a new v. None: True if v comes from the last batch, False with
            direction_from="this_batch".
        rho: Radius ρ of method "sam".

        lr: Learning rate of the default optimizer, SGD.
        momentum: Momentum of the default optimizer.
        weight_decay: Weight decay of the default optimizer.
        nesterov: Whether the default optimizer uses Nesterov momentum.
        schedule: The learning-rate schedule: "constant", "steps", "cosine" or "one_cycle". None: "cosine", or "constant" if
            `prune` gets a scheduler.
        anneal: What the schedule spans. "finetune": the fine-tuning; until then the learning rate stays at its peak. "run":
            the whole run, whose length is re-estimated every epoch.
        lr_steps: The positions, as fractions of the schedule, at which "steps" multiplies the learning rate by `lr_factor`.
        lr_factor: The factor of "steps".
        lr_final: The final learning rate of "cosine" and "one_cycle", as a fraction of the peak.
        scheduler_interval: When a scheduler that `prune` gets is stepped: after every "epoch", or after every "step" of the
            optimizer. None: "step" for OneCycleLR and CyclicLR, as PyTorch documents them, "epoch" for any other.
        clip_norm: Largest norm of the gradients of the optimizer's parameters; larger ones are scaled down to it. None: no
            clipping.

        precision: "float32"; "bf16" or "fp16" for mixed precision by autocast, "fp16" with a gradient scaler. "auto": "bf16"
            on a GPU that supports it, else "float32".
        execution: "auto": on a GPU, CUDA graphs of whole steps and channels-last images; on a CPU, channels last for networks
            with a convolution of 256 channels or more. "eager": operation by operation, in the network's own memory format.
        measure: Time limit for measuring the sharpness and latency of the full and the pruned network. "auto": 1 % of the
            run's time so far for each, and at least 0.25 s; a number that takes longer is left out. "full": no limit. "none":
            they are not measured.
        validate_every: Epochs between two validations, where validation takes long. The last epoch is validated in any case;
            loss and metric of the others are None. ReduceLROnPlateau is stepped after validated epochs.
        checkpoint_every: Epochs between two checkpoints of a run with a folder. Larger values save time where an epoch is
            short and the network large. The last epoch has one in any case.
        seed: Seeds all random number generators at the start of the run. None: they are not seeded.
    """

    keep: float
    target: Quantity = "params"
    snapshots: tuple[float, ...] = ()
    method: Method = "hgnp"
    threshold: float | None = None

    warmup_epochs: int = 5
    prune_every: int = 1
    prune_unit: PruneUnit = "epochs"
    neurons_per_round: int = 100
    finetune_epochs: int = 5
    coupling: CouplingMode = "coupled"
    floor: int | Mapping[str, int] = 1
    round_to: int | Mapping[str, int] = 1
    max_removed: float | Mapping[str, float] = 1.0
    approximate: bool = False
    score_batches: int = 1

    mu: float = 1e-3
    score_mu: float | None = None
    mu_warmup_epochs: int = 0
    bound: float = 0.5
    flatness: Bundle | Mapping[str, str] = "default"
    penalty_every: int = 1
    refresh_every: int | None = None
    skip_inactive: bool | None = None
    rho: float = 0.05

    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    schedule: Schedule | None = None
    anneal: Anneal = "finetune"
    lr_steps: tuple[float, ...] = (0.5, 0.75)
    lr_factor: float = 0.1
    lr_final: float = 0.0
    scheduler_interval: SchedulerInterval | None = None
    clip_norm: float | None = None

    precision: Precision = "auto"
    execution: Execution = "auto"
    measure: Measure = "auto"
    validate_every: int = 1
    checkpoint_every: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, value := _plain(value))
            if field.name in _CHECKS:
                expected, fits = _CHECKS[field.name]
                if not fits(value):
                    raise InputError(f"{field.name} must be {expected}, got {value!r}")
            if field.name in LIMITS:
                check_limit(field.name, value)
        if not _distinct_between(self.keep, self.snapshots):
            got = list(self.snapshots) if isinstance(self.snapshots, tuple) else self.snapshots
            raise InputError(
                f"snapshots must be a list of distinct fractions above keep ({self.keep:g}) and below 1, got {got!r}; the run "
                "itself ends fine-tuned at keep"
            )
        object.__setattr__(self, "snapshots", tuple(sorted(self.snapshots, reverse=True)))
        bundle, choices = self.flatness_choices
        try:
            chosen = choose(bundle, **{name: choices.get(name) for name in ALLOWED})
        except ValueError as error:
            raise InputError(str(error) if str(error).startswith("flatness") else f"flatness.{error}") from None
        lagged = chosen.direction_from == "last_batch"
        check_schedule(self.penalty_every, self.refresh_every or 1, bool(self.skip_inactive), lagged=lagged)
        if self.nesterov and not self.momentum:
            raise InputError("momentum must be > 0 with nesterov=True, got 0")
        if self.method == "hybrid" and self.threshold is None:
            raise InputError(
                "threshold must be a fraction from 0 to 1 with method 'hybrid', got None; set it, such as 0.48"
            )
        if self.method != "hybrid" and self.threshold is not None:
            raise InputError(
                f"threshold must be None with method {self.method!r}, got {self.threshold!r}; only 'hybrid' switches"
            )

    def __hash__(self) -> int:
        return hash(tuple(frozenset(v.items()) if isinstance(v, Mapping) else v for v in vars(self).values()))

    def uses_penalty(self, kept: float) -> bool:
        """Whether training and scores use the flatness penalty.

        Args:
            kept: The fraction of the parameters that is left.
        """
        return self.method == "hgnp" or (self.threshold is not None and kept <= self.threshold)

    @property
    def scoring_mu(self) -> float:
        """Weight of the flatness penalty in the scores, where they use it."""
        if self.method not in ("hgnp", "hybrid"):
            return 0.0
        return self.mu if self.score_mu is None else self.score_mu

    @property
    def training_mu(self) -> float:
        """Weight of the flatness penalty in training, where it is used."""
        return self.mu if self.method in ("hgnp", "hybrid") else 0.0

    @property
    def flatness_choices(self) -> tuple[str, dict[str, Any]]:
        """The bundle ("default" or "paper") and the choices by name that replace its own, as `Flatness` takes them."""
        if isinstance(self.flatness, str):
            return self.flatness, {}
        choices = dict(self.flatness)
        bundle = choices.pop("flatness", "default")
        check_renamed(choices, ALLOWED, "flatness")
        for name in choices:
            if name not in ALLOWED:
                raise InputError(f"flatness: key must be a known one, got {name!r}{did_you_mean(name, ALLOWED)}")
        return bundle, choices

    def resolved(self, *, scheduler: bool = False) -> "Recipe":
        """The recipe with every None replaced by the default that it stands for. `scheduler`: whether `prune` gets one."""
        bundle, choices = self.flatness_choices
        chosen = choose(bundle, **choices)
        lagged = chosen.direction_from == "last_batch"
        every = 8 if lagged else 1
        if chosen.direction_over == "network":
            every = 2 if self.penalty_every == 1 else 1
        return dataclasses.replace(
            self,
            refresh_every=self.refresh_every or every,
            skip_inactive=lagged if self.skip_inactive is None else self.skip_inactive,
            schedule=self.schedule or ("constant" if scheduler else "cosine"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Every field, in types that JSON and YAML can hold."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """The inverse of `as_dict`; fields other than `keep` may be missing."""
        if not isinstance(values, Mapping):
            raise InputTypeError(f"recipe must be a mapping of field names to values, got {type(values).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        check_renamed(values, names, "recipe")
        for name in values:
            if name not in names:
                raise InputError(f"recipe: key must be a known one, got {name!r}{did_you_mean(name, names)}")
        if "keep" not in values:
            raise InputError(
                "recipe must have the field keep, the fraction of the parameters to keep, got none; set keep=0.1"
            )
        return cls(**values)


Recipe.__init__ = refuse_renamed(Recipe.__init__)  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, which JSON can hold; lists as tuples; mappings as dictionaries of their own."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _distinct_between(keep: float, values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and all(_number(value) and keep < value < 1 for value in values)
        and len(set(values)) == len(values)
    )


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(map(repr, names)) if len(names) < 3 else f"one of {', '.join(map(repr, names))}"


def _one_of(kind: Any) -> tuple[str, Any]:
    """A check for the values of a Literal type."""
    names = get_args(kind)
    return _listed(names), lambda value: isinstance(value, str) and value in names


def _or_none(check: tuple[str, Any]) -> tuple[str, Any]:
    expected, fits = check
    return f"None or {expected}", lambda value: value is None or fits(value)


_COUNT = ("an integer ≥ 1", lambda value: _integer(value) and value >= 1)
_EPOCHS = ("an integer ≥ 0", lambda value: _integer(value) and value >= 0)
_WEIGHT = ("a finite number ≥ 0", lambda value: _number(value) and value >= 0)
_RATE = ("a finite number > 0", lambda value: _number(value) and value > 0)
_FRACTION = ("a fraction ≥ 0 and ≤ 1", lambda value: _number(value) and 0 <= value <= 1)
_FLAG = ("True or False", lambda value: isinstance(value, bool))
_CHECKS: dict[str, tuple[str, Any]] = {  # field → what must hold, in words and as a predicate
    "keep": ("a fraction > 0 and ≤ 1", lambda value: _number(value) and 0 < value <= 1),
    "target": _one_of(Quantity),
    "method": _one_of(Method),
    "threshold": _or_none(_FRACTION),
    "warmup_epochs": _EPOCHS,
    "prune_every": _COUNT,
    "prune_unit": _one_of(PruneUnit),
    "neurons_per_round": _COUNT,
    "finetune_epochs": _EPOCHS,
    "coupling": _one_of(CouplingMode),
    "approximate": _FLAG,
    "score_batches": _COUNT,
    "mu": _WEIGHT,
    "score_mu": _or_none(_WEIGHT),
    "mu_warmup_epochs": _EPOCHS,
    "bound": ("a finite number", _number),
    "flatness": ("'default', 'paper' or a mapping of named choices", lambda value: isinstance(value, str | Mapping)),
    "penalty_every": _COUNT,
    "refresh_every": _or_none(_COUNT),
    "skip_inactive": _or_none(_FLAG),
    "rho": _RATE,
    "lr": _RATE,
    "momentum": ("a number ≥ 0 and < 1", lambda value: _number(value) and 0 <= value < 1),
    "weight_decay": _WEIGHT,
    "nesterov": _FLAG,
    "schedule": _or_none(_one_of(Schedule)),
    "anneal": _one_of(Anneal),
    "lr_steps": (
        "a list of rising fractions > 0 and < 1",
        lambda value: isinstance(value, tuple)
        and all(_number(step) and 0 < step < 1 for step in value)
        and list(value) == sorted(set(value)),
    ),
    "lr_factor": _RATE,
    "lr_final": _FRACTION,
    "scheduler_interval": _or_none(_one_of(SchedulerInterval)),
    "precision": _one_of(Precision),
    "execution": _one_of(Execution),
    "clip_norm": _or_none(_RATE),
    "measure": _one_of(Measure),
    "validate_every": _COUNT,
    "checkpoint_every": _COUNT,
    "seed": _or_none(("an integer from 0 to 4294967295", lambda value: _integer(value) and 0 <= value < 2**32)),
}  # fmt: skip
