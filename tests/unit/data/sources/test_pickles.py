"""The unpickler that cannot run code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.pickles import read_pickle


class Calls:
    """Pickles as a call of `function(*args)`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_read_pickle_of_arrays_and_containers_gives_them_back(protocol: int) -> None:
    written = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [0, 1], b"x": (b"\xff", "é", None, 2.5)}
    got = read_pickle(pickle.dumps(written, protocol=protocol), "file")
    np.testing.assert_array_equal(got[b"data"], written[b"data"])
    assert (got[b"labels"], got[b"x"]) == (written[b"labels"], written[b"x"])


def test_read_pickle_of_a_python_2_file_keeps_its_byte_strings() -> None:
    python_2 = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x05batchq\x04U\x03abcq\x05u."
    assert read_pickle(python_2, "file") == {b"labels": [6, 9], b"batch": b"abc"}


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    ("function", "name"), [(os.mkdir, r"posix\.mkdir"), (eval, "eval"), (getattr, "getattr"), (np.load, "load")]
)
def test_read_pickle_that_calls_a_function_is_refused_and_not_run(
    tmp_path: Path, protocol: int, function: Callable[..., Any], name: str
) -> None:
    content = pickle.dumps({b"data": Calls(function, str(tmp_path / "made"))}, protocol=protocol)
    with pytest.raises(UserError, match=rf"data file batch is refused: its pickle asks for .*{name}.*could run code"):
        read_pickle(content, "batch")
    assert not (tmp_path / "made").exists()


def test_read_pickle_of_an_array_of_objects_is_refused() -> None:
    with pytest.raises(UserError, match="asks for an array of type object"):
        read_pickle(pickle.dumps(np.array([{}, []], dtype=object)), "file")


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.array([True])])
def test_read_pickle_of_other_layouts_and_types_gives_equal_arrays(array: np.ndarray) -> None:
    got = read_pickle(pickle.dumps({"data": array}, protocol=2), "file")["data"]
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype


def test_read_pickle_of_a_dtype_marked_as_pointers_stays_numbers() -> None:
    content = pickle.dumps({"data": np.arange(2, dtype=np.uint64)}, protocol=2)
    no_flags, object_flags = b"K\x00t", b"K\x3ft"  # the last entry of the dtype's state: has objects, needs clearing
    marked = content.replace(b"J\xff\xff\xff\xff" * 2 + no_flags, b"J\xff\xff\xff\xff" * 2 + object_flags)
    assert marked != content
    got = read_pickle(marked, "file")["data"]
    assert got.tolist() == [0, 1]
    assert not got.dtype.hasobject


def test_read_pickle_of_a_file_flipped_anywhere_gives_a_value_or_a_user_error() -> None:
    content = pickle.dumps({b"data": np.zeros((2, 4), np.uint8), b"labels": [0, 1]}, protocol=2)
    for place in range(len(content)):
        damaged = content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :]
        try:
            read_pickle(damaged, "file")
        except UserError:
            continue
