"""What a process takes of its host: cores, and a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.distributed import place
from crossbow_py.distributed.place import take_place


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that torch is set to, on a host with 16 cores."""
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(place, "read_host", lambda: SimpleNamespace(cores=16))
    return found


@pytest.mark.parametrize(("number", "share"), [(1, 16), (3, 5), (8, 2), (20, 1)])
def test_process_takes_its_share_of_the_cores(
    number: int, share: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    take_place(0, number, on_gpu=False)
    assert threads == [share]


def test_process_keeps_the_users_number_of_threads(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    take_place(0, 2, on_gpu=False)
    assert threads == []


@pytest.mark.usefixtures("threads")
def test_hardware_queues_are_asked_for_before_a_process_takes_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((device, os.environ.get(name))))
    take_place(1, 2, on_gpu=True)
    assert seen == [(1, "32")]


@pytest.mark.usefixtures("threads")
def test_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"^there are 3 ranks on this host and 2 GPUs, .* set --nproc-per-node=2, as"):
        take_place(2, 3, on_gpu=True)
