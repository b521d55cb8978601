"""The paper's data, read from the official files, and your own folder of images."""

from hgnp.experiments.data.cifar import cifar10
from hgnp.experiments.data.cub import cub200
from hgnp.experiments.data.digits import digits
from hgnp.experiments.data.flowers import flowers102
from hgnp.experiments.data.folder import image_folder
from hgnp.experiments.data.loader import Data, Loader

__all__ = ["Data", "Loader", "cifar10", "cub200", "digits", "flowers102", "image_folder"]
