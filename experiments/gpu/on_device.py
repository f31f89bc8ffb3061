"""Runs stages on a GPU, each in processes of its own with a time limit, and keeps what they write as they go.

    python experiments/gpu/on_device.py --device cuda --seconds 3000 tests update memory

Stages run one after another, those joined by + side by side. A stage that fails or hangs is ended, stops no other, and
says what to try next. Everything is written to $OUT (elsewhere runs/gpu) after every stage and every ten seconds:
summary.txt, logs.tar.gz, results.tar.gz with paths as in the tree, and check.tar.gz. README.md has the calls.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.machine import ROOT, commit
from experiments.bench.program import positive
from experiments.gpu.stages import EVERYTHING, Job, Place, Stage, stages

CARRIED = ROOT / ".gpu"  # what prepare.py made and a call has brought; ignored by git
KERNELS = Path("/tmp/crossbow_triton_cache")  # the files in it hold this path, so it is that of every machine
TORCH = "2.11.0"  # what prepare.py expects
SITE, DATA = (Path(tempfile.gettempdir()) / "crossbow_gpu" / name for name in ("site", "data"))
_NEEDED = ("hydra", "omegaconf", "antlr4", "optuna")
_COLLECTED = (".txt", ".log", ".jsonl", ".yaml", ".csv")
_MOST_BYTES = 12 * 2**20  # a file that comes back may have 16 MiB
_EVERY_S, _LEAST_S = 10.0, 5.0


class Report:
    """The lines said so far, and the files of $OUT; safe for several threads."""

    def __init__(self, out: Path, at: Place) -> None:
        self._out, self._at, self._begun = out, at, time.monotonic()
        self._lines: list[str] = []
        self._lock = threading.RLock()
        self.failed: list[str] = []
        self.running: set[subprocess.Popen[bytes]] = set()

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def say(self, line: str) -> None:
        with self._lock:
            self._lines.append(f"{self.elapsed():6.1f} s  {line}")
            print(self._lines[-1], flush=True)
            (self._out / "summary.txt").write_text("\n".join(self._lines) + "\n")

    def collect(self) -> None:
        """Write the archives anew; what is cut off in the middle leaves the last ones."""
        with self._lock:
            found = [path for path in sorted(self._at.work.rglob("*")) if path.is_file()]
            logs = [path for path in found if path.suffix in _COLLECTED or path.name == "summary.json"]
            self._write("logs.tar.gz", {path: path.relative_to(self._at.work) for path in logs})
            results = {path: Path("rows", path.name) for path in found if path.parent == self._at.work}
            results = {path: to for path, to in results.items() if path.suffix == ".json"}
            inside = self._at.results.is_relative_to(self._at.work)  # else they are in the tree already
            for path in sorted(self._at.results.glob("*/results/*")) if inside else ():
                results[path] = Path("experiments", path.relative_to(self._at.results))
            self._write("results.tar.gz", results)
            if (archive := self._at.work / "check.tar.gz").exists():
                shutil.copyfile(archive, self._out / archive.name)

    def _write(self, name: str, members: dict[Path, Path]) -> None:
        partial = self._out / f"{name}.partial"
        with tarfile.open(partial, "w:gz") as archive:
            for path, to in members.items():
                with contextlib.suppress(OSError):  # a job may move what it wrote
                    if path.stat().st_size < _MOST_BYTES:
                        archive.add(path, to)
        partial.replace(self._out / name)


def run_job(job: Job, report: Report, at: Place, environment: dict[str, str], deadline_s: float) -> bool:
    """Run a job, its output to a log, and say how it ended; returns whether it succeeded."""
    limit = min(job.limit_s, deadline_s - report.elapsed())
    if limit < _LEAST_S:
        report.say(f"SKIP  {job.name:22} no time is left")
        return False
    log, begun, code = at.work / f"{job.name}.log", report.elapsed(), None
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                job.command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env={**environment, **job.variables},
            )  # fmt: skip
        except OSError as error:
            report.say(f"FAIL  {job.name:22} {job.command[0]} cannot be started: {error.strerror}")
            return False
        report.running.add(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        _end(process)
        report.running.discard(process)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    word = "ok   " if code == 0 else "LIMIT" if code is None else "FAIL "
    report.say(f"{word} {job.name:22} {report.elapsed() - begun:6.1f} s  {(lines or [''])[-1][:150]}")
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, sent)
                process.wait(4)


def run_stage(
    name: str, stage: Stage, report: Report, at: Place, environment: dict[str, str], deadline_s: float
) -> None:
    """Run the jobs of a stage side by side, and say what to try if one fails."""
    jobs = list(stage.jobs)
    if any(job.reads_data for job in jobs) and not _has_data():
        report.say(f"SKIP  {name:22} CIFAR-10 is not whole: a call must carry each piece of it; next: {stage.then}")
        report.failed.append(name)
        return
    results: list[bool] = []
    own = [
        threading.Thread(
            target=lambda job=job: results.append(run_job(job, report, at, environment, deadline_s)), daemon=True
        )
        for job in jobs
    ]  # fmt: skip
    for thread in own:
        thread.start()
    for thread in own:
        thread.join()
    if sum(results) < len(jobs):
        report.failed.append(name)
        report.say(f"      {name} failed; next: {stage.then}")
    report.collect()


def _has_data() -> bool:
    named = os.environ.get("CROSSBOW_DATA_DIR", "")  # of a machine that has it
    return (DATA / "whole").exists() or bool(named and list(Path(named).glob("cifar-10*")))


def take_what_was_carried(report: Report) -> dict[str, str]:
    """Make usable what a call has brought; returns variables of the environment. Nothing that is missing stops it."""
    taken = {}
    for wheel in sorted((CARRIED / "always").glob("*.whl")):
        with said_if_broken(report, wheel.name):
            _take(wheel)
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        report.say(f"NOTE  {', '.join(missing)}: not here, and no wheel was carried; stages that need it will fail")
    written = CARRIED / "always" / "commit"
    if written.exists():
        taken["CROSSBOW_COMMIT"] = written.read_text().strip()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if (found := importlib.metadata.version("torch").partition("+")[0]) != TORCH:
            report.say(f"NOTE  torch is {found}, and {TORCH} was expected: compare no figure with those of {TORCH}")
    with said_if_broken(report, "kernels"):
        _unpack_kernels(report)
    if KERNELS.exists():
        taken["TRITON_CACHE_DIR"] = str(KERNELS)
    return {**taken, **_data(report)}


@contextlib.contextmanager
def said_if_broken(report: Report, what: str) -> Iterator[None]:
    """Say what was carried and cannot be used, and go on without it."""
    try:
        yield
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError) as error:
        report.say(f"NOTE  {what} cannot be used ({type(error).__name__}: {error}); carry it again")


def _take(wheel: Path) -> None:
    taken = SITE / ".taken" / wheel.name
    if not taken.exists():  # they are of Python alone: unpacked is installed
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)
        taken.parent.mkdir(exist_ok=True)
        taken.touch()


def _unpack_kernels(report: Report) -> None:
    packed = CARRIED / "kernels" / "cache.tar.xz"
    if not packed.exists() or (KERNELS / f"{packed.stat().st_size}.unpacked").exists():
        return
    compiled_by = (CARRIED / "kernels" / "triton").read_text().strip()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if (found := importlib.metadata.version("triton")) != compiled_by:
            report.say(f"NOTE  Triton is {found}, kernels are of {compiled_by}: each is compiled anew, in a second")
            return
    with tempfile.TemporaryDirectory(dir=KERNELS.parent) as folder, tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
        entries = sum(1 for _ in Path(folder).iterdir())
        shutil.copytree(folder, KERNELS, dirs_exist_ok=True)
    (KERNELS / f"{packed.stat().st_size}.unpacked").touch()
    report.say(f"ok    kernels: {entries} entries")


def _data(report: Report) -> dict[str, str]:
    pieces = sorted(map(str, CARRIED.glob("data*")))
    if pieces and not (DATA / "whole").exists():
        words = [sys.executable, str(ROOT / "experiments/gpu/data_pieces.py"), "unpack", str(DATA), *pieces]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        said = (done.stdout + done.stderr).strip().splitlines()
        report.say(f"{'ok   ' if done.returncode == 0 else 'NOTE '} {(said or ['the data cannot be unpacked'])[-1]}")
    return {"CROSSBOW_DATA_DIR": str(DATA)} if pieces else {}


def who_else(report: Report) -> None:
    """Say what makes figures of this card doubtful: other programs on it, or that it is a slice."""
    import pynvml  # noqa: PLC0415  it may be missing

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        if others := pynvml.nvmlDeviceGetComputeRunningProcesses(card):
            used = sum(other.usedGpuMemory or 0 for other in others) >> 20
            report.say(f"NOTE  {len(others)} other programs are on the card, with {used} MiB: figures mean nothing")
        if pynvml.nvmlDeviceGetMigMode(card)[0]:
            report.say("NOTE  MIG is on: this is a slice of a card, and no figure is one of the card")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("stages", nargs="+", help="names, joined by + if they run side by side")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="default %(default)s")
    add("--seconds", type=positive, default=3600.0, help="of all stages together (default %(default)s)")
    add("--untried", action="store_true", help="measure with graphs and every kernel, whatever the ladder remembers")
    add("--results", type=Path, help="folder of experiments/ to write results to (default: only into results.tar.gz)")
    add("--tiny", action="store_true", help="try the stages themselves, with small models")
    given = parser.parse_args(argv)
    work = Path(tempfile.mkdtemp(prefix="crossbow_gpu_"))
    at = Place(given.device, given.tiny, work, given.results.resolve() if given.results else work / "experiments")
    switches = {name: os.environ.get(name, value) for name, value in EVERYTHING.items()} if given.untried else {}
    known = stages(at, switches)
    wanted = [group.split("+") for group in given.stages]
    if unknown := [name for group in wanted for name in group if name not in known]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(known)}")
    out = Path(os.environ.get("OUT") or ROOT / "runs/gpu")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.txt").touch()
    except OSError as error:
        shutil.rmtree(work)
        parser.error(f"results cannot be written to {out} ({error.strerror}); set OUT to a folder that can be")
    report = Report(out, at)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _run(wanted, known, report, at, given.seconds)
    finally:
        for process in list(report.running):  # the call itself is ended
            _end(process)
        report.collect()
        shutil.rmtree(work, ignore_errors=True)
    if report.failed:
        report.say(f"error: these failed: {', '.join(report.failed)}")
    return int(bool(report.failed))


def _run(wanted: list[list[str]], known: dict[str, Stage], report: Report, at: Place, seconds: float) -> None:
    report.say(f"{' '.join('+'.join(group) for group in wanted)} in {seconds:.0f} s, on {at.device}")
    own = take_what_was_carried(report)
    if at.device == "cuda":
        with contextlib.suppress(ImportError):
            who_else(report)
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # as the commands of the project set it
        **os.environ, **own, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1",
        "MPLBACKEND": "Agg",
    }  # fmt: skip
    report.say(f"commit {own.get('CROSSBOW_COMMIT') or commit() or 'unknown'}")
    over = threading.Event()

    def keep_collecting() -> None:
        while not over.wait(_EVERY_S):
            report.collect()

    threading.Thread(target=keep_collecting, daemon=True).start()
    try:
        for group in wanted:
            running = [
                threading.Thread(
                    target=run_stage, args=(name, known[name], report, at, environment, seconds), daemon=True
                )
                for name in group
            ]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
    finally:
        over.set()


if __name__ == "__main__":
    raise SystemExit(main())
