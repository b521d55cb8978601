"""Archives with the right checksum that are nevertheless refused: nothing is written outside, nothing half appears."""

import hashlib
import os
import tarfile
from pathlib import Path

import pytest

from archives import Quiet, names_in, tar
from hgnp.experiments.download import DownloadError, File, Source, install
from serving import serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def linked(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("jpg/link")
    info.type, info.linkname = kind, "../../outside"
    return info


GOOD = (tarfile.TarInfo("jpg/image_00001.jpg"), b"picture")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([GOOD, (tarfile.TarInfo("../outside"), b"x")], "must unpack inside its folder, got '../outside'"),
        (
            [GOOD, (tarfile.TarInfo("jpg/../../outside"), b"x")],
            "must unpack inside its folder, got 'jpg/../../outside'",
        ),
        ([GOOD, (tarfile.TarInfo("/tmp/outside"), b"x")], "must unpack inside its folder, got '/tmp/outside'"),
        ([GOOD, (tarfile.TarInfo("jpg/C:\\outside"), b"x")], "must unpack inside its folder"),
        ([GOOD, (linked(tarfile.SYMTYPE), b"")], "must hold files and folders alone, got 'jpg/link'"),
        ([GOOD, (linked(tarfile.LNKTYPE), b"")], "must hold files and folders alone, got 'jpg/link'"),
        ([GOOD, (linked(tarfile.FIFOTYPE), b"")], "must hold files and folders alone, got 'jpg/link'"),
        ([GOOD, (linked(tarfile.CHRTYPE), b"")], "must hold files and folders alone, got 'jpg/link'"),
        ([GOOD, GOOD], "must hold every file once, got 'jpg/image_00001.jpg' twice"),
        ([GOOD, (tarfile.TarInfo("jpg/image_00001.jpg/x"), b"x")], "must hold every file once"),
        ([(tarfile.TarInfo(f"jpg/{number}"), b"") for number in range(11)], "must have at most 10 members and "),
        ([GOOD, (tarfile.TarInfo("jpg/large"), b"\0" * 100_001)], "and 100,000 bytes, got more"),
        ([(tarfile.TarInfo("elsewhere/x"), b"x")], "must have a folder jpg, got none"),
    ],
)
def test_hostile_archives_are_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], reason: str, tmp_path: Path
) -> None:
    check_refused(tar(members), reason, tmp_path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = tar([GOOD, (tarfile.TarInfo("jpg/noise"), os.urandom(50_000))])
    check_refused(b"no archive", "must be a readable tar.gz archive", tmp_path)
    check_refused(whole[: len(whole) // 2], "must be a readable tar.gz archive", tmp_path)


def check_refused(archive: bytes, reason: str, tmp_path: Path) -> None:
    """The right checksum, and still not unpacked."""
    folder = tmp_path / "deep" / "data"
    file = File("http://x/a.tgz", hashlib.md5(archive).hexdigest(), None, None, "jpg", 10, 100_000)
    with serving({"a.tgz": archive}) as server, pytest.raises(DownloadError) as caught:
        install(Source("flowers102", "", (file,), "", "").at(server.url), folder, Quiet())
    assert reason in str(caught.value)
    assert names_in(folder) == {"a.tgz.part"}
    assert names_in(folder.parent) == {"data"}
    assert names_in(tmp_path) == {"deep"}
