"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

from hgnp.flatness import Flatness
from hgnp.neurons import Neurons, Selection
from hgnp.recipe import Recipe
from hgnp.removal import Removal
from hgnp.sensitivity import sensitivity
from hgnp.sharpness import Sharpness, sharpness
from hgnp.storage import load, save

__version__ = "0.1.0"

__all__ = [
    "Flatness",
    "Neurons",
    "Recipe",
    "Removal",
    "Selection",
    "Sharpness",
    "load",
    "save",
    "sensitivity",
    "sharpness",
]
