"""Which neurons a network has, which belong together, and their physical removal. Knows nothing of losses."""

from hgnp.neurons.neurons import Neurons
from hgnp.neurons.selection import Scores, Selection
from hgnp.neurons.summary import Frozen, Layer, Preview

__all__ = ["Frozen", "Layer", "Neurons", "Preview", "Scores", "Selection"]
