"""The official files of the paper's data sets: downloaded, checked, unpacked. Needs neither torch nor numpy."""

from hgnp.experiments.download.fetch import DownloadError, Progress
from hgnp.experiments.download.install import Installed, install
from hgnp.experiments.download.sources import OFFICIAL, File, Source

__all__ = ["OFFICIAL", "DownloadError", "File", "Installed", "Progress", "Source", "install"]
