"""Datasets from a local server, in the official layouts: downloaded, resumed, checked, unpacked, and read by the loaders."""

import hashlib
import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from archives import FILES, Quiet, cifar_files, flowers_files, jpeg, names_in, small, tar
from command import call
from hgnp.experiments.data import cifar10, cub200, flowers102
from hgnp.experiments.download import OFFICIAL, DownloadError, File, Source, install
from hgnp.io.atomic import locked
from serving import serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_command_brings_what_the_loaders_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, folder = FILES[name](), tmp_path / "new" / "data"
    source = small(name, files)
    monkeypatch.setitem(OFFICIAL, name, source)
    with serving(files) as server:
        assert call("data", name, str(folder), "--mirror", server.url + "/") == 0
        said = capsys.readouterr().out.splitlines()
        assert sorted(server.asked) == sorted((file, None) for file in files)
    assert f"{source.title} in {folder}: downloaded, " in said[-2]
    assert said[-1] == f"Terms ({source.page}): {source.terms}"
    assert len(said) == len(files) + 3  # one line per download, one per archive, two at the end
    if name == "cifar10":
        data = cifar10(folder, batch=2)
        assert (data.train_samples, data.val_samples) == (15, 3)
    elif name == "flowers102":
        data = flowers102(folder, batch=2, side=16, cache=False)
        assert (data.train_samples, data.val_samples, data.classes) == (2, 4, 3)
    else:
        data = cub200(folder, batch=2, side=16, cache=False)
        assert (data.train_samples, data.val_samples, data.classes) == (2, 2, 2)
    assert len(list(data.val)) > 0
    assert names_in(folder) == {
        f".hgnp-{name}.json",
        *(file.unpacks or file.name for file in source.files),
    }
    # the second call needs no network, and changes nothing
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert call("data", name, str(folder), "--json") == 0
    out, err = capsys.readouterr()
    assert "already complete" in err
    found = json.loads(out.splitlines()[-1])
    assert (found["data"], found["downloaded"], found["terms"]) == (name, False, source.terms)
    assert found["bytes"] == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name[0] != "."
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_official_sources_are_complete() -> None:
    assert set(OFFICIAL) == {"cifar10", "flowers102", "cub200"}
    for name, source in OFFICIAL.items():
        assert source.name == name
        assert source.page.startswith("https://")
        assert "cite" in source.terms
        for file in source.files:
            assert file.url.startswith("https://")
            assert re.fullmatch(r"[0-9a-f]{32}", file.md5)
            assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            if file.name.endswith((".tgz", ".gz")):
                assert file.unpacks
                assert file.size
                assert file.size < file.most_bytes < 5 * file.size
            else:
                assert file.unpacks is None
    assert OFFICIAL["cifar10"].files[0].size == 170_052_171
    moved = OFFICIAL["flowers102"].at("http://mirror/x/")
    assert [file.url for file in moved.files] == [
        f"http://mirror/x/{n}" for n in ("imagelabels.mat", "setid.mat", "102flowers.tgz")
    ]
    assert [file.md5 for file in moved.files] == [file.md5 for file in OFFICIAL["flowers102"].files]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_partial_download_is_resumed(ranges: bool, tmp_path: Path) -> None:
    files = cifar_files()
    (name, content), progress = next(iter(files.items())), Quiet()
    (tmp_path / f"{name}.part").write_bytes(content[:20_000])
    with serving(files, ranges=ranges) as server:
        install(small("cifar10", files).at(server.url), tmp_path, progress)
        assert server.asked == [(name, "bytes=20000-")]
    shown = [done for what, done, total in progress.seen if what == name and total == len(content)]
    assert shown[0] == (20_000 if ranges else 0)
    assert shown[-1] == len(content)
    assert cifar10(tmp_path, batch=2).train_samples == 15


def test_a_range_that_was_not_asked_for_is_not_appended(tmp_path: Path) -> None:
    files = cifar_files()
    (name, content) = next(iter(files.items()))
    (tmp_path / f"{name}.part").write_bytes(content[:20_000])
    with serving(files, shift=5) as server:
        install(small("cifar10", files).at(server.url), tmp_path, Quiet())
        assert server.asked == [(name, "bytes=20000-"), (name, None)]


def test_cut_connections_are_resumed_and_bounded(tmp_path: Path) -> None:
    files = cifar_files()
    (name, content) = next(iter(files.items()))
    source = small("cifar10", files)
    with serving(files, cut=len(content) // 4) as server:
        install(source.at(server.url), tmp_path / "a", Quiet())
        assert len(server.asked) == 5
    with serving(files, cut=100) as server:
        with pytest.raises(DownloadError, match=r"was cut 10 times; 1,000 bytes are kept, call again to resume"):
            install(source.at(server.url), tmp_path / "b", Quiet())
        assert names_in(tmp_path / "b") == {f"{name}.part"}
        server.cut = None
        install(source.at(server.url), tmp_path / "b", Quiet())
        assert server.asked[-1] == (name, "bytes=1000-")
    with (
        serving(files, ranges=False, cut=len(content) - 1) as server,
        pytest.raises(DownloadError, match="cut 10 times"),
    ):
        install(source.at(server.url), tmp_path / "c", Quiet())
    with serving(files, length=False) as server:
        assert install(source.at(server.url), tmp_path / "c", Quiet()).downloaded


@pytest.mark.parametrize("start", [b"not the beginning", b"x" * 100_000])
def test_a_partial_download_of_something_else_is_replaced(start: bytes, tmp_path: Path) -> None:
    for name in ("cifar10", "flowers102"):  # with published sizes and without
        files = FILES[name]()
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / f"{file}.part").write_bytes(start)
        with serving(files) as server:
            assert install(small(name, files).at(server.url), folder, Quiet()).downloaded
        assert not list(folder.glob("*.part"))


def test_a_wrong_checksum_ends_the_call_and_leaves_nothing(tmp_path: Path) -> None:
    files = cifar_files()
    (name, content), source = next(iter(files.items())), small("cifar10", files)
    folder = tmp_path / "data"
    with serving({name: content[:-1] + bytes([content[-1] ^ 1])}) as server:
        for _ in range(2):
            with pytest.raises(
                DownloadError, match=r"must have the published MD5 [0-9a-f]{32}, got [0-9a-f]{32}; .* was deleted"
            ):
                install(source.at(server.url), folder, Quiet())
            assert not folder.exists()
        assert len(server.asked) == 2
        server.files = {name: content + b"more"}
        with pytest.raises(
            DownloadError, match=rf"must have {len(content):,} bytes as published, got {len(content) + 4:,};"
        ):
            install(source.at(server.url), folder, Quiet())
        server.length = False
        with pytest.raises(DownloadError, match=rf"must have at most {len(content):,} bytes, got more;"):
            install(source.at(server.url), folder, Quiet())
        server.files, server.length = files, True
        install(source.at(server.url), folder, Quiet())


def test_sha256_is_checked_beside_md5(tmp_path: Path) -> None:
    files = cifar_files()
    source = small("cifar10", files)
    file = source.files[0]
    wrong = File(file.url, file.md5, file.size, "0" * 64, file.unpacks, file.most_files, file.most_bytes)
    with (
        serving(files) as server,
        pytest.raises(DownloadError, match=r"must have the published SHA-256 0{64}, got [0-9a-f]{64}"),
    ):
        install(Source("cifar10", "", (wrong,), "", "").at(server.url), tmp_path, Quiet())


def test_files_that_are_there_are_verified(tmp_path: Path) -> None:
    files = flowers_files()
    source = small("flowers102", files)
    for name, content in files.items():  # downloaded by hand
        (tmp_path / name).write_bytes(content)
    unreachable = source.at("http://127.0.0.1:1")
    assert install(unreachable, tmp_path, Quiet()).files == 8
    assert (tmp_path / "102flowers.tgz").exists()
    (tmp_path / "jpg" / "image_00002.jpg").write_bytes(jpeg(9))
    (tmp_path / "jpg" / "image_00003.jpg").unlink()
    with pytest.raises(
        DownloadError,
        match=r"jpg must have its 6 files unchanged, got 2 missing or changed \(jpg/image_00002.jpg first\)",
    ):
        install(unreachable, tmp_path, Quiet())
    (tmp_path / ".hgnp-flowers102.json").write_text("{")
    with pytest.raises(
        DownloadError, match=r"jpg must be unpacked by hgnp data to be verified, got a folder that is not"
    ):
        install(unreachable, tmp_path, Quiet())
    (tmp_path / "setid.mat").write_bytes(b"something else")
    with pytest.raises(
        DownloadError, match=r"setid.mat must have the published MD5 .*, got .*; remove it and call again"
    ):
        install(unreachable, tmp_path, Quiet())
    assert (tmp_path / "setid.mat").read_bytes() == b"something else"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    files = cifar_files(records=1)
    name = next(iter(files))
    source = small("cifar10", files)
    with serving(files) as server:
        with (
            files_of_at_most(5_000),
            pytest.raises(DownloadError, match=r"part could not be written: File too large; call"),
        ):
            install(source.at(server.url), tmp_path, Quiet())
        assert names_in(tmp_path) == {f"{name}.part"}
        install(source.at(server.url), tmp_path, Quiet())
    # while unpacking: the archive stays, a complete folder does not appear
    again = tmp_path / "again"
    zeros = tar({"cifar-10-batches-bin/data_batch_1.bin": b"\0" * 3073 * 20})
    file = File("http://x/z.tgz", hashlib.md5(zeros).hexdigest(), len(zeros), None, "cifar-10-batches-bin", 9, 10**6)
    with serving({"z.tgz": zeros}) as server:
        source = Source("cifar10", "", (file,), "", "").at(server.url)
        with (
            files_of_at_most(5_000),
            pytest.raises(DownloadError, match=r"data_batch_1.bin could not be written: File too"),
        ):
            install(source, again, Quiet())
        assert names_in(again) == {"z.tgz.part"}
        assert install(source, again, Quiet()).bytes == 3073 * 20
        assert len(server.asked) == 1  # what was downloaded is used
    huge = File("http://x/z.tgz", "0" * 32, 2**62, None, "x", 9, 2**63)
    with (
        serving({"z.tgz": b""}, length=False) as server,
        pytest.raises(DownloadError, match=r"must have 4,611,686,.* bytes free"),
    ):
        install(Source("cifar10", "", (huge,), "", "").at(server.url), tmp_path / "huge", Quiet())


def test_a_second_call_at_the_same_time_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path, timeout=0),
        pytest.raises(DownloadError, match="must be used by one hgnp data at a time"),
    ):
        install(OFFICIAL["cifar10"].at("http://127.0.0.1:1"), tmp_path, Quiet())


def test_what_a_killed_call_left_is_removed(tmp_path: Path) -> None:
    files = cifar_files()
    left = tmp_path / ".hgnp-cifar10-draft-abc" / "cifar-10-batches-bin"
    left.mkdir(parents=True)
    (left / "data_batch_1.bin").write_bytes(b"half")
    with serving(files) as server:
        install(small("cifar10", files).at(server.url), tmp_path, Quiet())
    assert names_in(tmp_path) == {".hgnp-cifar10.json", "cifar-10-batches-bin"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar", "d"], "got 'cifar'; did you mean cifar10?"),
        (["cifar10"], "Missing argument 'DIR'"),
        (["cifar10", "file"], "DIR must be a folder, got the file "),
        (["cifar10", "file/below"], "file/below could not be written: Not a directory"),
        (
            ["cifar10", "d", "--mirror", "file:///etc"],
            "mirror must be an http:// or https:// address, got 'file:///etc'",
        ),
        (["cifar10", "d", "--mirror", "http://127.0.0.1:1"], "cifar-10-binary.tar.gz could not be reached ("),
        (["cifar10", "d", "--mirror", "http://nowhere.invalid"], "cifar-10-binary.tar.gz could not be reached ("),
        (["cifar10", "d", "--mirror", "http://[x"], "could not be reached ("),
        (["flowers102", "d", "--mirror", "SERVER"], "imagelabels.mat: the server answered 404 Not Found"),
    ],
)
def test_the_data_command_refuses_bad_arguments_in_one_line_with_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with serving({}) as server:
        assert call("data", *(server.url if each == "SERVER" else each for each in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hgnp: ")
    assert message in err
    assert err.count("\n") == 1
    assert names_in(tmp_path) == {"file"}
