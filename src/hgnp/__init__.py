"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

from hgnp.neurons import Neurons, Removal, Selection
from hgnp.storage import load, save

__version__ = "0.1.0"

__all__ = ["Neurons", "Removal", "Selection", "load", "save"]
