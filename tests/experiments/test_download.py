import hashlib
import http.server
import io
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
from dataclasses import replace

import pytest
import torch
from tiny_sets import write_cifar

from bln.experiments import data, download
from bln.experiments.data import DataError
from bln.experiments.runs import RunError, locked

TOP = "cifar-10-batches-bin"
PART = "cifar.tar.gz.part"


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`, with ranges; `script` holds what to do instead for the next requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = b""
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


def serve(handler, sends=None):
    content = handler.server.content
    start = int(re.fullmatch(r"bytes=(\d+)-", handler.headers["Range"])[1])
    if start >= len(content):
        handler.answer(416, b"")
        return
    span = f"bytes {start}-{len(content) - 1}/{len(content)}"
    handler.answer(206, content[start:], sends, Content_Range=span)


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


def offer(server, monkeypatch, content, name="cifar10"):
    """Make this the published archive, and serve it."""
    server.content = content
    archive = download.Archive(server.url, len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(download, "ARCHIVES", {name: archive})


@pytest.fixture
def published(server, tmp_path, rng, monkeypatch):
    """A server with a tiny CIFAR-10, and its folder as it was packed."""
    original = tmp_path / "original"
    original.mkdir()
    monkeypatch.setattr(data, "_CIFAR10", write_cifar(original, rng)[0])
    monkeypatch.setattr(download, "_WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(download, "_TIMEOUT", 10.0)
    monkeypatch.setattr(download, "_CHUNK", 1000)
    offer(server, monkeypatch, pack(original / TOP))
    return original


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def get(folder):
    return download.get("cifar10", folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


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
    monkeypatch.setattr(data, "_REVIEWS", 1)
    monkeypatch.setattr(data, "_WORDS", 2)
    offer(server, monkeypatch, pack(tmp_path / "aclImdb"), "imdb")
    for _ in range(2):
        assert download.get("imdb", folder) == folder / "aclImdb"
    assert data.imdb(folder, length=3).train[:, 0].tolist() == [1, 1]
    assert len(server.ranges) == 1


def test_data_set_that_is_there_is_left_alone(published, server, folder, capfd):
    get(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert get(folder) == get(folder / TOP) == folder / TOP
    assert "already there and complete" in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert len(server.ranges) == 1


def test_data_set_that_is_there_but_damaged_is_named_and_left_alone(published, server, folder):
    get(folder)
    (folder / TOP / "test_batch.bin").write_bytes(b"mine")
    assert f"remove {folder / TOP}" in refused(folder, "has the md5")
    assert (folder / TOP / "test_batch.bin").read_bytes() == b"mine"
    assert len(server.ranges) == 1


def test_other_address_is_asked_in_place_of_the_publishers(published, server, folder, monkeypatch):
    archive = download.ARCHIVES["cifar10"]
    monkeypatch.setattr(download, "ARCHIVES", {"cifar10": replace(archive, url="http://127.0.0.1:1/cifar.tar.gz")})
    server.script = [lambda handler: handler.answer(302, b"", Location="/moved"), serve]
    download.get("cifar10", folder, url=server.url.replace("cifar", "mirror"))
    assert_complete(folder, published)


def test_archive_that_lies_there_is_used_and_kept(published, server, folder):
    folder.mkdir()
    (folder / "cifar.tar.gz").write_bytes(server.content)
    get(folder)
    assert server.ranges == []
    assert names(folder) == [TOP, "cifar.tar.gz"]


def test_archive_that_lies_there_but_differs_is_named_and_left_alone(published, server, folder):
    folder.mkdir()
    (folder / "cifar.tar.gz").write_bytes(b"mine")
    refused(folder, r"cifar.tar.gz has the sha256 .* published is .*; remove it")
    assert names(folder) == ["cifar.tar.gz"]


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
    assert server.ranges == ["bytes=0-", f"bytes={at}-"]


def test_pieces_that_do_not_fit_are_found_by_their_hash(published, server, folder):
    for damaged in (b"x" * 5000, b"x" * len(server.content), b"x" * (len(server.content) + 1)):
        leave_part(folder, damaged)
        refused(folder, f"{PART} has the sha256 .* published is .*; remove it and run it again")
        (folder / PART).unlink()
        get(folder)
        assert_complete(folder, published)
        shutil.rmtree(folder)


# ---- what may pass


@pytest.mark.parametrize("number", [429, 500, 503])
def test_busy_server_is_asked_again(published, server, folder, number):
    server.script = [status(number), status(number)]
    get(folder)
    assert_complete(folder, published)
    assert len(server.ranges) == 3


def test_server_that_stays_busy_is_left_with_what_came(published, server, folder):
    server.script = [cut(5000), *[status(503)] * 20]
    message = refused(folder, "503: Service Unavailable")
    assert "5,000 of" in message
    assert names(folder) == [PART]
    assert len(server.ranges) == 4
    server.script = []
    get(folder)
    assert server.ranges[-1] == "bytes=5000-"
    assert_complete(folder, published)


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
    refused(folder, "timed out")


def test_closed_port_is_one_line(published, folder, server):
    server.server_close()
    refused(folder, "Connection refused")


# ---- what does not pass


def test_answer_that_says_no_is_not_repeated(published, server, folder):
    server.script = [status(404)]
    refused(folder, "404: Not Found")
    assert len(server.ranges) == 1


def test_content_that_lies_is_not_unpacked(published, server, folder):
    server.content = server.content[:-1] + bytes([server.content[-1] ^ 1])
    message = refused(folder, "sha256 .* published is")
    assert hashlib.sha256(server.content).hexdigest() in message
    assert names(folder) == [PART]


def test_file_of_another_size_is_refused_before_what_came_is_lost(published, server, folder):
    leave_part(folder, server.content[:5000])
    server.script = [lambda handler: handler.answer(200, b"<html>Please log in</html>")]
    refused(folder, "is not the published file of")
    assert (folder / PART).stat().st_size == 5000


def test_unknown_names_and_addresses_are_refused(published, folder):
    with pytest.raises(DataError, match="'mnist' to download, expected one of: cifar10"):
        download.get("mnist", folder)
    for url in ("file:///etc/passwd", "ftp://host/file", "cifar.tar.gz"):
        with pytest.raises(DataError, match="starts with http"):
            download.get("cifar10", folder, url=url)
    assert not folder.exists()


# ---- archives


def test_archive_with_files_missing_does_not_become_a_data_set(published, server, folder, monkeypatch):
    (published / TOP / "data_batch_4.bin").unlink()
    offer(server, monkeypatch, pack(published / TOP))
    refused(folder, "data_batch_4.bin")
    assert not (folder / TOP).exists()


@pytest.mark.parametrize("name", ["../escaped", "/tmp/bln-escaped", f"{TOP}/../../escaped"])
def test_archive_that_reaches_out_of_its_folder_leaves_nothing_there(server, folder, name, monkeypatch):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    offer(server, monkeypatch, buffer.getvalue())
    with pytest.raises((tarfile.FilterError, DataError)):
        get(folder)
    assert not (folder / TOP).exists()
    assert not (folder.parent / "escaped").exists()
    assert not pathlib.Path("/tmp/bln-escaped").exists()


# ---- several processes


def test_another_process_that_downloads_is_not_disturbed(published, server, folder):
    with locked(folder / f".{TOP}.lock"), pytest.raises(RunError, match="another process works on"):
        get(folder)
    assert server.ranges == []


def test_killed_process_leaves_no_lock_and_no_half_data_set(published, server, folder):
    archive = download.ARCHIVES["cifar10"]
    program = f"""
        from bln.experiments import download
        download.ARCHIVES["cifar10"] = download.{archive!r}
        download._CHUNK = 1000
        download.get("cifar10", {str(folder)!r})
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
    assert server.ranges[1] != "bytes=0-"


# ---- the published archives


def test_published_archives_are_whole_entries():
    assert set(download.ARCHIVES) == set(data.TOP)
    for archive in download.ARCHIVES.values():
        assert archive.url.startswith("https://")
        assert re.fullmatch("[0-9a-f]{64}", archive.sha256)
