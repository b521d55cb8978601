"""The official files of the paper's datasets: downloaded, verified, unpacked. Needs neither torch nor numpy."""

from hgnp.experiments.download.fetch import DownloadError, DownloadProgress
from hgnp.experiments.download.install import Installed, install
from hgnp.experiments.download.sources import OFFICIAL, File, Source

__all__ = ["OFFICIAL", "DownloadError", "DownloadProgress", "File", "Installed", "Source", "install"]
