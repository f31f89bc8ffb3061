"""Feeds that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from crossbow_py.data.feed import Feed
from tests.unit.data.streams import closed


@pytest.fixture
def kept() -> Iterator[Callable[[Feed], Feed]]:
    """Takes a feed, and closes it in the end; no worker process and no thread is left."""
    feeds: list[Feed] = []

    def keep(feed: Feed) -> Feed:
        feeds.append(feed)
        return feed

    yield keep
    closed(feeds)
