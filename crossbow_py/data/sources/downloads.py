"""Published files: found in the data folders, or downloaded with a hash check, retries and a progress bar."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import itertools
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.files import given_path

# The remedy for every file that exists but cannot be used.
REPLACE = "restore the published file, or remove what is there and let data.download=true fetch it anew"

_MOST_UNPACKED = 2**31  # bytes; ten times the largest published file
_RETRIES = 2
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60


@dataclass(frozen=True)
class PublishedFile:
    """A published file: its path in a data folder, md5 (hexadecimal) and addresses, the best first."""

    path: str
    md5: str
    urls: tuple[str, ...]


def data_folders(root: str | None) -> tuple[Path, ...]:
    """Return the folders to search, in order: the data root (`root`, else $CROSSBOW_DATA_DIR), then the user's cache.

    Raises UserError if the data root is a file, or no path.
    """
    cache = Path.home() / ".cache" / "crossbow_py"
    chosen = root or os.environ.get("CROSSBOW_DATA_DIR")
    name = "data.root" if root else "$CROSSBOW_DATA_DIR"
    first = given_path(name, chosen) if chosen else cache
    if chosen and os.path.isfile(first):  # noqa: PTH113 - Path.is_file would raise where a folder must not be entered
        rule = f"{name} must be the folder that holds the data sets, got the file {first}"
        raise UserError(f"{rule}; give a folder, such as {first.parent}.")
    return (first,) if first == cache else (first, cache)


def find(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Return the first of `names` (files or folders) that exists in the first folder that has one, else None."""
    candidates = (folder / name for folder in folders for name in names)
    # Path.exists would raise where a folder must not be entered.
    return next((path for path in candidates if os.path.exists(path)), None)  # noqa: PTH110


def download(wanted: PublishedFile, folders: Sequence[Path], allowed: bool, progress: bool) -> Path:
    """Download a file into the first folder that can be written to, and return its path there.

    Every address is tried three times; only a file with the published hash is kept.

    Raises:
        UserError: downloads are not allowed, every address failed, or pooch is missing; says where to put the file.
    """
    looked = " or ".join(map(_described, folders))
    remedy = (
        f"put {wanted.path} into {folders[0]} yourself, or set data.root, or CROSSBOW_DATA_DIR, to the folder that "
        "holds it"
    )
    if not allowed:
        raise UserError(f"{wanted.path} is not in {looked} and data.download is false; set it to true, or {remedy}.")
    target = next((folder for folder in folders if _writable(folder)), None)
    if target is None:
        raise UserError(f"{wanted.path} is not in {looked}, and neither can be written to for a download; {remedy}.")
    pooch = _pooch(wanted.path, remedy)
    failures = []
    before = {path for path in (target / wanted.path).parents if os.path.exists(path)}  # noqa: PTH110 - as in `find`
    for url in wanted.urls:
        try:
            return _download_from(pooch, url, wanted, target, progress)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong hash is a ValueError
            failures.append(f"{url} ({type(error).__name__})")
    for folder in itertools.takewhile(lambda folder: folder not in before, (target / wanted.path).parents):
        with suppress(OSError):  # remove what the download made, unless it is in use
            folder.rmdir()
    failed = f"is not in {looked} and could not be downloaded from {' or '.join(failures)}"
    raise UserError(f"{wanted.path} {failed}; without a network, {remedy}.")


def _described(folder: Path) -> str:
    """Return a folder's name, and whether it is missing, as it may be misspelt."""
    there = os.path.exists(folder)  # noqa: PTH110 - as in `find`
    return f"{folder}{'' if there else ' (which does not exist)'}"


def read_file(path: Path) -> bytes:
    """Return the bytes of a data file. Raises UserError if it cannot be read."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # reading it might never end
            raise UserError(f"data file {path} must be a file, got a device or a pipe; {REPLACE}.")
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"data file {path} cannot be read ({reason}); {REPLACE}.") from error


def unpacked(content: bytes, path: Path) -> bytes:
    """Return gzipped content unpacked. Raises UserError if it is damaged, or too large for a data set."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            values = file.read(_MOST_UNPACKED + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"data file {path} is truncated or damaged ({one_line(error)}); {REPLACE}.") from error
    if len(values) > _MOST_UNPACKED:
        raise UserError(f"data file {path} must unpack to at most {_MOST_UNPACKED >> 30} GiB, got more; {REPLACE}.")
    return values


def check_published(content: bytes, length: int, md5: str, path: Path | str) -> None:
    """Refuse a file of the published length with another hash, as no other check finds a flipped pixel.

    A file of another length is the user's own variant, and is only checked for its structure.
    """
    if len(content) != length:
        return
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise UserError(f"data file {path} is damaged: its md5 is {found}, published is {md5}; {REPLACE}.")


class _Bar:
    """A rich task in the shape of a tqdm bar, for pooch."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._task = progress, progress.add_task(name, total=None)
        self.total = 0

    def update(self, amount: int) -> None:
        """Advance by `amount` bytes."""
        self._progress.update(self._task, advance=amount, total=self.total or None)

    def reset(self) -> None:
        """Start again at zero bytes."""
        self._progress.reset(self._task, total=self.total or None)

    def close(self) -> None:
        """Do nothing: the bar ends with its `Progress`."""


def _pooch(path: str, remedy: str) -> Any:
    """Return pooch, which only downloads need. Raises UserError without it."""
    try:
        return importlib.import_module("pooch")
    except ModuleNotFoundError as error:
        raise UserError(f"{path} can only be downloaded with pooch; run pip install pooch, or {remedy}.") from error


def _download_from(pooch: Any, url: str, wanted: PublishedFile, target: Path, progress: bool) -> Path:
    pooch.get_logger().setLevel("WARNING")  # its announcements would tear the progress bar
    store = pooch.create(
        path=target,
        base_url="",
        registry={wanted.path: f"md5:{wanted.md5}"},
        urls={wanted.path: url},
        retry_if_failed=_RETRIES,
    )
    columns = TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True, quiet=not progress), disable=not progress) as shown:
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(shown, wanted.path), chunk_size=2**16, timeout=(_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S)
        )
        return Path(store.fetch(wanted.path, downloader=downloader))


def _writable(folder: Path) -> bool:
    """Return whether `folder` is writable or can be created: its nearest existing ancestor is a writable folder."""
    above = (folder, *folder.absolute().parents)
    existing = next((path for path in above if os.path.exists(path)), Path("/"))  # noqa: PTH110 - as in `find`
    return existing.is_dir() and os.access(existing, os.W_OK)
