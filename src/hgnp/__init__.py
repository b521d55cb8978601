"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

from hgnp.export import Exported, export
from hgnp.flatness import Flatness
from hgnp.neurons import Neurons, Selection
from hgnp.recipe import Recipe
from hgnp.removal import Removal
from hgnp.result import Result
from hgnp.sensitivity import sensitivity
from hgnp.sharpness import Sharpness, sharpness
from hgnp.storage import load, save
from hgnp.train import prune
from hgnp.training.epoch import DivergedError

__version__ = "0.1.0"

__all__ = [
    "DivergedError",
    "Exported",
    "Flatness",
    "Neurons",
    "Recipe",
    "Removal",
    "Result",
    "Selection",
    "Sharpness",
    "export",
    "load",
    "prune",
    "save",
    "sensitivity",
    "sharpness",
]
