"""Compiling ahead: what children will launch is in Triton's cache before, and failing costs nothing but that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.kernels import batch_norm
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.train.ladder import compile_ahead
from crossbow_py.train.ladder.compile_ahead import Share, compiling
from crossbow_py.train.ladder.variants import variants


def compiled(share: Share, folder: Path) -> tuple[str, dict[str, int]]:
    """What a process says, and the kernels in Triton's cache after it, with when they were written."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", compile_ahead.__name__, json.dumps(asdict(share))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    found = {f"{file.parent.name} {file.stem}": file.stat().st_mtime_ns for file in folder.rglob("*.cubin")}
    return done.stdout, found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_variants_of_a_share_are_compiled_without_a_gpu_and_found_again(tmp_path: Path) -> None:
    share = Share(["update", "convolutions"], ["bf16"], 90, index=1, count=20)
    said, found = compiled(share, tmp_path)
    names = [line.rstrip() for line in said.splitlines()]
    every = [each.name for kernels in share.kernels for each in variants(kernels, torch.device("cpu"), FP32)]
    assert names and len(names) < len(every) / 10 and all(name.endswith("in bf16") for name in names)
    assert {each.split()[1] for each in found} >= {"_update", "_forward", "_backward"}
    assert compiled(share, tmp_path) == (said, found)


def test_kernels_that_are_only_compiled_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def warmup(kernel: Any, *_: object, grid: object, **__: object) -> None:
        asked.append(kernel.__name__)

    monkeypatch.setattr(type(batch_norm._normalise_kernel), "warmup", warmup, raising=False)
    (variant, *_) = variants("layers", torch.device("cpu"), FP32)
    with recorded(runs=False, compiles=True):
        variant.check()
    assert asked == ["_statistics_kernel", "_normalise_kernel", "_backward_sums_kernel", "_backward_inputs_kernel"]


def test_processes_share_all_variants_and_are_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    shares: list[Share] = []

    def start(command: list[str], *_: object) -> subprocess.Popen[bytes]:
        shares.append(Share(**json.loads(command[-1])))
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        return started[-1]

    monkeypatch.setattr(compile_ahead, "start", start)
    monkeypatch.setattr(compile_ahead, "interprets", lambda: False)
    monkeypatch.setattr(compile_ahead, "_has_driver", lambda: True)
    monkeypatch.setattr(compile_ahead, "_MOST", 2)
    with compiling([], ["fp32"], "9.0", {}), compiling(["update"], ["fp32"], "", {}):
        assert not started
    with compiling(["update"], ["fp32"], "10.0", {}):
        assert [(each.index, each.count, each.capability) for each in shares] == [
            (index, len(started), 100) for index in range(len(started))
        ]  # fmt: skip
        assert started and all(process.poll() is None for process in started)
    assert all(process.poll() is not None for process in started)
