"""Where the datasets are published, their checksums, and the terms that their pages state."""

from dataclasses import dataclass, replace

from hgnp.errors import InputError


@dataclass(frozen=True)
class File:
    """A published file: kept as it is, or an archive from which the folder `unpacks` is taken.

    Attributes:
        url: Where it is published.
        md5: As published; always checked.
        size: In bytes, where known.
        sha256: Checked too, where known.
        unpacks: An archive's folder that the data is in; None for a file that is not an archive.
        most_files: An archive with more members is refused.
        most_bytes: An archive whose members have more bytes together is refused.
    """

    url: str
    md5: str
    size: int | None = None
    sha256: str | None = None
    unpacks: str | None = None
    most_files: int = 0
    most_bytes: int = 0

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """A dataset: its files, the page that publishes it, and the terms stated there."""

    name: str
    title: str
    files: tuple[File, ...]
    page: str
    terms: str

    def at(self, mirror: str) -> "Source":
        """The same files, with the same checksums, below another address."""
        if not mirror.startswith(("http://", "https://")):
            raise InputError(f"mirror must be an http:// or https:// address, got {mirror!r}")
        moved = tuple(replace(file, url=f"{mirror.rstrip('/')}/{file.name}") for file in self.files)
        return replace(self, files=moved)


FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"

OFFICIAL = {
    source.name: source
    for source in (
        Source(
            "cifar10",
            "CIFAR-10",
            (
                File(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    170_052_171,
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                    unpacks="cifar-10-batches-bin",
                    most_files=100,
                    most_bytes=250_000_000,
                ),
            ),
            "https://www.cs.toronto.edu/~kriz/cifar.html",
            "cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, 2009",
        ),
        Source(
            "flowers102",
            "Flowers-102",
            (
                File(f"{FLOWERS}/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
                File(f"{FLOWERS}/setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c"),
                File(
                    f"{FLOWERS}/102flowers.tgz",
                    "52808999861908f626f3c1f4e79d11fa",
                    344_862_509,
                    unpacks="jpg",
                    most_files=10_000,
                    most_bytes=1_000_000_000,
                ),
            ),
            f"{FLOWERS}/",
            "for research; cite M.-E. Nilsback and A. Zisserman, Automated Flower Classification over a Large Number of "
            "Classes, ICVGIP 2008",
        ),
        Source(
            "cub200",
            "CUB-200-2011",
            (
                File(
                    "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                    "97eceeb196236b17998738112f37df78",
                    1_150_585_339,
                    unpacks="CUB_200_2011",
                    most_files=20_000,
                    most_bytes=3_000_000_000,
                ),
            ),
            "https://data.caltech.edu/records/65de6-vp158",
            "for non-commercial research and education; cite C. Wah, S. Branson, P. Welinder, P. Perona and S. Belongie, The "
            "Caltech-UCSD Birds-200-2011 Dataset, CNS-TR-2011-001, 2011",
        ),
    )
}
