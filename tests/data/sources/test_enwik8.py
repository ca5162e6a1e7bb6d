"""enwik8: its splits, and a download that can be interrupted and resumed."""

import gzip
import hashlib
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from data_helpers import documents

from transformer_vq.config import DataConfig
from transformer_vq.data.corpus import prepare
from transformer_vq.data.sources import enwik8, selection
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.enwik8 import download, enwik8_file

CONTENT = np.random.default_rng(0).bytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def write_zip(path, content):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", content)


def enwik8_corpus(path, tmp_path):
    """Prepare enwik8 from a path."""
    cache = str(tmp_path / "cache")
    return prepare(DataConfig("enwik8", str(path), end_of_document=False, cache=cache))


def test_the_complete_file_has_the_published_splits(tmp_path, monkeypatch, capsys):
    assert (enwik8.SIZE, enwik8.EDGES) == (100_000_000, (90_000_000, 95_000_000))
    for module in (enwik8, selection):
        monkeypatch.setattr(module, "SIZE", 1000)
    monkeypatch.setattr(selection, "EDGES", (700, 900))
    (tmp_path / "enwik8").write_bytes(CONTENT[:1000])
    corpus = enwik8_corpus(tmp_path / "enwik8", tmp_path)
    assert documents(corpus, "train") == [CONTENT[:700]]
    assert documents(corpus, "validation") == [CONTENT[700:900]]
    assert documents(corpus, "test") == [CONTENT[900:1000]]
    assert capsys.readouterr().err == ""


def test_a_file_of_another_size_is_split_in_proportion_with_a_warning(tmp_path, capsys):
    (tmp_path / "head").write_bytes(CONTENT[:1000])
    corpus = enwik8_corpus(tmp_path / "head", tmp_path)
    assert documents(corpus, "train") == [CONTENT[:900]]
    assert documents(corpus, "validation") == [CONTENT[900:950]]
    assert documents(corpus, "test") == [CONTENT[950:1000]]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "1,000 bytes" in lines[0]
    assert "cannot be compared" in lines[0]


def test_compressed_files_and_folders_are_accepted(tmp_path):
    write_zip(tmp_path / "enwik8.zip", CONTENT[:1000])
    with gzip.open(tmp_path / "other.gz", "wb") as file:
        file.write(CONTENT[:1000])
    for path in (tmp_path, tmp_path / "enwik8.zip", tmp_path / "other.gz"):
        assert documents(enwik8_corpus(path, tmp_path), "train") == [CONTENT[:900]]


def test_a_plain_file_is_preferred_to_a_compressed_one(tmp_path):
    write_zip(tmp_path / "enwik8.zip", CONTENT[:1000])
    (tmp_path / "enwik8").write_bytes(CONTENT[:1000])
    assert enwik8_file(tmp_path, tmp_path) == (tmp_path / "enwik8", 1000)


def test_without_a_path_the_download_is_used(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"run `tvq prepare enwik8` or give a file as --data\.path"):
        enwik8_file(None, tmp_path)
    (tmp_path / "downloads").mkdir()
    path = tmp_path / "downloads/enwik8.zip"
    write_zip(path, CONTENT[:1000])
    monkeypatch.setattr(enwik8, "ZIP_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    assert enwik8_file(None, tmp_path) == (path, 1000)


def test_a_corrupt_download_is_rejected_without_network(tmp_path):
    (tmp_path / "downloads").mkdir()
    path = tmp_path / "downloads/enwik8.zip"
    write_zip(path, CONTENT[:1000])  # a valid zip file, but another one
    with pytest.raises(DataError, match="delete it and run `tvq prepare enwik8`") as raised:
        enwik8_file(None, tmp_path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_and_corrupt_files_are_rejected_in_one_line(tmp_path):
    write_zip(tmp_path / "intact.zip", CONTENT[:1000])
    broken = tmp_path / "enwik8.zip"
    broken.write_bytes((tmp_path / "intact.zip").read_bytes()[:500])
    (tmp_path / "empty").mkdir()
    for path, message in [
        (broken, "cannot read"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "empty", "contains neither enwik8 nor"),
        (Path("/dev/zero"), "neither a regular file nor a folder"),
    ]:
        with pytest.raises(DataError, match=message) as raised:
            enwik8_file(path, tmp_path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT according to the server's `behaviour` and records the requested ranges."""

    def do_GET(self):
        server = self.server
        requested = self.headers.get("Range")
        server.requested.append(requested)
        if server.behaviour == "absent":
            self.send_error(404)
            return
        resumed = requested is not None and server.behaviour != "no ranges"
        content = CONTENT[int(requested[len("bytes=") : -1]) :] if resumed else CONTENT
        self.send_response(206 if resumed else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if server.behaviour == "closes early":
            content = content[: len(content) // 3]
        if server.behaviour == "stalls":
            time.sleep(1.0)
        self.wfile.write(content)

    def log_message(self, *args):
        """Print nothing."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Print nothing if a client closes the connection."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.behaviour, server.requested = "", []
        server.url = f"http://127.0.0.1:{server.server_port}/enwik8.zip"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetch(server, cache, sha256=SHA256):
    return download(cache, server.url, len(CONTENT), sha256)


def assert_fails_in_one_line(server, cache, message):
    with pytest.raises(DataError, match=message) as raised:
        fetch(server, cache)
    assert "\n" not in str(raised.value)
    assert "run the command again to resume" in str(raised.value)
    assert "--data.path" in str(raised.value)


def test_a_complete_download_is_not_repeated(server, tmp_path):
    path = fetch(server, tmp_path / "cache")
    assert path == tmp_path / "cache/downloads/enwik8.zip"
    assert path.read_bytes() == CONTENT
    assert fetch(server, tmp_path / "cache") == path
    assert server.requested == [None]
    assert list(path.parent.iterdir()) == [path]


def test_an_existing_file_of_the_wrong_size_is_downloaded_again(server, tmp_path):
    path = fetch(server, tmp_path)
    path.write_bytes(CONTENT[:10])
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_a_corrupt_download_is_replaced_with_a_warning(server, tmp_path, capsys):
    path = fetch(server, tmp_path)
    path.write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:])
    capsys.readouterr()
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


@pytest.mark.parametrize("content", [b"precious", None])
def test_download_does_not_write_through_a_link(server, tmp_path, content):
    (tmp_path / "downloads").mkdir()
    other = tmp_path / "other"
    if content is not None:
        other.write_bytes(content)
    (tmp_path / "downloads/enwik8.zip.partial").symlink_to(other)
    path = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert not path.is_symlink()
    assert (other.read_bytes() if other.exists() else None) == content


def test_an_interrupted_download_is_resumed(server, tmp_path):
    server.behaviour = "closes early"
    assert_fails_in_one_line(server, tmp_path, "closed after 1,000,000 of 3,000,000 bytes")
    server.behaviour = ""
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.requested == [None, "bytes=1000000-"]


def test_download_starts_again_if_the_server_has_no_ranges(server, tmp_path):
    server.behaviour = "closes early"
    assert_fails_in_one_line(server, tmp_path, "closed after")
    server.behaviour = "no ranges"
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.requested == [None, "bytes=1000000-"]


def test_a_wrong_checksum_is_rejected_and_leaves_no_files(server, tmp_path):
    with pytest.raises(DataError, match="is not the published") as raised:
        fetch(server, tmp_path, sha256="0" * 64)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "downloads").iterdir()) == []
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_a_complete_partial_file_is_only_verified(server, tmp_path):
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads/enwik8.zip.partial").write_bytes(CONTENT)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.requested == []


def test_network_errors_are_reported_in_one_line(server, tmp_path, monkeypatch):
    server.behaviour = "absent"
    assert_fails_in_one_line(server, tmp_path, "404")
    server.behaviour = "stalls"
    monkeypatch.setattr(enwik8, "TIMEOUT", 0.1)
    assert_fails_in_one_line(server, tmp_path, "timed out")


def test_an_unreachable_server_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match="cannot download") as raised:
        download(tmp_path, "http://127.0.0.1:9/enwik8.zip")
    assert "\n" not in str(raised.value)
