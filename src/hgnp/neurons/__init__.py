"""Which neurons a network has, which belong together, and their physical removal. Knows nothing of losses."""

from hgnp.neurons.neurons import Frozen, Layer, Neurons, Preview
from hgnp.neurons.selection import Scores, Selection
from hgnp.neurons.surgery import Listener, Removal

__all__ = ["Frozen", "Layer", "Listener", "Neurons", "Preview", "Removal", "Scores", "Selection"]
