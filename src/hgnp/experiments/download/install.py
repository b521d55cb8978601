"""Installs a dataset in a folder: downloads what is missing and verifies what exists.

An archive is unpacked in a hidden folder beside its place and then renamed, so that data under its final name is complete.
Sizes and SHA-256 of the unpacked files are kept in FOLDER/.hgnp-NAME.json, written before the rename.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hgnp.experiments.download.fetch import DownloadError, DownloadProgress, fetch, part_of, unwritable
from hgnp.experiments.download.sources import File, Source
from hgnp.experiments.download.unpack import Listing, unpack
from hgnp.io.atomic import locked, read_json, write_json

FORMAT = 1


@dataclass(frozen=True)
class Installed:
    """A complete, verified dataset."""

    source: Source
    folder: Path
    files: int
    bytes: int
    downloaded: bool
    """Whether anything had to be downloaded or unpacked."""


def install(source: Source, folder: str | os.PathLike[str], progress: DownloadProgress) -> Installed:
    """Complete the dataset in `folder`, which `hgnp run --data` then reads. DownloadError if it cannot be completed."""
    home = Path(folder)
    downloaded, sizes = False, []
    with _alone_in(home, source):
        for file in source.files:
            if file.unpacks is None:
                downloaded |= _keep(file, home, progress)
                sizes.append((home / file.name).stat().st_size)
                continue
            listing = _unpacked(source, file, home / file.unpacks, progress)
            if listing is None:
                listing, downloaded = _unpack(source, file, home / file.unpacks, progress), True
            sizes += [size for size, _ in listing.values()]
    return Installed(source, home, len(sizes), sum(sizes), downloaded)


@contextmanager
def _alone_in(home: Path, source: Source) -> Iterator[None]:
    """Create and lock the folder, and remove drafts of killed calls. A folder that stays empty is removed again."""
    if home.exists() and not home.is_dir():
        raise DownloadError(f"DIR must be a folder, got the file {home}")
    made = not home.exists()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        unwritable(home, error)
    try:
        with locked(home, timeout=0):
            for left in home.glob(f"{_draft(source)}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
    except BlockingIOError:
        raise DownloadError(
            f"{home} must be used by one hgnp data at a time, got another; wait for it to end"
        ) from None
    except OSError as error:
        unwritable(home, error)
    finally:
        if made:
            with suppress(OSError):
                home.rmdir()


def _keep(file: File, home: Path, progress: DownloadProgress) -> bool:
    """Install a file that is not an archive; whether it had to be downloaded."""
    fetched = fetch(file, home, progress)
    if fetched != home / file.name:
        os.replace(fetched, home / file.name)
        return True
    return False


def _unpacked(source: Source, file: File, target: Path, progress: DownloadProgress) -> Listing | None:
    """The verified listing of an unpacked archive; None if it is not unpacked yet."""
    home = target.parent
    if not target.exists():
        return None
    listing = _manifest(source, home).get(file.md5)
    if listing is None:
        raise DownloadError(
            f"{target} must be unpacked by hgnp data to be verified, got a folder that is not; move it away or give another"
        )
    total, done, wrong = sum(size for size, _ in listing.values()), 0, []
    for name, (size, sha256) in listing.items():
        if not _as_listed(home / name, size, sha256):
            wrong.append(name)
        done += size
        progress.bytes(f"verifying {target.name}", done, total)
    if wrong:
        raise DownloadError(
            f"{target} must have its {len(listing):,} files unchanged, got {len(wrong):,} missing or changed ({wrong[0]} "
            f"first); remove {target} and call again"
        )
    part_of(file, home).unlink(missing_ok=True)
    return listing


def _as_listed(path: Path, size: int, sha256: str) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256


def _unpack(source: Source, file: File, target: Path, progress: DownloadProgress) -> Listing:
    home = target.parent
    archive = fetch(file, home, progress)
    with tempfile.TemporaryDirectory(dir=home, prefix=_draft(source)) as draft:
        listing = unpack(archive, file, Path(draft), progress)
        archives = {**_manifest(source, home), file.md5: listing}
        write_json(_manifest_file(source, home), {"format": FORMAT, "archives": archives})
        os.rename(Path(draft) / target.name, target)
    part_of(file, home).unlink(missing_ok=True)
    progress.note(f"{target.name}: {len(listing):,} files unpacked")
    return listing


def _draft(source: Source) -> str:
    return f".hgnp-{source.name}-draft-"


def _manifest_file(source: Source, home: Path) -> Path:
    return home / f".hgnp-{source.name}.json"


def _manifest(source: Source, home: Path) -> dict[str, Listing]:
    """Listings by the MD5 of their archive; empty if there are none, or none that can be read."""
    try:
        manifest: Any = read_json(_manifest_file(source, home))
        if manifest["format"] != FORMAT:
            return {}
        return {
            md5: {str(name): (int(size), str(sha256)) for name, (size, sha256) in listing.items()}
            for md5, listing in manifest["archives"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
