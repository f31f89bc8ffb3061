"""Amounts of memory, read and written."""

from __future__ import annotations

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.estimate.units import in_words, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("16e9", 16 * 10**9), (2.5e9, 2_500_000_000), (4096, 4096),
     ("1.5 gib", 3 * 2**29), ("2TB", 2 * 10**12), ("7KiB", 7168), ("10 B", 10)],
)  # fmt: skip
def test_parse_bytes_of_an_amount_is_its_bytes(text: str | float, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["abc", "-1", -1, 0, "0GiB", "8 GiB 2", "1.2.3GB", "8 apples", "", "nan", "1e999"])
def test_parse_bytes_of_anything_else_names_the_key_the_value_and_a_remedy(text: str | float) -> None:
    with pytest.raises(UserError, match=r"memory must be an amount of memory above 0, such as 16GiB.*got"):
        parse_bytes("memory", text)


def test_in_words_has_three_digits_and_a_unit() -> None:
    sizes = [5, 2**10, 1536 * 2**10, 12.34 * 2**30, 123.4 * 2**30, 3 * 2**40]
    assert [in_words(s) for s in sizes] == ["5 B", "1.00 KiB", "1.50 MiB", "12.3 GiB", "123 GiB", "3.00 TiB"]
