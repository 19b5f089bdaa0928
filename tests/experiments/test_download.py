import errno
import hashlib
import http.server
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_sets import write_cifar

from bln.experiments import data, download
from bln.experiments.data import DataError

TOP = "cifar-10-batches-bin"
PART = "cifar.tar.gz.part"


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`, with ranges; `script` holds what to do instead for the next requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag = b"", '"1"'
        self.script, self.ranges = [], []
        self.end = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/cifar.tar.gz"

    def handle_error(self, request, client_address):
        pass  # clients leave when they have seen enough


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.ranges.append(self.headers.get("Range"))
        action = self.server.script.pop(0) if self.server.script else serve
        action(self)

    def answer(self, status, body, sends=None, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if sends is None else body[:sends])


def serve(handler, sends=None, **headers):
    content, etag = handler.server.content, handler.server.etag
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    if asked is None or handler.headers.get("If-Range", etag) != etag:
        handler.answer(200, content, sends, ETag=etag, **headers)
        return
    start = int(asked[1])
    if start >= len(content):
        handler.answer(416, b"")
        return
    span = f"bytes {start}-{len(content) - 1}/{len(content)}"
    handler.answer(206, content[start:], sends, ETag=etag, Content_Range=span, **headers)


def without_ranges(handler):
    handler.answer(200, handler.server.content)


def without_length(handler):
    handler.answer(200, handler.server.content, Content_Length=None)


def cut(sends):
    return lambda handler: serve(handler, sends)


def status(number):
    return lambda handler: handler.answer(number, b"sorry")


def hang(handler):
    handler.server.end.wait(20)


def hang_halfway(handler):
    serve(handler, len(handler.server.content) // 2)
    handler.wfile.flush()
    handler.server.end.wait(20)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.end.set()
    server.shutdown()
    server.server_close()
    thread.join()


def pack(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return buffer.getvalue()


def offer(server, monkeypatch, content, **changes):
    """Make this the published archive, and serve it."""
    server.content = content
    archive = {
        "url": server.url, "size": len(content), "md5": hashlib.md5(content).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(), "unpacked": 200_000,
    }  # fmt: skip
    monkeypatch.setattr(download, "ARCHIVES", {"cifar10": download.Archive(**(archive | changes))})


@pytest.fixture
def published(server, tmp_path, rng, monkeypatch):
    """A server with a tiny CIFAR-10, and its folder as it was packed."""
    original = tmp_path / "original"
    original.mkdir()
    files, _ = write_cifar(original, rng)
    monkeypatch.setattr(data, "_CIFAR10", files)
    monkeypatch.setattr(download, "_WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(download, "_TIMEOUT", 10.0)
    monkeypatch.setattr(download, "_CHUNK", 1000)
    offer(server, monkeypatch, pack(original / TOP))
    return original


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def get(folder):
    return download.get("cifar10", folder, progress=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_complete(folder, original):
    assert names(folder) == [TOP]
    for ours, theirs in zip(data.cifar10(folder), data.cifar10(original), strict=True):
        assert torch.equal(ours, theirs)


def refused(folder, says):
    with pytest.raises(DataError, match=says) as error:
        get(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def leave_part(folder, content):
    folder.mkdir()
    (folder / PART).write_bytes(content)


# ---- what goes well


def test_data_set_is_downloaded_checked_and_unpacked(published, folder, capfd):
    assert download.get("cifar10", folder / "deep" / "er") == folder / "deep" / "er" / TOP
    assert_complete(folder / "deep" / "er", published)
    assert f"cifar10 is in {folder / 'deep' / 'er' / TOP}" in capfd.readouterr().err


def test_reviews_are_downloaded_checked_and_unpacked(published, server, folder, tmp_path, monkeypatch):
    for part, rating in (("train/pos", 7), ("train/neg", 1), ("train/unsup", 0), ("test/pos", 10), ("test/neg", 4)):
        (tmp_path / "aclImdb" / part).mkdir(parents=True)
        (tmp_path / "aclImdb" / part / f"0_{rating}.txt").write_text("A film")
    monkeypatch.setattr(data, "_IMDB", data._IMDBFiles(reviews=1, words=2))
    offer(server, monkeypatch, pack(tmp_path / "aclImdb"))
    monkeypatch.setattr(download, "ARCHIVES", {"imdb": download.ARCHIVES["cifar10"]})
    assert download.get("imdb", folder, progress=False) == folder / "aclImdb"
    assert data.imdb(folder, length=3).train_tokens[:, 0].tolist() == [1, 1]
    assert download.get("imdb", folder, progress=False) == folder / "aclImdb"
    assert len(server.ranges) == 1


def test_data_set_that_is_there_is_left_alone(published, server, folder, capfd):
    get(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert capfd.readouterr().err == ""
    assert download.get("cifar10", folder) == folder / TOP
    assert "already there and complete" in capfd.readouterr().err
    assert download.get("cifar10", folder / TOP, progress=False) == folder / TOP
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert len(server.ranges) == 1


def test_data_set_that_is_there_but_damaged_is_named_and_left_alone(published, server, folder):
    get(folder)
    (folder / TOP / "test_batch.bin").write_bytes(b"mine")
    assert f"remove {folder / TOP}" in refused(folder, "4 bytes")
    assert (folder / TOP / "test_batch.bin").read_bytes() == b"mine"
    assert len(server.ranges) == 1


def test_other_address_is_asked_in_place_of_the_publishers(published, server, folder, monkeypatch):
    offer(server, monkeypatch, server.content, url="http://127.0.0.1:1/cifar.tar.gz")
    server.script = [lambda handler: handler.answer(302, b"", Location="/moved"), serve]
    download.get("cifar10", folder, url=server.url.replace("cifar", "mirror"), progress=False)
    assert_complete(folder, published)


def test_archive_that_lies_there_is_used_and_kept(published, server, folder):
    folder.mkdir()
    (folder / "cifar.tar.gz").write_bytes(server.content)
    get(folder)
    assert server.ranges == []
    assert names(folder) == [TOP, "cifar.tar.gz"]


def test_archive_that_lies_there_but_differs_is_neither_used_nor_touched(published, server, folder):
    folder.mkdir()
    (folder / "cifar.tar.gz").write_bytes(b"mine")
    get(folder)
    assert (folder / "cifar.tar.gz").read_bytes() == b"mine"
    data.cifar10(folder)


# ---- going on where it stopped


def test_partial_download_is_resumed(published, server, folder, rng):
    at = int(rng.integers(1, len(server.content)))
    leave_part(folder, server.content[:at])
    get(folder)
    assert_complete(folder, published)
    assert server.ranges == [f"bytes={at}-"]


def test_whole_download_is_not_asked_for_again(published, server, folder):
    leave_part(folder, server.content)
    get(folder)
    assert_complete(folder, published)
    assert server.ranges == []


@pytest.mark.parametrize("action", [without_ranges, without_length])
def test_server_without_ranges_starts_over(published, server, folder, action):
    leave_part(folder, b"x" * 5000)
    server.script = [action]
    get(folder)
    assert_complete(folder, published)
    assert len(server.ranges) == 1


def test_connection_that_breaks_is_resumed(published, server, folder, rng):
    at = int(rng.integers(1, len(server.content)))
    server.script = [cut(at)]
    get(folder)
    assert_complete(folder, published)
    assert server.ranges == [None, f"bytes={at}-"]


def test_file_that_changes_between_pieces_is_taken_whole(published, server, folder):
    def replace(handler):
        good, server.content = server.content, b"x" * len(server.content)
        serve(handler, 5000)
        server.content, server.etag = good, '"2"'

    server.script = [replace]
    get(folder)
    assert_complete(folder, published)
    assert server.ranges == [None, "bytes=5000-"]  # answered with the whole, since the tag differs


def test_pieces_that_do_not_fit_are_downloaded_again(published, server, folder):
    for damaged in (b"x" * 5000, b"x" * len(server.content), b"x" * (len(server.content) + 1)):
        leave_part(folder, damaged)
        get(folder)
        assert_complete(folder, published)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "action",
    [
        status(416),
        lambda handler: handler.answer(206, handler.server.content[4000:], Content_Range="bytes 4000-9/*"),
        lambda handler: handler.answer(206, handler.server.content[5000:], Content_Range="bytes 5000-9/10"),
        lambda handler: handler.answer(206, handler.server.content[5000:]),
    ],
)
def test_answer_to_another_question_starts_over(published, server, folder, action):
    leave_part(folder, server.content[:5000])
    server.script = [action]
    get(folder)
    assert_complete(folder, published)
    assert server.ranges == ["bytes=5000-", None]


# ---- what may pass


def test_piece_that_nobody_asked_for_is_not_taken(published, server, folder):
    server.script = [lambda handler: handler.answer(206, b"x" * 10, Content_Range="bytes 5-14/20")]
    get(folder)
    assert_complete(folder, published)


@pytest.mark.parametrize("number", [429, 500, 503])
def test_busy_server_is_asked_again(published, server, folder, number):
    server.script = [status(number), status(number)]
    get(folder)
    assert_complete(folder, published)
    assert len(server.ranges) == 3


def test_server_that_stays_busy_is_left_with_what_came(published, server, folder):
    server.script = [cut(5000), *[status(503)] * 20]
    message = refused(folder, "503 Service Unavailable")
    assert "5,000 of" in message
    assert names(folder) == [PART]
    assert len(server.ranges) == 4
    server.script = []
    get(folder)
    assert server.ranges[-1] == "bytes=5000-"
    assert_complete(folder, published)


def test_long_download_over_a_bad_line_gets_on(published, server, folder, monkeypatch):
    # Each connection gives a megabyte, and there are more of them than tries.
    rest = os.urandom(5 * 2**20)
    (published / TOP / "more").write_bytes(rest)
    offer(server, monkeypatch, pack(published / TOP), unpacked=2**24)
    monkeypatch.setattr(download, "_WAITS", (0.01,))
    monkeypatch.setattr(download, "_CHUNK", 2**16)
    server.script = [cut(2**20 + 1)] * 5
    get(folder)
    assert (folder / TOP / "more").read_bytes() == rest


@pytest.mark.parametrize("action", [hang, hang_halfway])
def test_silent_server_is_not_waited_for(published, server, folder, action, monkeypatch):
    monkeypatch.setattr(download, "_TIMEOUT", 0.3)
    server.script = [action]
    start = time.monotonic()
    get(folder)
    assert time.monotonic() - start < 10  # far more than 0.3 s for a busy machine, far less than the server's 20
    assert_complete(folder, published)


def test_server_that_stays_silent_is_named_so(published, server, folder, monkeypatch):
    monkeypatch.setattr(download, "_TIMEOUT", 0.1)
    server.script = [hang] * 20
    refused(folder, "no answer for 0.1 s, 4 times")


def test_closed_port_is_one_line(published, folder, server):
    server.server_close()
    refused(folder, "Connection refused")


# ---- what does not pass


def test_answer_that_says_no_is_not_repeated(published, server, folder):
    server.script = [status(404)]
    refused(folder, "404 Not Found")
    assert len(server.ranges) == 1


def test_content_that_lies_is_removed(published, server, folder):
    server.content = server.content[:-1] + bytes([server.content[-1] ^ 1])
    message = refused(folder, "md5 .* published is .* removed")
    assert hashlib.md5(server.content).hexdigest() in message
    assert names(folder) == []


def test_forged_md5_is_found_by_sha256(published, server, folder, monkeypatch):
    offer(server, monkeypatch, server.content, sha256="0" * 64)
    refused(folder, "sha256 .* published is 000")


def test_file_of_another_size_is_refused_before_what_came_is_lost(published, server, folder):
    leave_part(folder, server.content[:5000])
    server.script = [lambda handler: handler.answer(200, b"<html>Please log in</html>")]
    refused(folder, "has 26 bytes, expected")
    assert (folder / PART).stat().st_size == 5000


def test_unknown_names_and_addresses_are_refused(published, folder):
    with pytest.raises(DataError, match="'mnist' to download, expected one of: cifar10"):
        download.get("mnist", folder)
    for url in ("file:///etc/passwd", "ftp://host/file", "cifar.tar.gz"):
        with pytest.raises(DataError, match="starts with http"):
            download.get("cifar10", folder, url=url)
    assert not folder.exists()


def test_folder_that_cannot_be_made_is_one_line(published, folder):
    folder.write_text("a file")
    assert "use another --data-dir" in refused(folder, "cannot put cifar10 into")


# ---- full disks


class FullDisk:
    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.file.close()

    def write(self, chunk):
        self.file.write(chunk[: self.room])
        if len(chunk) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(chunk)


def test_disk_that_fills_while_downloading_keeps_what_came(published, server, folder, monkeypatch):
    def opened(path, mode="r", *args, **kwargs):
        file = plain(path, mode, *args, **kwargs)
        return FullDisk(file, 4500) if path.name == PART and "b" in mode and mode != "rb" else file

    plain = pathlib.Path.open
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", opened)
        assert "make room and run it again" in refused(folder, "No space left on device")
    assert len(server.ranges) == 1
    assert names(folder) == [PART]
    get(folder)
    assert server.ranges[1] == "bytes=4500-"
    assert_complete(folder, published)


def test_disk_that_fills_while_unpacking_keeps_the_archive(published, server, folder, monkeypatch):
    def fill(source, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fill)
        assert "make room and run it again" in refused(folder, "No space left on device")
    assert names(folder) == [PART]
    get(folder)
    assert len(server.ranges) == 1
    assert_complete(folder, published)


# ---- archives


def member(name, content=b"bad", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, io.BytesIO(content)


def archive_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            tar.addfile(info, content if info.size else None)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (member("../escaped"), "not a path in"),
        (member(f"{TOP}/../../escaped"), "not a path in"),
        (member(f"{TOP}/a/../../../escaped"), "not a path in"),
        (member("/tmp/bln-escaped"), "not a path in"),
        (member("other/file"), "not a path in"),
        (member("file"), "not a path in"),
        (member("."), "not a path in"),
        (member(f"{TOP}\\..\\..\\escaped"), "not a path in"),
        (member(f"C:/{TOP}/escaped"), "not a path in"),
        (member(f"{TOP}/c:stream"), "not a path in"),
        (member(f"{TOP}/link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "not a plain file"),
        (member(f"{TOP}/link", b"", type=tarfile.SYMTYPE, linkname="../.."), "not a plain file"),
        (member(f"{TOP}/link", b"", type=tarfile.LNKTYPE, linkname=f"{TOP}/test_batch.bin"), "not a plain file"),
        (member(f"{TOP}/device", b"", type=tarfile.CHRTYPE), "not a plain file"),
        (member(f"{TOP}/device", b"", type=tarfile.BLKTYPE), "not a plain file"),
        (member(f"{TOP}/pipe", b"", type=tarfile.FIFOTYPE), "not a plain file"),
        (member(f"{TOP}/bomb", b"\0" * 10**6), "more than 200,000 bytes"),
        (member(f"{TOP}/bomb", b"", pax_headers={"comment": "x" * 10**6}), "more than 200,000 bytes"),
    ],
    ids=lambda value: repr(value[0].name) if isinstance(value, tuple) else "",
)
def test_archive_that_reaches_out_of_its_folder_leaves_nothing(published, server, folder, bad, says, monkeypatch):
    offer(server, monkeypatch, archive_of(member(f"{TOP}/readme", b"fine"), bad))
    around = set(folder.parent.rglob("*"))
    refused(folder, says)
    assert names(folder) == [PART]
    assert set(folder.parent.rglob("*")) - around == {folder, folder / PART}
    assert not pathlib.Path("/tmp/bln-escaped").exists()


def test_link_is_never_followed_out_of_the_folder(published, server, folder, monkeypatch):
    members = [
        member(f"{TOP}/out", b"", type=tarfile.SYMTYPE, linkname=str(folder.parent)),
        member(f"{TOP}/out/escaped"),
    ]
    offer(server, monkeypatch, archive_of(*members))
    refused(folder, "not a plain file")
    assert not (folder.parent / "escaped").exists()


@pytest.mark.parametrize(
    "content", [b"no archive at all", b"", pack(pathlib.Path(__file__))[:500]], ids=["other", "empty", "cut"]
)
def test_file_that_is_no_archive_is_one_line(published, server, folder, content, monkeypatch):
    offer(server, monkeypatch, content)
    leave_part(folder, content)
    refused(folder, "cannot unpack|not a path in")
    assert names(folder) == [PART]


def test_archive_with_files_missing_does_not_become_a_data_set(published, server, folder, monkeypatch):
    (published / TOP / "data_batch_4.bin").unlink()
    offer(server, monkeypatch, pack(published / TOP))
    refused(folder, "data_batch_4.bin")
    assert names(folder) == [PART]


def test_modes_in_an_archive_are_not_taken(published, server, folder, monkeypatch):
    def harmful(info):
        info.mode, info.uid, info.uname = 0o4777, 12345, "someone"
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(published / TOP, TOP, filter=harmful)
    offer(server, monkeypatch, buffer.getvalue())
    file = (get(folder) / "test_batch.bin").stat()
    assert file.st_mode & 0o7111 == 0
    assert file.st_uid == os.getuid()


# ---- several processes


def test_several_at_once_download_once(published, server, folder):
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda _: get(folder), range(4)))
    assert places == [folder / TOP] * 4
    assert_complete(folder, published)
    assert len(server.ranges) == 1


def test_process_that_waits_says_so(published, server, folder, capfd):
    def show(handler):
        second.start()
        while "Another process is at work" not in capfd.readouterr().err and time.monotonic() < end:
            time.sleep(0.01)
        serve(handler)

    end = time.monotonic() + 20
    second = threading.Thread(target=download.get, args=("cifar10", folder))
    server.script = [show]
    get(folder)
    assert time.monotonic() < end
    second.join()
    assert_complete(folder, published)


def test_killed_process_leaves_no_lock_and_no_half_data_set(published, server, folder):
    archive = download.ARCHIVES["cifar10"]
    program = f"""
        from bln.experiments import download
        download.ARCHIVES["cifar10"] = download.{archive!r}
        download._CHUNK = 1000
        download.get("cifar10", {str(folder)!r}, progress=False)
    """
    server.script = [hang_halfway]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        end = time.monotonic() + 60
        while not (folder / PART).exists() or (folder / PART).stat().st_size < 1000:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / TOP).exists()
    (folder / f".{TOP}.unpacking" / TOP).mkdir(parents=True)  # as one that was killed a little later leaves it
    (folder / f".{TOP}.unpacking" / TOP / "data_batch_1.bin").write_bytes(b"half")
    get(folder)
    assert_complete(folder, published)
    assert server.ranges[1].startswith("bytes=")


# ---- the published archives


def test_published_archives_are_whole_entries():
    assert set(download.ARCHIVES) == set(data.TOP)
    for archive in download.ARCHIVES.values():
        assert archive.url.startswith("https://")
        assert re.fullmatch("[0-9a-f]{32}", archive.md5)
        assert re.fullmatch("[0-9a-f]{64}", archive.sha256)
        assert archive.unpacked > archive.size
