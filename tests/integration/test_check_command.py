"""`python -m crossbow_py.check`, with real child processes on the CPU."""

from __future__ import annotations

import json
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from crossbow_py.check.__main__ import answer, main
from crossbow_py.check.archive import check_writable, write_archive
from crossbow_py.check.config import CheckConfig
from crossbow_py.engine.modules.precision import why_no_cuda
from crossbow_py.engine.trust import RememberedOutcomes
from crossbow_py.train.ladder.rungs import RUNGS
from tests.caches import use_cache

SERIAL, FUSED, RESUME = (next(rung for rung in RUNGS if rung.name == name) for name in ("serial", "fused", "resume"))
EXACT = {"fp32": 0.0, "bf16": 0.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(RememberedOutcomes, "_OWN", {})
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_ladder_of_a_cpu_with_a_rung_that_fails_says_why_and_is_remembered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Learners of `fused` add up in another order, which no tolerance allows here.
    rungs = [SERIAL, replace(FUSED, tolerance=EXACT), replace(RESUME, after=("fused",))]
    monkeypatch.setenv("CROSSBOW_PROBE", "7")
    assert answer(CheckConfig(device="cpu", archive="sent.tar.gz"), rungs) == 1
    first, announced, *lines = capfd.readouterr().out.splitlines()
    assert first.startswith("cpu: ") and " · torch " in first
    assert announced == "Trying it step by step in child processes; it takes some minutes."
    assert [each.split()[0] for each in lines[:3]] == ["PASS", "FAIL", "SKIP"]
    assert "numbers in fp32 differ by " in lines[1] and "(0e+00 are allowed)" in lines[1]
    assert lines[2].endswith("it builds on 'fused operators', which failed")
    assert lines[3:] == [
        "executor=auto chooses among serial, threads, fused, fused_threads; on a CPU it leaves nothing out.",
        "Everything about it is in sent.tar.gz; send that with a report.",
    ]
    with tarfile.open(tmp_path / "sent.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
        assert names == {
            "check.txt", "versions.json", "outcomes.json", "junit.xml", "serial.log", "serial.json", "fused.log",
            "fused.json",
        }  # fmt: skip
        suite = ET.fromstring(_text(archive, "junit.xml"))
        assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
        versions = json.loads(_text(archive, "versions.json"))
        assert versions["torch"] in first and versions["python"] == sys.version
        assert versions["environment"]["CROSSBOW_PROBE"] == "7"
    begun = time.monotonic()
    assert answer(CheckConfig(device="cpu"), rungs) == 1
    assert time.monotonic() - begun < 1
    again = capfd.readouterr().out.splitlines()
    assert "remembered: numbers in fp32 differ" in again[2]
    assert again[-1].endswith("ladder.json; again=true tries everything anew.")


@pytest.mark.slow
def test_archive_has_the_traceback_of_what_failed(tmp_path: Path) -> None:
    assert answer(CheckConfig(device="cpu", archive="sent.tar.gz"), [replace(SERIAL, executor="nonsense")]) == 1
    with tarfile.open(tmp_path / "sent.tar.gz") as archive:
        log = _text(archive, "serial.log")
        assert "Traceback (most recent call last):" in log and "child.py" in log


@pytest.mark.slow
def test_without_a_gpu_auto_says_that_the_cpu_is_tried(capfd: pytest.CaptureFixture[str]) -> None:
    assert answer(CheckConfig(archive="sent.tar.gz"), [SERIAL]) == 0
    second = capfd.readouterr().out.splitlines()[1]
    assert second == f"The CPU is tried, as {why_no_cuda()}."


def test_archive_replaces_an_archive_and_no_other_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("words")
    assert main(["device=cpu", f"archive={page}"]) == 2
    assert "cannot be written (it is there already, and is no archive)" in capfd.readouterr().err
    assert page.read_text() == "words"
    for _ in range(2):
        check_writable(tmp_path / "sent.tar.gz")
        write_archive(tmp_path / "sent.tar.gz", tmp_path, {}, {}, [])


def _text(archive: tarfile.TarFile, name: str) -> str:
    file = archive.extractfile(f"sent/{name}")
    assert file is not None
    return file.read().decode()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_everything_that_there_is_for_a_cpu_passes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["device=cpu"]) == 0
    assert " FAIL " not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=cuda"], "no CUDA device is visible"),
        (["device=cuda:7"], "CUDA_VISIBLE_DEVICES=7"),
        (["limit_s=0"], "limit_s must be greater than 0"),
        (["device=cpu", "archive=/nowhere/sent.tar.gz"], "archive /nowhere/sent.tar.gz cannot be written"),
        (["num_learners=3"], "unknown key num_learners, which is for python -m crossbow_py.train"),
    ],
)
def test_mistake_is_one_line_before_anything_is_tried(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
