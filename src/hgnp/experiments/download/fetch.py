"""Downloads a published file: resumes after an interruption, verifies checksums.

The bytes go to NAME.part. They are downloaded again only if the checksum of the file is wrong: since that checksum is fixed, a
resumed download needs no ETag.
"""

import hashlib
import http.client
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn, Protocol

from hgnp import __version__
from hgnp.errors import InputError, first_line
from hgnp.experiments.download.sources import File

CHUNK = 2**18
CONNECTIONS = 10  # attempts per file and call
SILENCE = 60.0  # seconds without a byte
LARGEST = 16 * 2**20  # of a file whose size is not known


class DownloadError(InputError):
    """Data that could not be downloaded, checked or unpacked. The message says what to do."""


class DownloadProgress(Protocol):
    def bytes(self, what: str, done: int, total: int | None) -> None:
        """`done` bytes of a task are complete."""

    def note(self, text: str) -> None:
        """A step is complete."""


def part_of(file: File, folder: Path) -> Path:
    return folder / f"{file.name}.part"


def fetch(file: File, folder: Path, progress: DownloadProgress) -> Path:
    """The checked file: FOLDER/NAME if that exists already, otherwise FOLDER/NAME.part."""
    present, part = folder / file.name, part_of(file, folder)
    if present.exists():
        if problem := mismatch(file, present, progress):
            raise DownloadError(f"{present} {problem}; remove it and call again")
        return present
    if part.exists() and mismatch(file, part, progress) is None:  # downloaded by an earlier call
        return part
    problem = None
    for resume in (True, False) if _size(part) else (False,):
        if not resume:
            part.unlink(missing_ok=True)
        _transfer(file, part, progress)
        problem = mismatch(file, part, progress)
        if problem is None:
            progress.note(f"{file.name}: {_size(part):,} bytes from {file.url}, checksum correct")
            return part
    part.unlink()
    raise DownloadError(f"{file.url} {problem}; the download was deleted: try again later, or another --mirror")


def mismatch(file: File, path: Path, progress: DownloadProgress) -> str | None:
    """What is wrong with the content of `path`, or None."""
    total, done = _size(path), 0
    if file.size is not None and total != file.size:
        return f"must have {file.size:,} bytes as published, got {total:,}"
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            md5.update(chunk)
            if file.sha256:
                sha256.update(chunk)
            done += len(chunk)
            progress.bytes(f"checking {file.name}", done, total)
    if md5.hexdigest() != file.md5:
        return f"must have the published MD5 {file.md5}, got {md5.hexdigest()}"
    if file.sha256 and sha256.hexdigest() != file.sha256:
        return f"must have the published SHA-256 {file.sha256}, got {sha256.hexdigest()}"
    return None


def unwritable(path: Path, error: OSError) -> NoReturn:
    """One line for a full disk or a folder that cannot be written to."""
    raise DownloadError(
        f"{path} could not be written: {error.strerror or first_line(error)}; call again to resume"
    ) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(file: File, part: Path, progress: DownloadProgress) -> None:
    """Append to `part` until it is complete, over several connections if need be."""
    if file.size is not None and _size(part) > file.size:
        part.unlink()
    for _ in range(CONNECTIONS):
        if _size(part) == file.size or _receive(file, part, progress):
            return
    raise DownloadError(
        f"{file.url}: the connection was cut {CONNECTIONS} times; {_size(part):,} bytes are kept, call again to resume"
    )


def _receive(file: File, part: Path, progress: DownloadProgress) -> bool:
    """One connection; whether the file is complete after it."""
    have = _size(part)
    headers = {"User-Agent": f"hgnp/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(file.url, headers=headers), timeout=SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # the server has no byte after these: they belong to another file
            part.unlink()
            return False
        raise DownloadError(
            f"{file.url}: the server answered {error.code} {error.reason}; try later, or a --mirror"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # urllib wraps the error of the connection
        reason = first_line(cause) if isinstance(cause, Exception) else str(cause)
        kept = f"; {have:,} bytes are kept" if have else ""
        raise DownloadError(
            f"{file.url} could not be reached ({reason}){kept}; check the network, or try a --mirror"
        ) from None
    with response:
        if response.status == 206:
            place = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if place is None or int(place[1]) != have:
                part.unlink()
                return False
            total = None if place[2] == "*" else int(place[2])
        else:  # the whole file: the server knows no ranges
            have = 0
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
        if total is not None and file.size is not None and total != file.size:
            raise DownloadError(
                f"{file.url} must have {file.size:,} bytes as published, got {total:,}; try another --mirror"
            )
        total = file.size if total is None else total
        _check_room(file, part, total, have)
        return _write(file, part, response, have, total, progress)


def _check_room(file: File, part: Path, total: int | None, have: int) -> None:
    most = file.size or LARGEST
    if total is not None and total > most:
        raise DownloadError(f"{file.url} must have at most {most:,} bytes, got {total:,}; try another --mirror")
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise DownloadError(f"{part.parent} must have {total - have:,} bytes free for {file.name}, got {free:,}")


def _write(
    file: File, part: Path, response: http.client.HTTPResponse, have: int, total: int | None, progress: DownloadProgress
) -> bool:
    most = total or LARGEST
    try:
        with part.open("ab" if have else "wb") as out:
            while True:
                progress.bytes(file.name, have, total)
                try:
                    chunk = response.read(CHUNK)
                except (OSError, http.client.HTTPException):  # the connection was cut, or silent for too long
                    return False
                if not chunk:
                    return total is None or have == total
                have += len(chunk)
                if have > most:
                    raise DownloadError(f"{file.url} must have at most {most:,} bytes, got more; try another --mirror")
                out.write(chunk)
    except OSError as error:
        unwritable(part, error)
