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
        ([GOOD, (tarfile.TarInfo("../outside"), b"x")], "refused, '../outside' could lead out"),
        ([GOOD, (tarfile.TarInfo("jpg/../../outside"), b"x")], "refused, 'jpg/../../outside' could lead out"),
        ([GOOD, (tarfile.TarInfo("/tmp/outside"), b"x")], "refused, '/tmp/outside' could lead out"),
        ([GOOD, (tarfile.TarInfo("jpg/C:\\outside"), b"x")], "could lead out"),
        ([GOOD, (linked(tarfile.SYMTYPE), b"")], "refused, 'jpg/link' is neither a file nor a folder"),
        ([GOOD, (linked(tarfile.LNKTYPE), b"")], "refused, 'jpg/link' is neither a file nor a folder"),
        ([GOOD, (linked(tarfile.FIFOTYPE), b"")], "refused, 'jpg/link' is neither a file nor a folder"),
        ([GOOD, (linked(tarfile.CHRTYPE), b"")], "refused, 'jpg/link' is neither a file nor a folder"),
        ([GOOD, GOOD], "refused, 'jpg/image_00001.jpg' is in it twice"),
        ([GOOD, (tarfile.TarInfo("jpg/image_00001.jpg/x"), b"x")], "is in it twice"),
        ([(tarfile.TarInfo(f"jpg/{number}"), b"") for number in range(11)], "refused, it has more than 10 members"),
        ([GOOD, (tarfile.TarInfo("jpg/large"), b"\0" * 100_001)], "or 100,000 bytes"),
        ([(tarfile.TarInfo("elsewhere/x"), b"x")], "it has no folder jpg"),
    ],
)
def test_hostile_archives_are_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], reason: str, tmp_path: Path
) -> None:
    check_refused(tar(members), reason, tmp_path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = tar([GOOD, (tarfile.TarInfo("jpg/noise"), os.urandom(50_000))])
    check_refused(b"no archive", "not a readable archive", tmp_path)
    check_refused(whole[: len(whole) // 2], "not a readable archive", tmp_path)


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
