"""Download data sets from their publishers, verify and unpack them.

A data set appears in its folder complete or not at all. The archive is downloaded under another name, compared with the
published hash, unpacked into a temporary folder, checked, and then renamed. An interrupted download is resumed.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .._progress import track
from . import data
from .data import DataError, PathLike
from .runs import locked


@dataclass(frozen=True)
class Archive:
    """A publisher's archive."""

    url: str
    size: int
    """In bytes."""
    sha256: str


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "imdb": Archive(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", 84_125_825,
        "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    ),
}  # fmt: skip

_TIMEOUT = 30.0
"""Seconds to wait for an answer."""
_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each new try."""
_CHUNK = 2**16


def get(name: str, folder: PathLike, *, url: str | None = None) -> Path:
    """Put a data set into ``folder``, unless it is there, and return its path.

    If the archive lies in ``folder`` under the publisher's name, nothing is downloaded.

    Args:
        name: ``cifar10`` or ``imdb``.
        folder: Created where missing.
        url: Another address of the same archive.

    Raises:
        DataError: If the data set cannot be downloaded or is not the published one; a line says why.
    """
    if name not in ARCHIVES:
        raise DataError(f"there is no data set {name!r} to download, expected one of: {', '.join(ARCHIVES)}")
    url = url or ARCHIVES[name].url
    if not url.startswith(("http://", "https://")):
        raise DataError(f"cannot download {url}, expected an address that starts with http:// or https://")
    folder, top = Path(folder).expanduser(), data.TOP[name]
    place = data.locate(name, folder)
    if place is not None:
        data.check(name, place)
        _tell(f"{name} is already there and complete: {place}")
        return place
    with locked(folder / f".{top}.lock"):
        file = folder / PurePosixPath(ARCHIVES[name].url).name
        part = file.with_name(f"{file.name}.part")
        unpacking = folder / f".{top}.unpacking"
        if not file.is_file():
            _download(ARCHIVES[name], url, part)
        _unpack(file if file.is_file() else part, ARCHIVES[name], unpacking)
        data.check(name, unpacking / top)
        (unpacking / top).rename(folder / top)
        unpacking.rmdir()
        part.unlink(missing_ok=True)
    _tell(f"{name} is in {folder / top}")
    return folder / top


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _download(archive: Archive, url: str, part: Path) -> None:
    """Download the archive to ``part``, or what is missing of it; try again after transient errors."""
    for wait in (*_WAITS, None):
        try:
            if _size(part) < archive.size:
                _fetch(archive, url, part)
            return
        except (ConnectionError, TimeoutError, http.client.HTTPException, urllib.error.URLError) as error:
            refused = False
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                refused = error.code < 500 and error.code != 429
            if refused or wait is None:
                raise DataError(
                    f"cannot download {url}: {error}; {_size(part):,} of {archive.size:,} bytes have come and are "
                    "kept. Run it again to go on, or give another url"
                ) from error
            _tell(f"{error}; trying again in {wait:g} s")
            time.sleep(wait)


def _fetch(archive: Archive, url: str, part: Path) -> None:
    """Ask the server for the rest of ``part``. One that does not support ranges sends the whole file."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity", "User-Agent": "batch-layer-norm", "Range": f"bytes={have}-"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as response:
        resumed = response.status == 206
        left = archive.size - have if resumed else archive.size
        if int(response.headers.get("Content-Length", left)) != left:
            raise DataError(f"{url} is not the published file of {archive.size:,} bytes; give another url")
        with part.open("ab" if resumed else "wb") as file:
            for chunk in track(_Chunks(response, left), f"Downloading {part.stem}"):
                file.write(chunk)
    if _size(part) < archive.size:
        raise ConnectionError("the connection ended early")


class _Chunks:
    """The next ``size`` bytes of a response, in chunks."""

    def __init__(self, response: Any, size: int) -> None:
        self._response, self._size = response, size

    def __len__(self) -> int:
        return -(-self._size // _CHUNK)

    def __iter__(self) -> Generator[bytes]:
        left = self._size
        while chunk := self._response.read(min(_CHUNK, left)):
            left -= len(chunk)
            yield chunk


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _unpack(file: Path, archive: Archive, folder: Path) -> None:
    """Check the archive's hash, and unpack it into ``folder``."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != archive.sha256:
        raise DataError(f"{file} has the sha256 {digest}, published is {archive.sha256}; remove it and run it again")
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
    with tarfile.open(file) as tar:
        tar.extractall(folder, filter="data")
