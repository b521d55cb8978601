"""Structured pruning during training: remove neurons, channels and attention heads while a PyTorch network trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hgnp.curvature.sharpness import Sharpness, sharpness
    from hgnp.errors import DivergedError, HgnpError
    from hgnp.flatness import Flatness
    from hgnp.io.export import Exported, export
    from hgnp.io.weights import load, save
    from hgnp.pruning import Neurons, Selection
    from hgnp.recalibration import recalibrate
    from hgnp.recipe import Recipe
    from hgnp.removal import Removal
    from hgnp.result import Result
    from hgnp.scoring import sensitivity
    from hgnp.train import prune

__version__ = "0.1.0"

__all__ = [
    "DivergedError",
    "Exported",
    "Flatness",
    "HgnpError",
    "Neurons",
    "Recipe",
    "Removal",
    "Result",
    "Selection",
    "Sharpness",
    "export",
    "load",
    "prune",
    "recalibrate",
    "save",
    "sensitivity",
    "sharpness",
]

# Loaded when first used, so that `hgnp --help` does not wait for torch. No module here may have the name of one of these.
_HOMES = {
    "hgnp.curvature.sharpness": ("Sharpness", "sharpness"),
    "hgnp.io.export": ("Exported", "export"),
    "hgnp.flatness": ("Flatness",),
    "hgnp.pruning": ("Neurons", "Selection"),
    "hgnp.recalibration": ("recalibrate",),
    "hgnp.recipe": ("Recipe",),
    "hgnp.removal": ("Removal",),
    "hgnp.result": ("Result",),
    "hgnp.scoring": ("sensitivity",),
    "hgnp.io.weights": ("load", "save"),
    "hgnp.train": ("prune",),
    "hgnp.errors": ("DivergedError", "HgnpError"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module 'hgnp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
