"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

from hgnp.flatness import Flatness
from hgnp.sharpness import Sharpness, sharpness

__version__ = "0.1.0"
__all__ = ["Flatness", "Sharpness", "sharpness"]
