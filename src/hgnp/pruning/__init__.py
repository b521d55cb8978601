"""Which neurons a network has, which belong together, and their physical removal. Knows nothing of losses."""

from hgnp.pruning.neurons import Neurons
from hgnp.pruning.selection import Scores, Selection
from hgnp.pruning.summary import Frozen, Layer, Preview

__all__ = ["Frozen", "Layer", "Neurons", "Preview", "Scores", "Selection"]
