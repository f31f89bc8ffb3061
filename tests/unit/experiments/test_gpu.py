"""The stages that run on a GPU: what ends badly stops nothing, nothing is lost, and figures are not mixed."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench import workloads
from experiments.bench.machine import ROOT
from experiments.gpu import data_pieces, on_device, prepare, report, rows, stages
from experiments.gpu.stages import EVERYTHING, Job, Place, Stage


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What comes back; nothing was carried."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.delenv("CROSSBOW_DATA_DIR", raising=False)
    monkeypatch.setattr(on_device, "CARRIED", tmp_path / "carried")
    for name in ("SITE", "DATA", "KERNELS"):
        monkeypatch.setattr(on_device, name, tmp_path / name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(on_device.signal, "signal", lambda *_: None)
    return tmp_path / "out"


def python(name: str, program: str, limit_s: float = 60.0) -> Job:
    return Job(name, (sys.executable, "-c", program), limit_s)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tiny", [True, False])
def test_every_command_of_a_stage_names_a_program_that_exists(device: str, tiny: bool, tmp_path: Path) -> None:
    found = stages.stages(Place(device, tiny, tmp_path, tmp_path), EVERYTHING)
    jobs = [job for stage in found.values() for job in stage.jobs]
    assert len({job.name for job in jobs}) == len(jobs) - (tiny and 1)
    for job in jobs:
        programs = [word for word in job.command if word.startswith(("experiments/", "tests/"))]
        assert all((ROOT / word).exists() for word in programs), job.command
        assert programs or job.command[1:3] in {("-m", "crossbow_py.train"), ("-m", "crossbow_py.check")}
    assert all(stage.then for stage in found.values())


def test_calls_name_stages_that_exist_and_leave_time_to_bring_back(tmp_path: Path) -> None:
    known = stages.stages(Place("cuda", False, tmp_path, tmp_path), {})
    for _, limit, words in prepare._CALLS:
        seconds, *groups = words.split()
        assert {name for group in groups for name in group.split("+")} <= set(known)
        assert int(seconds) <= limit - 15
    assert sum(limit for _, limit, _ in prepare._CALLS) <= 15 * 60 - 120  # start, transfers, a spare minute


def test_stage_that_fails_hangs_or_cannot_start_stops_no_other(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_device, "_LEAST_S", 0.0)
    made = {
        "bad": Stage((python("bad", "print('why'); raise SystemExit(3)"),), "look at why"),
        "hangs": Stage((python("hangs", "import time; print('waits', flush=True); time.sleep(90)", 1.5),), "wait less"),
        "none": Stage((Job("none", ("no-such-tool",), 9.0),), "do without"),
        "good": Stage((python("good", "print('done')"),), "nothing"),
    }
    monkeypatch.setattr(on_device, "stages", lambda at, switches: made)
    assert on_device.main(["--device", "cpu", "bad+none", "hangs", "good"]) == 1
    text = (out / "summary.txt").read_text()
    for line in ("FAIL  bad", "bad failed; next: look at why", "LIMIT hangs", "hangs failed; next: wait less",
                 "FAIL  none", "no-such-tool cannot be started", "ok    good"):  # fmt: skip
        assert line in text
    assert sorted(text.splitlines()[-1].split("failed: ")[1].split(", ")) == ["bad", "hangs", "none"]
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert {"bad.log", "hangs.log", "good.log"} <= set(archive.getnames())
    assert capsys.readouterr().out == text


def test_half_of_the_data_is_said_and_skips_what_reads_it(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = on_device.CARRIED / "data1"
    piece.mkdir(parents=True)
    (piece / "data_batch_1.head.xz").write_bytes(data_pieces.lzma.compress(b"head"))
    learns = Job("learn", (sys.executable, "-c", ""), 9.0, reads_data=True)
    monkeypatch.setattr(on_device, "stages", lambda at, switches: {"learn": Stage((learns,), "rows_more")})
    assert on_device.main(["--device", "cpu", "learn"]) == 1
    text = (out / "summary.txt").read_text()
    assert "NOTE  data: 0 of 6 batches of CIFAR-10 are whole" in text
    assert "CIFAR-10 is not whole: a call must carry each piece of it; next: rows_more" in text
    (piece / "data_batch_1.tail.xz").write_bytes(b"cut off")
    assert on_device.main(["--device", "cpu", "learn"]) == 1
    assert "NOTE  data: data_batch_1.tail.xz cannot be read: carry it again" in (out / "summary.txt").read_text()
    shutil.rmtree(piece)
    assert on_device.main(["--device", "cpu", "learn"]) == 1
    assert "CIFAR-10 is not whole" in (out / "summary.txt").read_text()


def test_folder_of_results_that_cannot_be_written_is_said_in_one_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out.parent.joinpath("file").touch()
    monkeypatch.setenv("OUT", str(out.parent / "file" / "inside"))
    with pytest.raises(SystemExit) as ended:
        on_device.main(["--device", "cpu", "env"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("(Not a directory); set OUT to a folder that can be")


def test_kernels_of_another_triton_are_left_alone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = on_device.CARRIED / "kernels"
    folder.mkdir(parents=True)
    (folder / "cache.tar.xz").touch()
    (folder / "triton").write_text("0.1")
    monkeypatch.setattr(on_device, "stages", lambda at, switches: {"good": Stage((python("good", ""),), "")})
    assert on_device.main(["--device", "cpu", "good"]) == 0
    assert "kernels are of 0.1: each is compiled anew" in (out / "summary.txt").read_text()


def test_busy_card_and_a_slice_are_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(usedGpuMemory=3 << 20)],
        nvmlDeviceGetMigMode=lambda _: (1, 1),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", card)
    monkeypatch.setattr(on_device, "stages", lambda at, switches: {"good": Stage((python("good", ""),), "")})
    assert on_device.main(["good"]) == 0
    text = (out / "summary.txt").read_text()
    assert "NOTE  1 other programs are on the card, with 3 MiB" in text and "NOTE  MIG is on" in text


def test_pictures_give_back_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    assert np.array_equal(data_pieces.from_picture(data_pieces.to_picture(pixels)), pixels)


def row(rounds: str) -> dict[str, object]:
    return {"rounds": rounds, "precision": "bf16", "ms": [1.0, 3.0, 2.0], "images_per_s": [10.0, 30.0, 20.0]}


def result(card: str, **cells: str) -> dict[str, object]:
    return {"machine": {"gpus": [card], "torch": "2"}, "model": "lenet",
            "rows": {name.replace("_", ":"): row(rounds) for name, rounds in cells.items()}}  # fmt: skip


def test_table_of_rows_shows_medians_and_does_not_mix_what_cannot_be_compared() -> None:
    one = result("H100", serial_1_16_sma="eager", fused_8_16_sma="captured", tuned_1_64_none="captured")
    (own,) = (line for line in report.rows_table({"a": one}).splitlines() if "fused" in line)
    assert [cell.strip() for cell in own.strip("|").split("|")] == [
        "fused K=8 b=16", "bf16", "20", "10–30", "2.000", "–", "captured", "3",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must not mix cards, models and versions"):
        report.rows_table({"a": one, "b": result("H200", fused_8_16_sma="captured")})
    with pytest.raises(ValueError, match="must not mix kinds of rounds, got captured; eager"):
        report.rows_table({"a": one, "b": result("H100", fused_4_16_sma="eager")})
    assert report.rows_table({}) == ""


def test_rows_are_measured_by_turns_and_say_how_they_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    path = tmp_path / "rows.json"
    monkeypatch.setattr(workloads, "NUM_IMAGES", 64)
    cells = "fused:2:4:sma serial:1:4:none other:1:4:sma tuned:1:4:none"
    words = f"--device cpu --model lenet --seconds 0.01 --turns 2 --profile {tmp_path}/profile --cells {cells}"
    assert rows.main([*words.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {cell: len(row["ms"]) for cell, row in found["rows"].items()} == {
        "fused:2:4:sma": 2, "serial:1:4:none": 2, "other:1:4:sma": 0, "tuned:1:4:none": 2,
    }  # fmt: skip
    assert found["rows"]["fused:2:4:sma"]["rounds"] == "eager" and found["cudnn_benchmark"]
    assert (tmp_path / "profile" / "fused_2_4_sma.txt").read_text().partition(" ms of kernels a round, ")[1]
    assert "other K=1 b=4:" in capsys.readouterr().out
