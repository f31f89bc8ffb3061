"""Does torchrun bring a killed rank back without a sample lost or repeated, and how soon is a round trained again?

    python experiments/faults/restarts.py [--runs 10 --starts 5] [--json PATH]

README.md says what is killed, when, and what is looked at.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.telemetry.records import read_summary
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.faults.campaign import resumed_from
from experiments.faults.recording import (
    NUM_SAMPLES,
    Recording,
    counted_stream,
    lost_and_repeated,
    read_recordings,
    starts_of,
)
from experiments.faults.report import restarts_text

_NUM_RANKS, _NUM_LEARNERS, _BATCH_SIZE = 2, 2, 16
_POLL_S = 0.005
_PATIENCE_S = 300.0
_LATEST = 0.8  # of the run, a rank is killed
_ENDLESS = 1000.0  # epochs
_FIRST_START, _A_ROUND = 400, _NUM_LEARNERS + 2  # lines after which a process alone is killed
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_NUM_RANKS}", "--max-restarts=3"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--runs", type=count, default=10, help="under torchrun, a rank of each killed once (default %(default)s)")
    add("--starts", type=count, default=5, help="of one process with resume=auto (default %(default)s)")
    add("--epochs", type=positive, default=30.0, help="of each run (default %(default)s)")
    add("--seed", type=int, default=0, help="of the moments (default %(default)s)")
    return measure_and_write(parser, argv, measure, restarts_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    moments = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text).resolve()
        runs = [_killed_run(folder / str(number), given.epochs, number, moments) for number in range(given.runs)]
        alone = _starts_alone(folder / "alone", given.starts)
    return {"kind": "restarts", "epochs": given.epochs, "seed": given.seed, "runs": runs, "alone": alone}


def command(recorded: Path, epochs: float, checkpoint_every_s: float = 0.25) -> list[str]:
    return [
        "-m", "crossbow_py.train", "+experiment=digits", "device=cpu", "precision=fp32", "executor=serial",
        f"num_learners={_NUM_LEARNERS}", f"batch_size={_BATCH_SIZE}", f"max_epochs={epochs}",
        "checkpoint_every_epochs=null", f"checkpoint_every_s={checkpoint_every_s}",
        "data=custom", "data.target=experiments.faults.recording.numbered_digits",
        "model=custom", "model.target=experiments.faults.recording.RecordingMLP", f"+model.args.folder={recorded}",
    ]  # fmt: skip


def _start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=log, stderr=log)


def _killed_run(folder: Path, epochs: float, number: int, moments: random.Random) -> dict[str, Any]:
    """One run under torchrun, of which a rank is killed once; every other run names its folder."""
    recorded, named = folder / "recorded", number % 2 == 1
    recorded.mkdir(parents=True)
    rank, share = moments.randrange(_NUM_RANKS), moments.uniform(0, _LATEST)
    kill_at = 1 + int(share * epochs * NUM_SAMPLES / (_BATCH_SIZE * _NUM_RANKS))
    options = ["output_dir=run"] if named else []
    launcher = _start([*_TORCHRUN, *command(recorded, epochs), *options], folder)
    try:
        pid = _await_batches(recorded, f"rank-{rank}.*.jsonl", kill_at, launcher)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        exit_code = launcher.wait(_PATIENCE_S)
    finally:
        launcher.kill()
        launcher.wait()
    (run,) = [folder / "run"] if named else list((folder / "runs" / "digits").iterdir())
    found = {
        "names_folder": named,
        "rank": rank,
        "batches": kill_at,
        "load": _load(),
        "exit_code": exit_code,
        **_outcome(run, read_recordings(recorded, _BATCH_SIZE), killed_s),
    }
    print(f"run {number}: {found}", flush=True)
    return found


def _await_batches(recorded: Path, name: str, number: int, process: subprocess.Popen[bytes]) -> int:
    """Block until a rank, whose file is of that name, has trained so many batches; returns its process."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s and process.poll() is None:
        for path in recorded.glob(name):
            if path.read_bytes().count(b"\n") >= number:
                return int(path.name.split(".")[1])
        time.sleep(_POLL_S)
    raise RuntimeError(f"{name} did not get {number} batches; see {recorded.parent}/output.log")


def _outcome(run: Path, recordings: Sequence[Recording], killed_s: float) -> dict[str, Any]:
    starts = starts_of(recordings, _NUM_RANKS)
    begins = [begin or 0 for begin in resumed_from((run / "console.log").read_text(encoding="utf-8"))]
    summary = read_summary(run)
    stream = counted_stream(starts, begins, summary["samples_seen"], _NUM_RANKS, _NUM_LEARNERS)
    lost, repeated = lost_and_repeated(stream, NUM_SAMPLES)
    trained = sum(len(batch) for recording in recordings for batch in recording.batches)
    return {
        "starts": len(starts),
        "resumed_at": begins[1:],
        "restart_s": round(max(first_round_s(each) for each in starts[1].values()) - killed_s, 3),
        "epochs_checked": len(stream) // NUM_SAMPLES,
        "lost": lost,
        "repeated": repeated,
        "samples_again": trained - len(stream),
        "test_accuracy": round(summary["test_accuracy"], 4),
    }


def first_round_s(recording: Recording) -> float:
    """The time when a process had trained its first round: the second begins."""
    return recording.times_s[_NUM_LEARNERS]


def _starts_alone(folder: Path, number: int) -> list[dict[str, float]]:
    """Seconds from the start of one process with resume=auto to its first round's end; each is killed then.

    Its processor's seconds, all that a process costs on idle cores, are hardly prolonged by others.
    """
    recorded, found = folder / "recorded", list[dict[str, float]]()
    recorded.mkdir(parents=True)
    for place in range(number + 1):
        begin_s = time.monotonic()
        process = _start([*command(recorded, _ENDLESS), "output_dir=run", "resume=auto"], folder)
        try:
            _await_batches(recorded, f"rank-0.{process.pid}.jsonl", _FIRST_START if place == 0 else _A_ROUND, process)
            processor_s = _processor_s(process.pid)
        finally:
            process.kill()
            process.wait()
        wall_s = first_round_s(read_recordings(recorded, _BATCH_SIZE)[-1]) - begin_s
        found.append({"wall_s": round(wall_s, 3), "processor_s": round(processor_s, 3), "load": _load()})
    print(f"alone: {found}", flush=True)
    return found[1:]  # the first wrote the checkpoint that the others go on from


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _load() -> float:
    return round(os.getloadavg()[0], 1)


if __name__ == "__main__":
    raise SystemExit(main())
