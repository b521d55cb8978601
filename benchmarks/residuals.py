"""How exact the eigenpairs of a real run are: `flat.residual` in every step of the demo that looks at the term.

    python benchmarks/residuals.py [--set recipe.finetune_epochs=2 …] [--out benchmarks/residuals.md]

The demo (DigitsNet on handwritten digits) with the default choices and with the paper's, v renewed in every step. The residual
is ‖(Ψ ⊗ Γ)v − λv‖/λ of the penalised pair; the error of λ is at most that share of it, and most often its square.
"""

import argparse
import datetime
import math
from pathlib import Path

import torch

from hgnp import prune
from hgnp.experiments.build import prepare
from hgnp.experiments.presets import preset
from hgnp.files import write
from hgnp.flatness import Flatness

CHOICES = {"default": ["recipe.flatness=default"], "paper": ["recipe.flatness=paper"]}
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def residuals(settings: list[str]) -> list[float]:
    """Of every step in which the term was looked at, in order."""
    found: list[float] = []
    done = Flatness.done

    def noted(self: Flatness, kind: object) -> None:
        done(self, kind)  # type: ignore[arg-type]
        if not self.rested:
            found.append(self.residual)

    Flatness.done = noted  # type: ignore[method-assign]
    try:
        made = prepare(preset("demo").with_settings(settings))
        prune(made.net, made.train, made.val, recipe=made.recipe, **made.options)
    finally:
        Flatness.done = done  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    every = ["recipe.refresh_every=1", "recipe.skip_inactive=false", *given.settings]
    lines = [
        "# Residuals of the eigenpairs in a run",
        "",
        f"`python benchmarks/residuals.py{''.join(f' --set {each}' for each in given.settings)}`, {datetime.date.today()}, "
        f"CPU, torch {torch.__version__}. The demo, v renewed in every step.",
        "",
        "| choices | steps | median | 90 % | 99 % | largest |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, settings in CHOICES.items():
        found = sorted(each for each in residuals([*every, *settings]) if not math.isnan(each))
        cells = [f"{found[min(int(q * len(found)), len(found) - 1)]:.1e}" for q in QUANTILES]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.out is not None:
        write(given.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
