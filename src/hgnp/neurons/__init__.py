"""Which neurons a network has, which belong together, and their physical removal. Knows nothing of losses."""

from hgnp.neurons.neurons import Frozen, Layer, Neurons, Preview
from hgnp.neurons.selection import Scores, Selection

__all__ = ["Frozen", "Layer", "Neurons", "Preview", "Scores", "Selection"]
