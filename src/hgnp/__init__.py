"""hgnp trains a neural network and prunes whole neurons from it at once, steered to a flat minimum."""

__version__ = "0.1.0"
