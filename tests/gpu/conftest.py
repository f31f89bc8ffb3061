"""What holds for every test on a GPU: float32 is float32."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine.device.graphs import failed_capture
from tests.caches import trust_cuda
from tests.gpu.support import IS_SIMULATED


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    """Convolutions round to 10 bits by default, which is more than executors may differ by."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """What is measured in a test is remembered for it alone, and everything may be used: it is what is tested."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trust_cuda(monkeypatch)


@pytest.fixture
def captures_work():
    """After a capture that failed on a GPU all rounds of its process are eager: a test of graphs would find nothing."""
    if failed := failed_capture():
        pytest.fail(f"it tests graphs, and {failed}: run it by itself", pytrace=False)


@pytest.fixture(autouse=True)
def ordered():
    """On a simulated device every access to memory that another stream wrote is ordered after it."""
    yield
    if IS_SIMULATED:
        from tests.simulated_cuda.torch_cuda import simulation  # noqa: PLC0415  there alone

        found = simulation().scheduler.races.take()
        assert not found, found
