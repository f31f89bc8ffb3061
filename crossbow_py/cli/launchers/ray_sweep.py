"""The jobs of a sweep on a cluster of Ray: each a process with a GPU, or cores, of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from crossbow_py.cli.launchers.crew import Crew, Ended, run_crew
from crossbow_py.cli.launchers.placement import RayLauncher, share_of
from crossbow_py.cli.launchers.ray_cluster import Place, PlacedJob, RayProcess, connected
from crossbow_py.core.printing import print_line
from crossbow_py.core.signals import StopSignal

_OUTPUT_DIR = re.compile(r"\+{0,2}output_dir=")
_RESUMED = re.compile(r"\+{0,2}resume=(?!null\Z)")


def place_jobs(
    launcher: RayLauncher, command: str, devices: Sequence[str], jobs: Sequence[tuple[str, list[str]]], *, resumes: bool
) -> list[int]:  # fmt: skip
    """Run the jobs of a sweep on the cluster, and print what each has printed once it has ended. Return exit codes.

    A job whose process or machine is lost is started again, and resumes what it had written to its folder. After a
    signal its code alone is returned.

    Args:
        launcher: the settings.
        command: the command, such as train.
        devices: the key `device` of each job.
        jobs: the name of each, and its command line.
        resumes: whether a job that has a folder can go on in it.

    Raises:
        UserError: there is no such cluster, or no place in it for a job.
        LaunchError: Ray cannot start.
    """

    def say(text: str) -> None:
        print_line(text, sys.stdout)

    with connected(launcher) as cluster:
        share = share_of(cluster.machines(), launcher, devices)
        most = min(len(jobs), launcher.num_workers or share.places)
        count = f"{len(jobs)} run{'s' * (len(jobs) > 1)}"
        say(f"launcher=ray starts {count}, {most} at a time, each on {share.text}")
        codes: list[int] = []

        def start(number: int, again: bool) -> RayProcess:
            words = jobs[number][1]
            job = PlacedJob(command, resumed(words) if again and resumes else words, str(Path.cwd()))
            return cluster.start(share, job, _anywhere)

        def ended(number: int, end: Ended) -> None:
            codes.append(end.code)
            say(f"run {number + 1} of {len(jobs)}{jobs[number][0]}")
            for text, stream in ((end.out, sys.stdout), (end.err, sys.stderr)):
                if text.strip():
                    print_line(text.rstrip(), stream)

        names = [f"run {number + 1}{name}" for number, (name, _) in enumerate(jobs)]
        crew = Crew(names, start, most, launcher.max_restarts, say)
        status = run_crew(crew, ended)
    return codes if status is None else [StopSignal.EXIT_CODES[status]]  # jobs that were stopped have SIGTERM's


def resumed(words: Sequence[str]) -> list[str]:
    """Return the words of a run that is started again: it goes on in its folder, if that and no other is named."""
    has_folder, resumes = (any(map(pattern.match, words)) for pattern in (_OUTPUT_DIR, _RESUMED))
    return [*words, "resume=auto"] if has_folder and not resumes else list(words)


def _anywhere(_: Place) -> None:
    """Every machine will do: a run shares nothing with others."""
