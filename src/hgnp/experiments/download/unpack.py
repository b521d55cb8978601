"""Unpack a tar archive into an empty folder: plain files and folders only, none outside, bounded in number and size.

Members are written by their content alone: links, devices, owners and permissions of the archive are never applied.
"""

import hashlib
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from hgnp.errors import first_line
from hgnp.experiments.download.fetch import CHUNK, DownloadError, DownloadProgress, unwritable
from hgnp.experiments.download.sources import File

Listing = dict[str, tuple[int, str]]
"""Path below the folder → size and SHA-256."""


def unpack(archive: Path, file: File, into: Path, progress: DownloadProgress) -> Listing:
    """Write the archive's members below `file.unpacks` to `into`, and list them. Other members are left out."""
    listing: Listing = {}
    count = total = 0
    try:
        with archive.open("rb") as stream, tarfile.open(fileobj=stream, mode="r|gz") as tar:
            for member in tar:
                count, total = count + 1, total + member.size
                if count > file.most_files or total > file.most_bytes:
                    raise DownloadError(
                        f"{archive} must have at most {file.most_files:,} members and {file.most_bytes:,} bytes, got more"
                    )
                progress.bytes(f"unpacking {file.name}", stream.tell(), file.size)
                path = _inside(archive, member)
                if member.isfile() and path.parts[0] == file.unpacks and len(path.parts) > 1:
                    listing[str(path)] = _extract(archive, tar, member, into / path)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DownloadError(f"{archive} must be a readable tar.gz archive, but failed: {first_line(error)}") from None
    if not listing:
        raise DownloadError(f"{archive} must have a folder {file.unpacks}, got none")
    return listing


def _inside(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if not (member.isfile() or member.isdir()):
        raise DownloadError(f"{archive} must hold files and folders alone, got {member.name!r}")
    # backslashes and colons lead elsewhere on Windows
    if (
        path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or not member.name.isprintable()
        or set("\\:") & set(member.name)
    ):
        raise DownloadError(f"{archive} must unpack inside its folder, got {member.name!r}")
    return path


def _extract(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> tuple[int, str]:
    sha256 = hashlib.sha256()
    content = tar.extractfile(member)
    assert content is not None  # a plain file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as out:
            while chunk := content.read(CHUNK):
                sha256.update(chunk)
                out.write(chunk)
    except (FileExistsError, NotADirectoryError):
        raise DownloadError(f"{archive} must hold every file once, got {member.name!r} twice") from None
    except OSError as error:
        unwritable(target, error)
    return member.size, sha256.hexdigest()
