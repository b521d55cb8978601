"""Structured pruning: the neurons of a network, their coupling, and their physical removal. Independent of losses."""

from hgnp.pruning.neurons import Neurons
from hgnp.pruning.selection import Scores, Selection
from hgnp.pruning.summary import Frozen, Layer, Preview

__all__ = ["Frozen", "Layer", "Neurons", "Preview", "Scores", "Selection"]
