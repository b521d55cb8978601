"""Image files as uint8 arrays of one size, decoded by several threads and cached.

The central square of an image is scaled to the requested side; an image of that size is unchanged. With `resize=False` the
centre is cropped without scaling; only an image that is too small is scaled up, until it covers the side.
"""

import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track

FORMAT = 1  # of the cache; increase it when decoding or scaling changes
Pixels = npt.NDArray[np.uint8]


def decode(file: Path, side: int, *, resize: bool = True) -> Pixels:
    """One image, (3, side, side)."""
    try:
        with Image.open(file) as image:
            rgb = image.convert("RGB")
            if not resize and min(rgb.size) >= side:
                left, top = ((length - side) // 2 for length in rgb.size)
                rgb = rgb.crop((left, top, left + side, top + side))
            square = ImageOps.fit(rgb, (side, side), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        raise FileNotFoundError(f"image must be an existing file, got {file}") from None
    # Pillow's decoders raise many exceptions
    except Exception as error:
        reason = " ".join(str(error).replace(str(file), "the file").split()) or type(error).__name__
        raise OSError(f"{file} must be an image, but cannot be read ({reason}); check that it is complete") from None
    return np.asarray(square).transpose(2, 0, 1)


def decode_all(files: Sequence[Path], side: int, *, workers: int, resize: bool = True) -> Pixels:
    """All images, (files, 3, side, side). Shows a progress bar on a terminal."""
    pixels = np.empty((len(files), 3, side, side), np.uint8)

    def fill(number: int) -> None:
        pixels[number] = decode(files[number], side, resize=resize)

    console = Console(stderr=True)
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(fill, range(len(files)))
        title = f"decoding {len(files):,} images"
        for _ in track(done, title, len(files), console=console, transient=True, disable=not sys.stderr.isatty()):
            pass
    return pixels


def decoded(files: Sequence[Path], side: int, *, name: str, workers: int, cache: bool, resize: bool = True) -> Pixels:
    """`decode_all`, from the cache if these files, unchanged, were decoded to this size before."""
    if not cache:
        return decode_all(files, side, workers=workers, resize=resize)
    kept = cache_folder() / f"{name}-{side}-{_key(files, side, resize)}.npy"
    try:
        pixels = np.load(kept, allow_pickle=False)
        if pixels.shape == (len(files), 3, side, side) and pixels.dtype == np.uint8:
            return pixels
    except (OSError, ValueError, EOFError):  # missing or damaged
        pass
    pixels = decode_all(files, side, workers=workers, resize=resize)
    try:
        _write(kept, pixels)
    except OSError as error:
        warnings.warn(
            f"{kept}: the decoded images could not be cached ({error}); pass cache=False to skip the cache",
            stacklevel=2,
        )
    return pixels


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "hgnp"


def _key(files: Sequence[Path], side: int, resize: bool) -> str:
    sha = hashlib.sha256(f"{FORMAT} {side}{'' if resize else ' cropped'}\n".encode())
    for file in files:
        facts = file.stat()
        sha.update(f"{file.absolute()}\0{facts.st_size} {facts.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()[:20]


def _write(file: Path, pixels: Pixels) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as written:
            np.save(written, pixels, allow_pickle=False)
            written.flush()
            os.fsync(written.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
