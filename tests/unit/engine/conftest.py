"""What tests of executors start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crossbow_py.engine.device.host import intra_op_threads


@pytest.fixture
def two_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch take two for one operator, and `fused_threads` make two groups.

    A test of another executor stays on one: small operators on two wait for each other, long on a busy machine.
    """
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with intra_op_threads(2 if parameters.get("executor", "fused_threads") == "fused_threads" else 1):
        yield
