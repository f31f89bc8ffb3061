"""What is kept of what was made: the values that were used last."""

from __future__ import annotations

import pytest

from crossbow_py.predict.last_used import LastUsed


def test_values_used_last_are_kept_and_the_others_dropped_after_the_next_is_made() -> None:
    events: list[str] = []
    kept = LastUsed[int, str](2, lambda value: events.append(f"drop {value}"))

    def ask(key: int) -> None:
        def make() -> str:
            events.append(f"make {key}")
            return str(key)

        assert kept.of(key, make) == str(key)

    for key in (1, 2, 1, 3, 1, 2):
        ask(key)
    assert events == ["make 1", "make 2", "make 3", "drop 2", "make 2", "drop 3"]
    kept.clear()
    assert events[6:] == ["drop 2", "drop 1"] and len(kept) == 0


def test_value_that_cannot_be_made_takes_no_place() -> None:
    kept = LastUsed[int, str](1)
    kept.of(1, lambda: "one")
    with pytest.raises(ZeroDivisionError):
        kept.of(2, lambda: str(1 // 0))
    assert len(kept) == 1 and kept.of(1, lambda: "another") == "one"
