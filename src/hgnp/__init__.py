"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

from hgnp.epoch import DivergedError
from hgnp.flatness import Flatness
from hgnp.neurons import Neurons, Selection
from hgnp.recipe import Recipe
from hgnp.removal import Removal
from hgnp.result import Result
from hgnp.sensitivity import sensitivity
from hgnp.sharpness import Sharpness, sharpness
from hgnp.storage import load, save
from hgnp.train import prune

__version__ = "0.1.0"

__all__ = [
    "DivergedError",
    "Flatness",
    "Neurons",
    "Recipe",
    "Removal",
    "Result",
    "Selection",
    "Sharpness",
    "load",
    "prune",
    "save",
    "sensitivity",
    "sharpness",
]
