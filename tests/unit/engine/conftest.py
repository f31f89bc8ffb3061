"""What tests of executors start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crossbow_py.engine.device.host import intra_op_threads


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Torch takes that many for one operator."""
    with intra_op_threads(2):
        yield
