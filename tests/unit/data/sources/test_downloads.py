"""Downloads from a server on this machine, and everything that can fail."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.cifar import Cifar10
from crossbow_py.data.sources.downloads import PublishedFile, data_folders, download
from crossbow_py.data.sources.image_folder import ImageFolder
from tests.unit.data.files import cifar10_batches, cifar_archive

CONTENT = b"published" * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves `answers` in turn, the last one for ever; counts requests. None is an error 503."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = [CONTENT]
        self.requests = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = owner.answers[min(owner.requests, len(owner.answers) - 1)]
                owner.requests += 1
                self.send_response(503 if answer is None else 200)
                self.send_header("Content-Length", str(len(answer or b"")))
                self.end_headers()
                self.wfile.write(answer or b"")

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # joined by server_close
        self.url = f"http://127.0.0.1:{self.http.server_port}/file"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def fetch(*urls: str, into: tuple[Path, ...], allowed: bool = True) -> Path:
    return download(PublishedFile("file", MD5, urls), into, allowed=allowed, progress=False)


@pytest.fixture
def closed_url() -> str:
    """An address nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no waiting between attempts, a home of its own."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CROSSBOW_DATA_DIR", raising=False)


@pytest.mark.parametrize("progress", [True, False])
def test_download_of_the_published_file_lands_in_the_first_folder(tmp_path, server, progress: bool, capsys) -> None:
    wanted = PublishedFile("set/file.gz", MD5, (server.url,))
    path = download(wanted, (tmp_path / "root", tmp_path / "cache"), allowed=True, progress=progress)
    assert path == tmp_path / "root" / "set" / "file.gz"
    assert path.read_bytes() == CONTENT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("downloading set/file.gz" in captured.err) == progress


def test_download_answered_by_errors_and_damage_is_tried_again(tmp_path: Path, server: Server) -> None:
    server.answers = [None, CONTENT[:-1], CONTENT]
    path = fetch(server.url, into=(tmp_path,))
    assert path.read_bytes() == CONTENT
    assert server.requests == 3


def test_download_from_a_dead_mirror_goes_on_to_the_next(tmp_path: Path, server: Server, closed_url: str) -> None:
    assert fetch(closed_url, server.url, into=(tmp_path,)).read_bytes() == CONTENT


def test_download_of_another_content_is_refused_and_leaves_nothing(tmp_path: Path, server: Server) -> None:
    server.answers = [b"captive portal"]
    with pytest.raises(UserError, match=r"could not be downloaded from http://127\.0\.0\.1:\d+/file \(ValueError\)"):
        fetch(server.url, into=(tmp_path,))
    assert list(tmp_path.iterdir()) == []


def test_download_without_a_network_says_what_where_and_what_to_do(tmp_path: Path, closed_url: str) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    with pytest.raises(UserError) as caught:
        download(PublishedFile("set/file.gz", MD5, (closed_url,)), (root, cache), allowed=True, progress=False)
    message, missing = str(caught.value), "(which does not exist)"
    assert message == (
        f"set/file.gz is not in {root} {missing} or {cache} {missing} and could not be downloaded from {closed_url} "
        f"(ConnectionError); without a network, put set/file.gz into {root} yourself, or set data.root, "
        "or CROSSBOW_DATA_DIR, to the folder that holds it."
    )


def test_download_into_an_unwritable_root_lands_in_the_cache_or_is_a_user_error(tmp_path: Path, server: Server) -> None:
    (tmp_path / "occupied").write_text("a file, where a folder is wanted")
    root = tmp_path / "occupied" / "root"
    assert fetch(server.url, into=(root, tmp_path / "cache")) == tmp_path / "cache" / "file"
    with pytest.raises(UserError, match=r"neither can be written to"):
        fetch(server.url, into=(root,))


def test_download_forbidden_is_a_user_error_without_a_request(tmp_path: Path, server: Server) -> None:
    with pytest.raises(UserError, match=r"is not in .* and data\.download is false; set it to true, or put file into"):
        fetch(server.url, into=(tmp_path,), allowed=False)
    assert server.requests == 0


def test_download_without_pooch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match=r"^file can only be downloaded with pooch; run pip install pooch, or put file"):
        fetch("http://127.0.0.1/file", into=(tmp_path,))


def test_load_of_cifar10_not_found_downloads_its_archive_once(tmp_path, server, monkeypatch) -> None:
    content = cifar_archive("cifar-10-batches-py", cifar10_batches())
    server.answers = [content]
    archive = replace(Cifar10.ARCHIVE, md5=hashlib.md5(content).hexdigest(), urls=(server.url,))
    monkeypatch.setattr(Cifar10, "ARCHIVE", archive)
    for _ in range(2):
        assert len(Cifar10(root=str(tmp_path / "root")).load(progress=False).train[1]) == 10
    assert server.requests == 1
    assert (tmp_path / "root" / "cifar-10-python.tar.gz").read_bytes() == content


def test_data_folders_prefer_root_over_the_variable_over_the_cache(tmp_path, monkeypatch) -> None:
    cache = tmp_path / "home" / ".cache" / "crossbow_py"
    assert data_folders(None) == (cache,)
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path / "variable"))
    assert data_folders(None) == (tmp_path / "variable", cache)
    assert data_folders("~/mine") == (tmp_path / "home" / "mine", cache)


def test_data_folder_of_an_unknown_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "=~nobody-there/a is in the home folder of an unknown user; write the whole path"
    with pytest.raises(UserError, match=f"^data.root{said}"):
        data_folders("~nobody-there/a")
    monkeypatch.setenv("CROSSBOW_DATA_DIR", "~nobody-there/a")
    with pytest.raises(UserError, match=f"^.CROSSBOW_DATA_DIR{said}"):
        data_folders(None)
    with pytest.raises(UserError, match=f"^data.folder{said}"):
        ImageFolder(folder="~nobody-there/a", root="/").load(progress=False)


def test_data_root_that_is_a_file_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.root must be the folder .*, got the file /.*file; give a folder, such"):
        data_folders(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"is not in /.*/missing \(which does not exist\) or /"):
        Cifar10(root=str(tmp_path / "missing"), download=False).load(progress=False)
