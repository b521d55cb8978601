"""How runs deviate from the paper's settings, derived from run.json and config.yaml."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hgnp.curvature.choices import BUNDLES, Choices, choose
from hgnp.io.runs import OLD_SAVED_START, SAVED_START, Run
from hgnp.reporting import hybrid
from hgnp.reporting.compare import choices_of, config_settings, recipe_of
from hgnp.reporting.paper.reported import EXPERIMENTS, LEAVES_OPEN, METHODS, PaperExperiment

ASPECTS = ("network", "data", "start", "penalty", "schedule", "hardware", "seeds")
FAST = choose("default", kfac_approx="expand")
SCHEDULE = ("warmup_epochs", "prune_every", "prune_unit", "neurons_per_round", "finetune_epochs")
LABELS = {
    "keep": "target κ",
    "target": "target counted in",
    "warmup_epochs": "E1",
    "prune_every": "E2",
    "prune_unit": "E2 in",
    "neurons_per_round": "N",
    "finetune_epochs": "E3",
    "mu": "μ",
    "bound": "B",
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "schedule": "learning-rate schedule",
    "mu_warmup_epochs": "μ warm-up",
    "score_batches": "scoring batches",
    "floor": "minimum neurons per layer",
    "round_to": "widths in multiples of",
    "max_removed": "maximum fraction removed",
    "clip_norm": "gradient clipping",
}
PENALTY_FIELDS = ("mu", "mu_warmup_epochs", "bound")
CHOICES = {
    "curvature": {"ggn": "Gauss–Newton in place of the Hessian"},
    "scaling": {"scale_invariant": "scale-invariant v"},
    "direction_from": {"last_batch": "along the previous batch's v"},
    "kfac_approx": {"reduce": "factors reduced over positions"},
    "fisher_type": {"mc": "labels sampled from the network"},
    "ranking": {"empirical": "blocks ranked by their own Fisher matrix"},
    "gamma_from": {"loss": "Γ from C (from L it would depend on itself)"},
    "direction_over": {"network": "v over the whole network"},
}


@dataclass(frozen=True)
class Deviation:
    """`aspect` is one of ASPECTS; `short` is for table cells, `text` is the full sentence; `open`: the paper leaves it open."""

    aspect: str
    short: str
    text: str
    open: bool = False


def deviations(experiment: PaperExperiment, runs: Sequence[Run]) -> tuple[Deviation, ...]:
    """The deviations of runs that differ only in the seed."""
    run = runs[0]
    config = config_settings(run)
    deviations = [
        *_network(experiment, run),
        *_data(experiment, run, config),
        *_start(experiment, run),
        *_penalty(run),
        *_schedule(experiment, run, config),
        *_hardware(experiment, runs),
    ]
    count = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    return (*deviations, Deviation("seeds", count, f"{count} (the paper does not say how many)", open=True))


def variant(run: Run) -> str:
    """ "hgnp", one of its ablations "no training penalty" and "no scoring penalty", or another method's name."""
    if run.method != "hgnp":
        return run.method
    training, scoring = _weights(run)
    if training == 0 and scoring == 0:
        return "hgnp with μ = 0"
    return "no training penalty" if training == 0 else "no scoring penalty" if scoring == 0 else "hgnp"


def penalty(run: Run) -> str:
    """ "literal", "fast" (as the presets of that name have it) or "other"; "" for a method without the penalty."""
    if not _has_penalty(run):
        return ""
    steps = (run.recipe.get("penalty_every", 1), run.recipe.get("refresh_every"), run.recipe.get("skip_inactive"))
    chosen = choices_of(recipe_of(run))
    if chosen == BUNDLES["paper"] and steps == (1, 1, False):
        return "literal"
    return "fast" if chosen == FAST and steps == (1, 8, True) else "other"


def schedule(experiment: PaperExperiment, run: Run) -> str:
    """ "the paper's", "HGNP's" (of another method than HGNP) or "other"."""
    own, hgnp = experiment.recipe(run.method), experiment.recipe("hgnp")
    for name, stated in (("the paper's", own), ("HGNP's", hgnp)):
        if all(stated[key] is LEAVES_OPEN or run.recipe.get(key) == stated[key] for key in SCHEDULE):
            return name
    return "other"


def _weights(run: Run) -> tuple[float, float]:
    mu, scoring = float(run.recipe.get("mu") or 0), run.recipe.get("score_mu")
    return mu, mu if scoring is None else float(scoring)


def _has_penalty(run: Run) -> bool:
    return run.method in ("hgnp", "hybrid") and any(_weights(run))


def _network(experiment: PaperExperiment, run: Run) -> list[Deviation]:
    stated = hybrid.PAPER[EXPERIMENTS.index(experiment)].features["parameters"]
    ours = (run.info.get("features") or {}).get("parameters")
    if ours in (None, stated):
        return []
    return [Deviation("network", f"{ours:,} parameters", f"{ours:,} parameters instead of {stated:,}")]


def _data(experiment: PaperExperiment, run: Run, config: Mapping[str, Any]) -> list[Deviation]:
    deviations = []
    features = run.info.get("features") or {}
    for name, stated in experiment.features.items():
        if (ours := features.get(name)) is not None and ours != stated:
            words = name.replace("_", " ").replace("val ", "validation ").replace("train ", "training ")
            deviations.append(Deviation("data", f"{ours:,} {words}", f"{words}: {ours:,} instead of {stated:,}"))
    changed = {
        "flip": ("random flips", "no random flips"),
        "resize": ("images resized", "images cropped"),
        "crop": ("random crops", "no crops"),
        "cutout": ("cutout", "no cutout"),
    }
    for name, stated in experiment.data_args.items():
        ours = config.get(f"data_args.{name}", stated)
        if name == "batch" and f"data_args.{name}" in config:
            ours *= config.get("accumulate", 1) * run.ranks
        if ours == stated:
            continue
        if name == "batch":
            deviations.append(Deviation("data", f"batch {ours}", f"mini-batches of {ours} instead of {stated}"))
        else:
            words = changed[name][0 if ours else 1]
            deviations.append(Deviation("data", words, f"{words}, which the paper does not state"))
    if experiment.cropping and not config.get("data_args.resize"):
        text = experiment.cropping.format(side=features.get("image_side") or experiment.features["image_side"])
        deviations.append(Deviation("data", "", text, open=True))
    return deviations


def _start(experiment: PaperExperiment, run: Run) -> list[Deviation]:
    start = str(run.info.get("start") or "not known")
    at_random = start.startswith("random")
    if experiment.start == "random":
        return [] if at_random else [Deviation("start", "pretrained start", f"{start}, instead of random weights")]
    stated = f"ImageNet's weights but for {', '.join(experiment.fresh)}"
    if at_random:
        return [Deviation("start", "random start", f"random weights instead of {stated}")]
    if start.startswith((SAVED_START, OLD_SAVED_START)):
        start = start.replace(OLD_SAVED_START, SAVED_START)
        return [Deviation("start", "weights saved by hgnp", f"{start}; the paper: {stated}")]
    fresh = re.search(r"at random: ([^;]*)", start)
    layers = set(fresh[1].split(", ")) if fresh else set()
    if not layers - set(experiment.fresh) and start != "not known":
        return []
    short = (
        "pretrained convolutions only"
        if layers and all(not n.startswith(("features", "conv")) for n in layers)
        else "other start"
    )
    return [Deviation("start", short, f"{start}; the paper: {stated}")]


def _penalty(run: Run) -> list[Deviation]:
    name = penalty(run)
    if not name:
        return []
    chosen, literal = choices_of(recipe_of(run)), BUNDLES["paper"]
    words = [
        CHOICES[field.name][value]
        for field in fields(Choices)
        if (value := getattr(chosen, field.name)) in CHOICES[field.name]
    ]
    every, skip = run.recipe.get("refresh_every"), run.recipe.get("skip_inactive")
    if (penalized := run.recipe.get("penalty_every", 1)) != 1:
        words.append(f"in one of {penalized} steps, with {penalized} times the weight")
    if every != 1:
        words.append(f"v refreshed every {every} steps")
    if skip:
        words.append("skipped while the penalty is inactive")
    text = f"{name} penalty: {', '.join(words)}"
    return [Deviation("penalty", f"{name} penalty", text, open=name == "literal" and chosen == literal)]


def _schedule(experiment: PaperExperiment, run: Run, config: Mapping[str, Any]) -> list[Deviation]:
    stated, name = experiment.recipe(run.method), schedule(experiment, run)
    deviations, rounds = [], []
    for key, paper in stated.items():
        ours = run.recipe.get(key, paper)
        if (
            ours == paper
            or (key in PENALTY_FIELDS and not _has_penalty(run))
            or (key == "mu" and variant(run) == "no training penalty")
        ):
            continue
        label = LABELS.get(key, key.replace("_", " "))
        if paper is LEAVES_OPEN:
            how = (
                f" over the {'whole run' if run.recipe.get('anneal') == 'run' else 'fine-tuning'}"
                if key == "schedule"
                else ""
            )
            deviations.append(
                Deviation("schedule", "", f"{label}: {_shown(key, ours)}{how} (left open by the paper)", open=True)
            )
        elif key in SCHEDULE:
            rounds.append(f"{label} {_shown(key, ours)} instead of {_shown(key, paper)}")
        else:
            text = f"{label} {_shown(key, ours)} instead of {_shown(key, paper)}"
            deviations.append(Deviation("schedule", f"{label} {_shown(key, ours)}", text))
    scoring = run.recipe.get("score_mu")
    if _has_penalty(run) and variant(run) != "no scoring penalty" and scoring not in (None, stated["mu"]):
        text = f"μ of the scores {_shown('mu', scoring)} instead of {_shown('mu', stated['mu'])}"
        deviations.append(Deviation("schedule", f"μ of the scores {_shown('mu', scoring)}", text))
    if rounds:
        short = "HGNP's schedule" if name == "HGNP's" else "other schedule"
        deviations.insert(0, Deviation("schedule", short, f"{short}: {', '.join(rounds)}"))
    own = [key for key in ("optimizer", "scheduler", "loss", "protect") if config.get(key)]
    return [*deviations, *(Deviation("schedule", f"own {key}", f"{key} {config[key]}, not the paper's") for key in own)]


def _hardware(experiment: PaperExperiment, runs: Sequence[Run]) -> list[Deviation]:
    ours = "; ".join(sorted({run.hardware for run in runs}))
    method = "taylor" if runs[0].method == "taylor" else "hgnp"
    theirs = f"{experiment.training.gpus[method]} × {experiment.training.hardware} for {METHODS[method]}"
    deviations = [Deviation("hardware", ours, f"{ours}; the paper: {theirs}")]
    if any(run.info.get("device") != "cpu" for run in runs) and runs[0].recipe.get("precision") in (
        "auto",
        "bf16",
        "fp16",
    ):
        precision = {"auto": "bfloat16 where the GPU has it"}.get(
            runs[0].recipe["precision"], runs[0].recipe["precision"]
        )
        deviations.append(
            Deviation("hardware", "", f"mixed precision: {precision} (not mentioned in the paper)", open=True)
        )
    return deviations


def _shown(key: str, value: Any) -> str:
    if key == "keep":
        return f"{100 * value:.4g} %"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
