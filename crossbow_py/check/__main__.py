"""`python -m crossbow_py.check`: what this machine's device can be trusted with."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossbow_py.check.archive import check_writable, write_archive
from crossbow_py.check.config import CheckConfig
from crossbow_py.cli.command_line import run, say
from crossbow_py.cli.output_folder import time_name
from crossbow_py.core.files import given_path
from crossbow_py.core.printing import print_line
from crossbow_py.engine.executors import candidates
from crossbow_py.engine.modules.precision import choose_device, why_no_cuda
from crossbow_py.engine.trust import Outcome, RememberedOutcomes, in_use
from crossbow_py.train.ladder.ladder import Ladder, forgotten, line, one_at_a_time
from crossbow_py.train.ladder.rungs import RUNGS, Rung, untried


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run(argv, CheckConfig, answer)


def answer(config: CheckConfig, rungs: Sequence[Rung] = RUNGS) -> int:
    """Climb the ladder, or say what is remembered; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="crossbow_check_") as folder:
        ladder = Ladder(choose_device(config.device), Path(folder), config.limit_s, rungs)
        path = given_path("archive", config.archive or f"crossbow_check_{time_name()}.tar.gz")
        shown = [_about(ladder.facts)]
        if config.device == "auto" and ladder.device.type == "cpu":
            shown.append(f"The CPU is tried, as {why_no_cuda()}.")
        code = max(map(say, shown))

        def begin(rung: Rung) -> None:
            if sys.stdout.isatty():  # its outcome is written over it
                print(f"....  {rung.title}", end="\r", flush=True)

        def tell(rung: Rung, outcome: Outcome, is_known: bool) -> None:
            shown.append(line(rung.title, outcome, is_known))
            print_line(shown[-1], sys.stdout)

        remembered = RememberedOutcomes()
        with one_at_a_time(lambda message: print(message, file=sys.stderr, flush=True)):
            known = {} if config.again else remembered.of(ladder.device)
            is_new = bool(untried(ladder.rungs, ladder.lacks, known))
            if is_new or config.archive is not None:
                check_writable(path)
            if is_new:
                code = max(code, say("Trying it step by step in child processes; it takes some minutes."))
            outcomes = ladder.climb(known, tell, begin)
        shown.append(_taken(ladder))
        code = max(code, say(shown[-1]))
        if is_new:
            write_archive(path, Path(folder), ladder.facts, outcomes, shown)
            code = max(code, say(f"Everything about it is in {path}; send that with a report."))
            if not ladder.is_kept:
                print(forgotten(ladder.device), file=sys.stderr, flush=True)
        else:
            code = max(code, say(f"Remembered in {remembered.path}; again=true tries everything anew."))
    return max(code, int(any(outcome.status == "failed" for outcome in outcomes.values())))


def _about(facts: Mapping[str, str]) -> str:
    """Return a line about the device and versions."""
    words = [facts["device"], *(f"{name} {facts[name]}" for name in ("driver", "torch", "cuda", "cudnn", "triton"))]
    return " · ".join(word for word in words if not word.endswith((" ", " None")))


def _taken(ladder: Ladder) -> str:
    """Return a line on what `executor=auto` takes now."""
    names = f"executor=auto chooses among {', '.join(candidates(ladder.device))}"
    if ladder.device.type != "cuda":
        return f"{names}; on a CPU it leaves nothing out."
    used = in_use(ladder.device)
    kernels = ", ".join(each for each in used if each != "graphs") or "none"
    return f"{names}; CUDA graphs: {'yes' if 'graphs' in used else 'no'}; kernels: {kernels}."


if __name__ == "__main__":
    raise SystemExit(main())
