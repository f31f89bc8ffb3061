"""Data files of any bytes: what comes out is data or a sentence for the user, soon, and in little memory."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.data.images.cache import ImageCache
from crossbow_py.data.sources import downloads
from crossbow_py.data.sources.cifar import Cifar10
from crossbow_py.data.sources.mnist import Mnist, read_idx
from crossbow_py.data.sources.pickles import read_pickle
from tests.unit.data.files import cifar10_batches, cifar_archive, idx, write_cifar, write_mnist
from tests.unit.fuzz.examining import damaged, depths, examine, memory_of_at_most

IMAGES = idx(np.arange(2 * 784, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28))
VALUES = {b"data": np.arange(12, dtype=np.uint8).reshape(2, 6), b"labels": [1, 2], b"more": [b"a", "é", None, 1.5]}
PICKLES = [pickle.dumps(VALUES, protocol=protocol) for protocol in range(6)]
ODD_LENGTHS = [0, 1, 2, 4, 28, 2**16, 2**30, 2**31, 2**32 - 1]


def idx_files() -> st.SearchStrategy[bytes]:
    """Damaged ones, and headers of odd lengths with values that may fit their product, also one that overflows."""
    lengths = st.tuples(*[st.sampled_from(ODD_LENGTHS)] * 3)
    headers = st.builds(
        lambda extents, count: bytes((0, 0, 8, 3)) + struct.pack(">3I", *extents) + bytes(count),
        lengths,
        st.sampled_from([0, 1, 2, 4, 8, 784, 1568]),
    )
    return st.one_of(damaged(IMAGES, gzip.compress(IMAGES)), headers)


@depths(150, 3000)
def test_idx_of_any_bytes_is_an_array_or_a_user_error(tmp_path: Path, examples: int) -> None:
    def check(example: tuple[str, bytes, int]) -> None:
        name, content, axes = example
        (tmp_path / name).write_bytes(content)
        with suppress(UserError):
            assert read_idx(tmp_path / name, axes).ndim == axes

    packed = st.tuples(st.just("file.gz"), idx_files().map(gzip.compress), st.just(3))
    examine(
        st.one_of(st.tuples(st.sampled_from(["file", "file.gz"]), idx_files(), st.sampled_from([1, 3])), packed),
        check,
        examples,
    )


def pickled_soup() -> st.SearchStrategy[bytes]:
    """Operations in any order, with arguments that may be theirs."""
    names = [name for name in dir(pickle) if name.isupper() and isinstance(getattr(pickle, name), bytes)]
    operations = [getattr(pickle, name) for name in names if len(getattr(pickle, name)) == 1]
    arguments = [
        b"", b"\0", b"\1", b"\xff", b"\1\0\0\0", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", struct.pack("<Q", 2**40),
        b"1\n", b"numpy\nndarray\n", b"numpy\ndtype\n", b"numpy.core.multiarray\n_reconstruct\n", b"_codecs\nencode\n",
        b"posix\nsystem\n", b"\x02u1",
    ]  # fmt: skip
    step = st.tuples(st.sampled_from(operations), st.sampled_from(arguments)).map(b"".join)
    return st.lists(step, min_size=1, max_size=30).map(lambda steps: b"".join(steps) + b".")


@depths(250, 2000)
def test_pickle_of_any_bytes_is_a_value_or_a_user_error(examples: int) -> None:
    def check(content: bytes) -> None:
        with suppress(UserError):
            read_pickle(content, "file")

    examine(st.one_of(damaged(*PICKLES), pickled_soup()), check, examples)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r" + struct.pack("<I", 2**31) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**36) + b"a.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"a.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**36) + b"N.",
    ],
    ids=["memo", "bytes", "bytearray", "frame"],
)
def test_pickle_that_claims_gigabytes_does_not_take_them(content: bytes) -> None:
    with memory_of_at_most(50), suppress(UserError):
        read_pickle(content, "file")


@depths(25, 400)
def test_cifar_folder_of_any_bytes_is_data_or_a_user_error(tmp_path: Path, examples: int) -> None:
    batches = cifar10_batches()
    write_cifar(tmp_path / "cifar-10-batches-py", batches)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    whole = batch.read_bytes()

    def check(content: bytes) -> None:
        batch.write_bytes(content)
        with suppress(UserError):
            train, _ = Cifar10(root=str(tmp_path), download=False).read(progress=False)
            assert train[0].shape[1:] == (3, 32, 32)

    examine(damaged(whole), check, examples)


@depths(25, 400)
def test_cifar_archive_of_any_bytes_is_data_or_a_user_error(tmp_path: Path, examples: int) -> None:
    packed = cifar_archive("cifar-10-batches-py", cifar10_batches())
    unpacked = gzip.decompress(packed)
    archive = tmp_path / "cifar-10-python.tar.gz"

    def check(content: bytes) -> None:
        archive.write_bytes(content)
        with suppress(UserError):
            Cifar10(root=str(tmp_path), download=False).read(progress=False)

    examine(st.one_of(damaged(packed), damaged(unpacked).map(gzip.compress)), check, examples)


def test_archive_whose_member_claims_a_terabyte_is_a_user_error(tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(2**40),
                              "GNU.sparse.map": "0,0"}  # fmt: skip
        tar.addfile(member)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(content.getvalue())
    with memory_of_at_most(100), pytest.raises(UserError, match="data_batch_1 is missing"):
        Cifar10(root=str(tmp_path), download=False).read(progress=False)


def test_file_that_unpacks_without_end_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_MOST_UNPACKED", 2**25)  # not the 2 GiB, which would take a while
    packed = gzip.compress(bytes(2**20)) * 1000  # 1 MB for 1 GB
    assert len(packed) < 2**21
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(packed)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(packed)
    for source in (Mnist(root=str(tmp_path)), Cifar10(root=str(tmp_path))):
        with memory_of_at_most(200), pytest.raises(UserError, match=r"gz must unpack to at most .*, got more"):
            source.read(progress=False)


@depths(150, 3000)
def test_index_of_an_image_cache_of_any_bytes_is_one_or_refused(tmp_path: Path, examples: int) -> None:
    index = io.BytesIO()
    np.save(index, np.array([[0, 2, 3], [18, 0, 0], [18, 1, 1]], dtype=np.int64))
    (tmp_path / "images.bin").write_bytes(bytes(21))

    def check(content: bytes) -> None:
        (tmp_path / "index.npy").write_bytes(content)
        with suppress(OSError, ValueError):
            cache = ImageCache(tmp_path, 3)
            for place in range(3):
                pixels: Any = cache.pixels(place)
                assert pixels is None or int(pixels.sum()) == 0

    examine(st.one_of(damaged(index.getvalue()), odd_indices()), check, examples)


def odd_indices() -> st.SearchStrategy[bytes]:
    """Whole files, with numbers whose products overflow."""
    number = st.sampled_from([0, 1, 2, 3, 18, 21, -1, 2**31, 2**32, 2**62, 2**63 - 1, (2**64 + 21) // 3 - 2**63])
    rows = st.lists(st.lists(number, min_size=3, max_size=3), min_size=3, max_size=3)

    def file_of(values: list[list[int]]) -> bytes:
        content = io.BytesIO()
        np.save(content, np.array(values, dtype=np.int64))
        return content.getvalue()

    return rows.map(file_of)
