"""The cache changes no pixel, is complete or not there, and is no reason to stop."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import re
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from crossbow_py.core.host import Host
from crossbow_py.data.images import cache as cache_module
from crossbow_py.data.images.cache import IMAGES, INDEX, ImageCache, Opened, cache_key, open_or_fill
from crossbow_py.data.images.decoding import decode, shrunk
from crossbow_py.data.images.folder import ImageFiles, scan_part
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.streaming.streamed_data import Key
from tests.unit.data.images.pictures import truncate, write_part

SHORT = 36  # some images of 40 x 32, 40 x 40 and 40 x 48 are made smaller, some not


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    return write_part(tmp_path / "train")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "read_host", lambda: Host(1, 0, None))


def fill(files: ImageFiles, folder: Path, short_side: int = SHORT) -> Opened:
    return open_or_fill(files, short_side, folder, timeout_s=60, progress=False)


def filled(files: ImageFiles, folder: Path) -> ImageCache:
    cache = fill(files, folder).cache
    assert cache is not None
    return cache


def same_pixels(cache: ImageCache, files: ImageFiles) -> bool:
    expected = [shrunk(decode(files.path(index)), SHORT) for index in range(len(files))]
    return all(torch.equal(cache.pixels(index), pixels) for index, pixels in enumerate(expected))


def left_in(folder: Path) -> list[str]:
    """Suffixes of what lies in the folder of caches; "" is a cache."""
    return sorted(path.suffix for path in folder.iterdir())


def data_of(files: ImageFiles, cache: ImageCache | None) -> ImageFolderData:
    return ImageFolderData(files, size=16, resize=SHORT, min_area=0.08, max_bad=1, shrinks=True, cache=cache)


def test_cache_holds_every_image_made_smaller_and_says_what_it_took(files: ImageFiles, tmp_path: Path) -> None:
    opened = fill(files, tmp_path / "caches")
    assert opened.cache is not None
    assert same_pixels(opened.cache, files)
    assert opened.cache.num_bytes == 3 * 3 * (40 * 32 + 36 * 36 + 36 * 43)
    assert opened.notes[0].startswith(f"The image cache of {tmp_path}/train was filled: 0.0 MiB in ")
    assert left_in(tmp_path / "caches") == ["", ".lock"]


def test_cache_that_is_there_is_only_opened(files: ImageFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(files, tmp_path / "caches")
    monkeypatch.setattr(cache_module, "_decoded", None)
    again = fill(files, tmp_path / "caches")
    assert again.cache is not None
    assert again.notes == ()
    assert same_pixels(again.cache, files)


@pytest.mark.parametrize("training", [True, False])
def test_batches_with_and_without_a_cache_are_the_same(files: ImageFiles, tmp_path: Path, training: bool) -> None:
    cache = filled(files, tmp_path / "caches")
    assert same_pixels(cache, files)
    keys = [Key(1, sample) for sample in range(9)]
    without = data_of(files, None).fetch(keys, seed=0, training=training, on_sample=lambda sample: None)
    shutil.rmtree(files.folder)  # nothing is decoded
    cached = data_of(files, cache).fetch(keys, seed=0, training=training, on_sample=lambda sample: None)
    assert torch.equal(cached.inputs, without.inputs)
    assert cached.bad == without.bad == ()


def test_cache_is_filled_alike_by_worker_processes(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "read_host", lambda: Host(2, 0, None))
    monkeypatch.setattr(cache_module, "_CHUNK", 2)
    assert same_pixels(filled(files, tmp_path / "caches"), files)


def test_worker_that_dies_is_no_reason_to_stop(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "read_host", lambda: Host(2, 0, None))
    monkeypatch.setattr(cache_module, "_CHUNK", 2)
    monkeypatch.setattr(cache_module, "decode", lambda path: os._exit(1))
    opened = fill(files, tmp_path / "caches")
    assert opened.cache is None
    assert re.search(r"data worker \d+ died \(exit code 1\) and was last on .*; look at that sample", opened.notes[0])
    assert left_in(tmp_path / "caches") == [".lock"]


def test_image_that_cannot_be_read_is_not_in_the_cache_and_a_bad_sample(files: ImageFiles, tmp_path: Path) -> None:
    truncate(Path(files.path(4)))
    cache = filled(files, tmp_path / "caches")
    assert cache.pixels(4) is None
    assert torch.equal(cache.pixels(5), shrunk(decode(files.path(5)), SHORT))
    fetched = data_of(files, cache).fetch([Key(0, 4)], seed=0, training=True, on_sample=lambda sample: None)
    assert [(one.sample, one.name) for one in fetched.bad] == [(4, files.path(4))]
    assert fetched.targets.tolist() == [1]


def test_cache_after_pickling_is_opened_anew_and_small(files: ImageFiles, tmp_path: Path) -> None:
    cache = filled(files, tmp_path / "caches")
    pickled = pickle.dumps(cache)
    assert len(pickled) < 1000
    assert same_pixels(pickle.loads(pickled), files)


def test_key_follows_files_sizes_times_and_settings(files: ImageFiles, tmp_path: Path) -> None:
    first = cache_key(files, SHORT)
    assert cache_key(scan_part(tmp_path / "train"), SHORT) == first
    assert cache_key(files, SHORT + 1) != first
    path = Path(files.path(0))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = cache_key(files, SHORT)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache_key(files, SHORT) == first != touched
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache_key(files, SHORT) not in (first, touched)


def test_key_follows_names_and_classes_and_not_the_folder(files: ImageFiles, tmp_path: Path) -> None:
    first = cache_key(files, SHORT)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    assert cache_key(scan_part(tmp_path / "elsewhere"), SHORT) == first
    (tmp_path / "elsewhere" / "ant").rename(tmp_path / "elsewhere" / "axe")
    assert cache_key(scan_part(tmp_path / "elsewhere"), SHORT) != first


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lose_rows(path: Path) -> None:
    np.save(path, np.load(path)[1:])


def swap_rows(path: Path) -> None:
    np.save(path, np.load(path)[::-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (IMAGES, tear), (IMAGES, Path.unlink), (INDEX, tear), (INDEX, lose_rows), (INDEX, swap_rows),
    ],
)  # fmt: skip
def test_damaged_cache_is_made_anew(files: ImageFiles, tmp_path: Path, name: str, damage: Any) -> None:
    folder = filled(files, tmp_path / "caches").folder
    damage(folder / name)
    again = fill(files, tmp_path / "caches")
    assert again.cache is not None
    assert len(again.notes) == 1
    assert same_pixels(again.cache, files)


def test_process_that_is_killed_while_writing_leaves_no_cache_and_no_lock(files: ImageFiles, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        cache_module.append = lambda out, pixels: os._exit(9)  # at the first image
        fill(files, tmp_path / "caches")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert left_in(tmp_path / "caches") == [".lock", ".partial"]
    assert same_pixels(filled(files, tmp_path / "caches"), files)
    assert left_in(tmp_path / "caches") == ["", ".lock"]


def test_disk_that_is_full_while_writing_is_no_reason_to_stop(files, tmp_path, monkeypatch) -> None:
    plainly, count = cache_module.append, iter(range(100))

    def append(out: IO[bytes], pixels: Any) -> None:
        if next(count) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plainly(out, pixels)

    monkeypatch.setattr(cache_module, "append", append)
    opened = fill(files, tmp_path / "caches")
    assert opened.cache is None
    assert "No space left on device" in opened.notes[0]
    assert "Images are decoded in every epoch" in opened.notes[0]
    assert left_in(tmp_path / "caches") == [".lock"]


def test_disk_without_room_is_found_before_anything_is_written(files, tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    needed = 3 * 3 * (40 * 32 + 36 * 36 + 36 * 43)
    monkeypatch.setattr(cache_module, "_decoded", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**30, 2**30, needed - 1))
    opened = fill(files, tmp_path / "caches")
    assert opened.cache is None
    assert "it would take about 0.0 MiB, and 0.0 MiB are free. Images are decoded" in opened.notes[0]
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "read_host", lambda: Host(1, 0, None))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**30, 2**30, needed))
    assert fill(files, tmp_path / "caches").cache is not None


def test_second_process_waits_and_takes_what_the_first_made(files, tmp_path, monkeypatch) -> None:
    made = filled(files, tmp_path / "made").folder
    place = tmp_path / "caches" / made.name
    place.parent.mkdir()
    locked, waiting = cache_module.locked, threading.Event()

    def noted(path: Path, busy: Callable[[], None]) -> AbstractContextManager[None]:
        return locked(path, lambda: (busy(), waiting.set()))

    monkeypatch.setattr(cache_module, "locked", noted)
    monkeypatch.setattr(cache_module, "_decoded", None)
    opened: list[Opened] = []
    with place.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: opened.append(fill(files, tmp_path / "caches")))
        second.start()
        assert waiting.wait(10)
        made.rename(place)
    second.join(10)
    assert opened[0].cache is not None
    assert opened[0].notes == ("Another run filled the image cache while this one waited.",)


def test_progress_is_shown_on_stderr_when_asked_for(files, tmp_path, capsys) -> None:
    open_or_fill(files, SHORT, tmp_path / "caches", timeout_s=60, progress=True)
    printed = capsys.readouterr()
    assert "filling the image cache" in printed.err
    assert "9/9" in printed.err
    assert printed.out == ""
