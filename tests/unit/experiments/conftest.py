"""What the tests of sides train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossbow_py.core import host
from experiments.bench import workloads
from experiments.bench.sides import tuned
from experiments.bench.workloads import Workload
from experiments.throughput import sides
from tests.unit.data.images.pictures import write_part
from tests.unit.experiments.samples import BATCH


@pytest.fixture(autouse=True)
def load_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No window is dropped because other tests keep the cores busy meanwhile."""
    monkeypatch.setattr(host, "_STAT", tmp_path / "stat")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of nine training images."""
    write_part(tmp_path / "photos" / "train")
    write_part(tmp_path / "photos" / "val", per_class=1)
    return tmp_path / "photos"


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workload]:
    """LeNet on a few synthetic images; torch's global settings, which sides change in their own process, are kept."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(workloads, "NUM_IMAGES", 64)
    for module in (sides, tuned):
        monkeypatch.setattr(module, "usable_cores", lambda: 1)
    monkeypatch.setattr(tuned, "keep_freed_memory", lambda: None)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield workloads.prepare("lenet", BATCH, "cpu", tmp_path)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
