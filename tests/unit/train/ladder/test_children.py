"""Child processes that end in all the ways that there are, and what is left of them: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossbow_py.engine.trust import Outcome
from crossbow_py.train.ladder.children import Ended, ReadyChildren, outcome_of, run_child

PASSES = "open(sys.argv[1], 'w').write('{\"reason\": \"\", \"may_change\": false}')"
FAILS = "open(sys.argv[1], 'w').write('{\"reason\": \"numbers differ by 0.3\", \"may_change\": true}'); sys.exit(1)"


def outcome(code: str, folder: Path, limit_s: float = 20.0) -> Outcome:
    result, log = folder / "rung.json", folder / "rung.log"
    ended = run_child([sys.executable, "-c", f"import os, signal, sys, time; {code}", str(result)], {}, log, limit_s)
    return outcome_of(ended, result, log, ("layers",))


@pytest.mark.parametrize(
    ("code", "reason", "may_change"),
    [
        (PASSES, None, False),
        (FAILS, "numbers differ by 0.3", True),
        (FAILS.replace("true", "false"), "numbers differ by 0.3", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9 (SIGKILL)", True),  # as a host without memory does
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11 (SIGSEGV)", False),
        (f"{PASSES}; os.kill(os.getpid(), signal.SIGABRT)", "killed by signal 6 (SIGABRT)", False),
        ("raise RuntimeError('CUDA error:\\nillegal')", "ended with exit code 1 and without a result: illegal", True),
        ("pass", "ended with exit code 0 and without a result: no output", True),
        ("os._exit(3)", "ended with exit code 3 and without a result: no output", True),
    ],
)
def test_end_of_a_child_is_one_line(code: str, reason: str | None, may_change: bool, tmp_path: Path) -> None:
    found = outcome(code, tmp_path)
    assert (found.passed, found.reason, found.may_change) == (reason is None, reason or "", may_change)
    assert found.seconds > 0 and found.proves == ("layers",)


@pytest.mark.slow
def test_child_that_hangs_says_where_and_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import faulthandler, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "faulthandler.register(signal.SIGUSR1); child = subprocess.Popen(['sleep', '60']); "
        f"open({str(pid)!r}, 'w').write(str(child.pid))\ndef stuck(): time.sleep(60)\nstuck()"
    )
    begun = time.monotonic()
    found = outcome(code, tmp_path, limit_s=2.0)
    assert (found.status, found.reason) == ("failed", "timed out after 2 s")
    assert time.monotonic() - begun < 20
    assert "in stuck" in (tmp_path / "rung.log").read_text()
    _await_end(int(pid.read_text()))


def test_nothing_is_left_of_a_child_that_ends_before_what_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import subprocess; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); {PASSES}"
    )
    assert outcome(code, tmp_path).passed
    _await_end(int(pid.read_text()))


def _await_end(pid: int) -> None:
    """A process that was killed is gone, or a zombie that nobody has waited for."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it was left running")


def test_child_knows_nothing_of_a_launcher_and_has_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    code = "import os; print(sorted(n for n, v in os.environ.items() if v == '7'), os.environ['CROSSBOW_GRAPHS'])"
    ended = run_child([sys.executable, "-c", code], {"CROSSBOW_GRAPHS": "0"}, tmp_path / "log", 20.0)
    assert ended.code == 0
    assert (tmp_path / "log").read_text() == "[] 0\n"


def test_result_that_is_no_result_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "result").write_text('{"reason": ""}')
    assert outcome_of(Ended(0, 1.0), tmp_path / "result", tmp_path / "log", ()).status == "failed"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says when a parent has ended")
def test_child_whose_parent_is_killed_does_not_stay(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = (
        "import os, pathlib, signal, sys, time; from crossbow_py.distributed.launch import end_with_parent; "
        f"end_with_parent(signal.SIGKILL); pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    file = f"pathlib.Path({str(pid)!r})"
    waits = f"while not ({file}.exists() and {file}.read_text()): time.sleep(0.05)"
    starts = f"import os, pathlib, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    subprocess.run([sys.executable, "-c", f"{starts}\n{waits}\nos._exit(0)"], check=True, timeout=60)
    _await_end(int(pid.read_text()))


# With arguments or told them on stdin, it says so in its log; a line tells whether it was there before.
READY = """
import json, os, sys
words, was_ready = sys.argv[1:], len(sys.argv) == 1
if was_ready:
    call = json.loads(sys.stdin.readline() or sys.exit())
    words = call["arguments"]
    os.environ.update(call["environment"])
    os.dup2(os.open(call["log"], os.O_WRONLY | os.O_CREAT), 1)
print(was_ready, os.environ["RUNG"], *words, flush=True)
os._exit(int(words[0]))
"""


def test_second_child_was_ready_before_it_was_asked_for_and_ends_as_others_do(tmp_path: Path) -> None:
    prefix = [sys.executable, "-c", READY]
    with contextlib.closing(ReadyChildren(prefix)) as run:
        for number in range(3):
            log = tmp_path / f"{number}.log"
            ended = run([*prefix, str(number)], {"RUNG": f"rung {number}"}, log, 20.0)
            assert ended.code == number
            assert log.read_text() == f"{number > 0} rung {number} {number}\n"
        assert run([sys.executable, "-c", "raise SystemExit(7)"], {}, tmp_path / "other.log", 20.0).code == 7
        (waiting,) = run._ready
    assert waiting.poll() is not None


def test_child_that_ended_while_it_was_to_be_ready_is_started_anew(tmp_path: Path) -> None:
    prefix = [sys.executable, "-c", "import sys; sys.exit(len(sys.argv) == 1)"]
    with contextlib.closing(ReadyChildren(prefix)) as run:
        for number in range(2):
            assert run([*prefix, "go"], {}, tmp_path / f"{number}.log", 20.0).code == 0
            run._ready[0].wait(20.0)


def test_ready_child_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    code = "import sys, time; sys.argv[1:] or sys.stdin.readline(); time.sleep(0 if sys.argv[1:] else 60)"
    prefix = [sys.executable, "-c", code]
    with contextlib.closing(ReadyChildren(prefix)) as run:
        assert run([*prefix, "go"], {}, tmp_path / "first.log", 20.0).code == 0
        assert run([*prefix, "go"], {}, tmp_path / "second.log", 0.5).code is None
