"""What holds for every test on a GPU: float32 is float32."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    """Convolutions round to 10 bits by default, which is more than executors may differ by."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
