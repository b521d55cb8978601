"""Sets of image files: official layouts, a cache that follows the files, the same epochs from memory and from disk."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from hgnp.experiments.data import Data, cub200, flowers102, image_folder
from hgnp.experiments.data import decode as decoding
from hgnp.experiments.data.decode import decode
from hgnp.experiments.data.images import MEAN, STD

SIDE = 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hgnp"


def picture(number: int, file: Path, size: tuple[int, int] = (SIDE, SIDE)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, quality=90)


def flowers(home: Path) -> Path:
    for number in range(1, 11):
        picture(number, home / "jpg" / f"image_{number:05}.jpg")
    savemat(home / "imagelabels.mat", {"labels": np.array([[1, 2, 3, 1, 2, 3, 1, 2, 3, 1]], np.uint8)})
    ids = {"trnid": [[4, 2]], "valid": [[3, 7]], "tstid": [[1, 5, 6, 8, 9, 10]]}
    savemat(home / "setid.mat", {name: np.array(numbers, np.uint16) for name, numbers in ids.items()})
    return home


def cub(home: Path) -> Path:
    names = [f"00{kind}.Bird_{kind}/Bird_{kind}_{number}.jpg" for kind in (1, 2) for number in range(4)]
    for number, name in enumerate(names):
        picture(number, home / "images" / name)
    lines = {
        "images.txt": names,
        "image_class_labels.txt": [1] * 4 + [2] * 4,
        "train_test_split.txt": [1, 0, 1, 0, 1, 1, 0, 1],
    }
    for file, values in lines.items():
        (home / file).write_text("".join(f"{i} {value}\n" for i, value in enumerate(values, 1)))
    return home


def folders(home: Path) -> Path:
    for number in range(8):
        picture(number, home / "train" / "ab"[number % 2] / f"{number}.png")
    for number in range(3):
        picture(90 + number, home / "val" / "b" / f"{number}.JPG")
    (home / "train" / "a" / "notes.txt").write_text("not an image")
    (home / "train" / "a" / ".hidden.png").write_text("not an image")
    return home


MAKERS: dict[str, tuple[Callable[[Path], Path], Callable[..., Data]]] = {
    "flowers": (flowers, flowers102),
    "cub": (cub, cub200),
    "folder": (folders, image_folder),
}


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[..., Data]]:
    make, read = MAKERS[request.param]
    return make(tmp_path / "set"), read


def stored(file: Path) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1)


def normalised(files: list[Path]) -> Tensor:
    pixels = torch.tensor(np.stack([stored(file) for file in files])).double()
    return ((pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)).float()


def epoch(batches: object) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)  # type: ignore[call-overload]
    return torch.cat(x), torch.cat(y)


def test_flowers_train_on_two_parts_and_validate_on_the_third(tmp_path: Path) -> None:
    home = flowers(tmp_path / "set")
    data = flowers102(home, batch=4, side=SIDE)
    assert (data.classes, data.image_side, data.train_samples, data.val_samples) == (3, SIDE, 4, 6)
    assert data.about == "Flowers-102: 4 training and 6 validation images, 16 px, 3 classes"
    x, y = epoch(data.val)
    assert y.tolist() == [0, 1, 2, 1, 2, 0]
    torch.testing.assert_close(x, normalised([home / "jpg" / f"image_{n:05}.jpg" for n in (1, 5, 6, 8, 9, 10)]))
    source = data.train.source
    assert source.labels.tolist() == [0, 1, 2, 0]  # type: ignore[attr-defined]
    assert np.array_equal(source.images[0], stored(home / "jpg" / "image_00004.jpg"))  # type: ignore[attr-defined]


def test_cub_follows_its_split(tmp_path: Path) -> None:
    home = cub(tmp_path / "CUB_200_2011")
    for folder in (home, tmp_path):
        data = cub200(folder, batch=4, side=SIDE)
        assert (data.classes, data.train_samples, data.val_samples) == (2, 5, 3)
        x, y = epoch(data.val)
        assert y.tolist() == [0, 0, 1]
        names = ("001.Bird_1/Bird_1_1.jpg", "001.Bird_1/Bird_1_3.jpg", "002.Bird_2/Bird_2_2.jpg")
        torch.testing.assert_close(x, normalised([home / "images" / name for name in names]))


@pytest.mark.parametrize("memory", [2**30, 1])
def test_cub_crops_the_centre_and_flips_nothing_by_default(tmp_path: Path, memory: int) -> None:
    home = cub(tmp_path / "set")
    file = home / "images" / "001.Bird_1" / "Bird_1_1.jpg"
    picture(7, file, (3 * SIDE, 2 * SIDE + 1))
    whole = torch.tensor(stored(file))
    data = cub200(home, batch=4, side=SIDE, memory=memory, workers=1)
    assert not data.train.flip
    top, left = (SIDE + 1) // 2, SIDE
    expected = whole[:, top : top + SIDE, left : left + SIDE].double()
    expected = (expected - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(epoch(data.val)[0][0], expected.float())
    scaled = cub200(home, batch=4, side=SIDE, memory=memory, workers=1, resize=True, flip=True)  # not the cached ones
    assert scaled.train.flip
    assert not torch.allclose(epoch(scaled.val)[0][0], expected.float(), atol=0.1)


def test_an_image_that_is_smaller_than_the_crop_is_scaled_up_until_it_covers_it(tmp_path: Path) -> None:
    picture(1, tmp_path / "a.png", (12, 40))
    assert decode(tmp_path / "a.png", SIDE, resize=False).shape == (3, SIDE, SIDE)
    assert np.array_equal(decode(tmp_path / "a.png", SIDE, resize=False), decode(tmp_path / "a.png", SIDE))


def test_folders_are_classes(tmp_path: Path) -> None:
    data = image_folder(folders(tmp_path / "mine"), batch=3, side=SIDE)
    assert (data.classes, data.train_samples, data.val_samples) == (2, 8, 3)
    assert epoch(data.val)[1].tolist() == [1, 1, 1]
    assert sorted(epoch(data.train)[1].tolist()) == [0] * 4 + [1] * 4
    assert data.about == "mine: 8 training and 3 validation images, 16 px, 2 classes"


def test_an_image_is_cropped_to_its_central_square_and_scaled(tmp_path: Path) -> None:
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 20:40] = (200, 0, 0)
    wide[:, 40:60] = (0, 0, 200)  # the central square is half red, half blue
    Image.fromarray(wide).save(tmp_path / "wide.png")
    small = decode(tmp_path / "wide.png", 10)
    assert small.shape == (3, 10, 10)
    assert (small[0, :, 1:4] == 200).all()
    assert (small[2, :, 6:9] == 200).all()
    Image.fromarray(wide).convert("L").save(tmp_path / "grey.png")
    assert decode(tmp_path / "grey.png", 10).shape == (3, 10, 10)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_epochs_read_from_disk_equal_those_from_memory(made: tuple[Path, Callable[..., Data]]) -> None:
    folder, read = made
    sets = [read(folder, batch=3, side=SIDE, memory=memory, workers=2) for memory in (2**30, 1)]
    assert sets[1].about.endswith(", streamed")
    epochs = []
    for data in sets:
        torch.manual_seed(3)
        epochs.append((*epoch(data.train), *epoch(data.train)))
        state = torch.get_rng_state()
        epochs[-1] += epoch(data.val)
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    assert not torch.equal(epochs[0][0], epochs[0][2])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_damaged_image_is_named(made: tuple[Path, Callable[..., Data]]) -> None:
    folder, read = made
    file = sorted(folder.rglob("[!.]*.[jp][pn]g"))[0]
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no picture"):
        file.write_bytes(content)
        with pytest.raises(
            OSError, match=rf"{file.name} must be an image, but cannot be read .*check that it is complete"
        ) as caught:
            read(folder, batch=2, side=SIDE)
        assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match=rf"{file.name} must be an image, but cannot be read") as caught:
        [list(loader) for data in [read(folder, batch=1, side=SIDE, memory=1)] for loader in (data.train, data.val)]
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    home = flowers(tmp_path / "flowers")
    (home / "jpg" / "image_00005.jpg").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"must hold the 10 images of Flowers-102, got 1 fewer; the first missing is .*image_00005.jpg",
    ):
        flowers102(home, batch=2)
    (home / "setid.mat").write_bytes((home / "setid.mat").read_bytes()[:150])
    with pytest.raises(ValueError, match=r"setid.mat must hold integers named 'trnid', but cannot be read"):
        flowers102(home, batch=2)
    (home / "imagelabels.mat").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"folder must hold jpg/, imagelabels.mat and setid.mat of Flowers-102, got no .*imagelabels.mat",
    ):
        flowers102(home, batch=2)
    home = cub(tmp_path / "cub")
    (home / "image_class_labels.txt").write_text("1 1\n2 x\n")
    with pytest.raises(ValueError, match=r"image_class_labels.txt: the value of image 2 must be an integer, got 'x'"):
        cub200(home, batch=2)
    (home / "images.txt").write_text("1 a.jpg\nb.jpg\n")
    with pytest.raises(ValueError, match=r"images.txt: line 2 must be .*, got 'b.jpg'"):
        cub200(home, batch=2)
    home = folders(tmp_path / "folder")
    (home / "val" / "c").mkdir()
    with pytest.raises(ValueError, match=r"val must have the classes of .*train, got also c"):
        image_folder(home, batch=2)
    with pytest.raises(FileNotFoundError, match=r"nowhere/train must be a folder with one folder per class"):
        image_folder(tmp_path / "nowhere", batch=2)


def test_flowers_whose_numbers_do_not_agree(tmp_path: Path) -> None:
    home = flowers(tmp_path / "set")
    savemat(home / "imagelabels.mat", {"labels": np.array([[1, 2, 3]])})
    with pytest.raises(ValueError, match=r"setid.mat: trnid must be from 1 to 3, got 2 to 4"):
        flowers102(home, batch=2)


def test_the_cache_follows_the_files(
    made: tuple[Path, Callable[..., Data]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = made
    decoded: list[Path] = []
    monkeypatch.setattr(
        decoding, "decode", lambda file, side, **given: decoded.append(file) or decode(file, side, **given)
    )
    before = sorted(folder.rglob("*"))

    def load(**options: object) -> tuple[Tensor, int]:
        decoded.clear()
        return epoch(read(folder, batch=4, **{"side": SIDE} | options).val)[0], len(decoded)

    first, count = load()
    assert count > 0
    assert sorted(folder.rglob("*")) == before  # nothing is written beside the data
    (kept,) = cache.iterdir()
    again, count = load()
    assert count == 0
    assert torch.equal(again, first)
    assert load(side=8)[1] > 0  # another size is another entry
    assert len(list(cache.iterdir())) == 2
    kept.write_bytes(kept.read_bytes()[:-50])  # a damaged entry is made anew
    again, count = load()
    assert count > 0
    assert torch.equal(again, first)
    for file in folder.rglob("[!.]*.[jpJ][pnP][gG]"):  # other images under the same names
        picture(77, file)
        os.utime(file, ns=(1, 1))
    changed, count = load()
    assert count > 0
    assert not torch.equal(changed, first)


def test_without_the_cache(made: tuple[Path, Callable[..., Data]], cache: Path) -> None:
    folder, read = made
    read(folder, batch=4, side=SIDE, cache=False)
    assert not cache.exists()
    cache.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="the decoded images could not be cached"):
        read(folder, batch=4, side=SIDE)


def test_a_limit_reads_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Path] = []
    monkeypatch.setattr(
        decoding, "decode", lambda file, side, **given: decoded.append(file) or decode(file, side, **given)
    )
    data = image_folder(folders(tmp_path / "set"), batch=2, side=SIDE, limit=4)
    assert len(decoded) == 4 + 3
    assert sorted(epoch(data.train)[1].tolist()) == [0, 0, 1, 1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folders(tmp_path / "set")
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        image_folder(home, batch=2, side=SIDE, cache=False)
        assert ("decoding 11 images" in stream.getvalue()) == shown
        assert shown or not stream.getvalue()


@pytest.mark.parametrize("field", ["side", "batch", "memory", "workers"])
def test_image_folder_refuses_options_below_1(field: str, tmp_path: Path) -> None:
    options = {"batch": 2} | {field: 0}
    with pytest.raises(ValueError, match=rf"^{field} must be an integer ≥ 1, got 0$"):
        image_folder(folders(tmp_path / "set"), **options)  # type: ignore[arg-type]
