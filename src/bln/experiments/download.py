"""Getting the data sets from their publishers: download, verify, unpack.

A data set appears in its folder complete or not at all: what comes is kept aside until its size and hashes are those
published, is unpacked aside, checked, and then renamed. What an interrupted download left is used by the next one.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import os
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from .._progress import track
from . import data
from .data import DataError, PathLike

Say = Callable[[str], None]


@dataclass(frozen=True)
class Archive:
    """What a publisher offers."""

    url: str
    size: int
    """In bytes."""
    md5: str
    """Published with it."""
    sha256: str
    """Of the same file, since an md5 can be forged."""
    unpacked: int
    """More bytes than this are never unpacked."""


ARCHIVES = {
    "cifar10": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        size=170_052_171,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        unpacked=250_000_000,
    ),
    "imdb": Archive(
        url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        size=84_125_825,
        md5="7c2ac02c03563afcf9b574c7e56c153a",
        sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        unpacked=1_000_000_000,
    ),
}

_TIMEOUT = 30.0
"""Seconds without an answer."""
_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each new try."""
_CHUNK = 2**16
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


def get(name: str, folder: PathLike, *, url: str | None = None, progress: bool = True) -> Path:
    """Put a data set into ``folder``, unless it is there, and return where it is.

    An archive that lies in ``folder`` under the publisher's name is used in place of a download.

    Args:
        name: ``cifar10`` or ``imdb``.
        folder: Made if it is not there.
        url: Another address of the same archive.
        progress: Tell on standard error what is being done.

    Raises:
        DataError: Where the data set cannot be had; it says why, in a line.
    """
    if name not in ARCHIVES:
        raise DataError(f"there is no data set {name!r} to download, expected one of: {', '.join(ARCHIVES)}")
    archive, say = ARCHIVES[name], _tell if progress else _keep_quiet
    url = url or archive.url
    if not url.startswith(("http://", "https://")):
        raise DataError(f"cannot download {url}, expected an address that starts with http:// or https://")
    folder = Path(folder).expanduser()
    try:
        if data.locate(name, folder) is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder / f".{data.TOP[name]}.lock", say):
                if data.locate(name, folder) is None:  # another process may have got it in the meantime
                    return _get(name, archive, url, folder, say)
    except OSError as error:
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = "make room and run it again, what has come is kept" if full else "use another --data-dir"
        raise DataError(f"cannot put {name} into {folder}: {what}; {way}") from error
    place = data.locate(name, folder)
    assert place is not None
    data.check(name, place)
    say(f"{name} is already there and complete: {place}")
    return place


def _get(name: str, archive: Archive, url: str, folder: Path, say: Say) -> Path:
    top = data.TOP[name]
    file = folder / PurePosixPath(archive.url).name
    part = file.with_name(f"{file.name}.part")
    if not file.is_file() or _difference(file, archive):
        _download(archive, url, part, say)
        file = part
    aside = folder / f".{top}.unpacking"
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed: this one holds the lock
    try:
        aside.mkdir()
        _unpack(file, archive, aside, top, say)
        data.check(name, aside / top)
        (aside / top).rename(folder / top)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    part.unlink(missing_ok=True)
    say(f"{name} is in {folder / top}")
    return folder / top


@contextmanager
def _alone(path: Path, say: Say) -> Iterator[None]:
    """Wait until no other process is here. The system frees the lock of a process that dies."""
    waiting = False
    while True:
        file = path.open("ab")
        try:
            _lock(file)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        except FileNotFoundError:
            pass  # the one who had it has removed the file
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                file.close()
                raise
            if not waiting:
                say(f"Another process is at work in {path.parent}; waiting for it")
            waiting = True
            time.sleep(0.2)
        file.close()
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove open files
            path.unlink()
        file.close()


def _lock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keep_quiet(text: str) -> None:
    pass


# ---- downloading


class _BrokenError(Exception):
    """The network failed, and may not the next time."""


def _download(archive: Archive, url: str, part: Path, say: Say) -> None:
    """Leave the published archive in ``part``."""
    pieces = _fetch(archive, url, part, say)
    difference = _difference(part, archive)
    if difference and pieces:
        # They may be of different files, or the first one was damaged.
        say(f"{part.name} was put together from pieces and {difference}; starting over")
        part.unlink()
        _fetch(archive, url, part, say)
        difference = _difference(part, archive)
    if difference:
        part.unlink()
        raise DataError(f"what {url} sent {difference}; it was removed. Try again later, or give another url")


def _fetch(archive: Archive, url: str, part: Path, say: Say) -> bool:
    """Download until ``part`` has the archive's size, and tell whether it was put together from pieces."""
    if _size(part) > archive.size:
        part.unlink()
    pieces = _size(part) > 0
    validator: str | None = None
    failures = 0
    while (have := _size(part)) < archive.size:
        try:
            with _open(url, have, validator, part) as response:
                start = _start(response, have, archive, url, part)
                pieces = start > 0
                if have and not start:
                    say(f"{url} sends the file from its beginning; starting over")
                validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
                _receive(response, start, archive, part, say)
            reason = "the connection ended early"
        except _BrokenError as error:
            reason = str(error)
        if (now := _size(part)) == archive.size:
            break
        failures = 1 if now >= have + 2**20 else failures + 1  # a bad line may break often, as long as it gets on
        if failures > len(_WAITS):
            raise DataError(
                f"cannot download {url}: {reason}, {failures} times; {now:,} of {archive.size:,} bytes have come and "
                "are kept. Run it again to go on, or give another url"
            )
        say(f"{reason}; trying again in {_WAITS[failures - 1]:g} s")
        time.sleep(_WAITS[failures - 1])
    return pieces


def _open(url: str, have: int, validator: str | None, part: Path) -> Any:
    headers = {"Accept-Encoding": "identity", "User-Agent": "batch-layer-norm"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator and not validator.startswith("W/"):
            headers["If-Range"] = validator  # the whole file, should it have changed since
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            part.unlink()  # no such bytes: not the file we have the beginning of
        elif error.code not in _TRANSIENT:
            raise DataError(f"{url} answered {error.code} {error.reason}; give another url") from error
        raise _BrokenError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(_reason(error)) from error


def _start(response: Any, have: int, archive: Archive, url: str, part: Path) -> int:
    """The byte an answer begins with: ``have``, or 0. A file of another size is refused before anything is lost."""
    if response.status == 206:
        answer = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer)
        if match and int(match[1]) == have and match[2] in ("*", str(archive.size)):
            return have
        part.unlink(missing_ok=True)
        raise _BrokenError(f"{url} sent {answer!r}, asked for byte {have} on of {archive.size}")
    length = response.headers.get("Content-Length", str(archive.size))
    if length != str(archive.size):
        raise DataError(f"{url} has {length} bytes, expected {archive.size}: not the published file; give another url")
    return 0


def _receive(response: Any, start: int, archive: Archive, part: Path, say: Say) -> None:
    chunks = _Chunks(response, archive.size - start)
    shown = track(chunks, f"Downloading {part.stem}") if say is _tell else iter(chunks)
    with part.open("ab" if start else "wb") as file, closing(shown):
        for chunk in shown:
            file.write(chunk)


class _Chunks:
    """The next ``size`` bytes of an answer, piece by piece; a network error is a `_BrokenError`, unlike a disk's."""

    def __init__(self, response: Any, size: int) -> None:
        self._response = response
        self._size = size

    def __len__(self) -> int:
        return -(-self._size // _CHUNK)

    def __iter__(self) -> Generator[bytes]:
        left = self._size
        while left:
            try:
                chunk = self._response.read(min(_CHUNK, left))
            except (OSError, http.client.HTTPException) as error:
                raise _BrokenError(_reason(error)) from error
            if not chunk:
                return
            left -= len(chunk)
            yield chunk


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    return f"no answer for {_TIMEOUT:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _difference(path: Path, archive: Archive) -> str | None:
    """How a file differs from the published one."""
    if _size(path) != archive.size:
        return f"has {_size(path):,} bytes, expected {archive.size:,}"
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            md5.update(chunk)
            sha256.update(chunk)
    for kind, found, expected in (("md5", md5, archive.md5), ("sha256", sha256, archive.sha256)):
        if found.hexdigest() != expected:
            return f"has the {kind} {found.hexdigest()}, published is {expected}"
    return None


# ---- unpacking


def _unpack(path: Path, archive: Archive, aside: Path, top: str, say: Say) -> None:
    """Write the files of an archive below ``aside``.

    Only plain files and folders under ``top`` are taken, and only their contents: no links, modes or owners.
    """
    try:
        with (
            gzip.open(path) as unzipped,
            tarfile.open(fileobj=_Limited(unzipped, archive.unpacked), mode="r|") as tar,  # type: ignore[call-overload]
        ):
            for member in track(tar, f"Unpacking {top}") if say is _tell else tar:
                target = aside / _checked(member, top)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with source, target.open("xb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"cannot unpack {path}: {error}; remove it and run it again") from error


def _checked(member: tarfile.TarInfo, top: str) -> PurePosixPath:
    path = PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()) or member.issparse():
        problem = "which is not a plain file or folder"
    elif path.is_absolute() or ".." in path.parts or path.parts[:1] != (top,) or re.search(r"[\\:\0]", member.name):
        problem = f"which is not a path in {top}"
    else:
        return path
    raise DataError(f"the archive holds {member.name!r}, {problem}; it is not unpacked")


class _Limited:
    """A file that may not be longer than expected, since a few bytes can unpack to any number."""

    def __init__(self, file: gzip.GzipFile, limit: int) -> None:
        self._file = file
        self._limit = self._left = limit

    def read(self, size: int) -> bytes:
        chunk = self._file.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(f"the archive unpacks to more than {self._limit:,} bytes; it is not unpacked")
        return chunk
