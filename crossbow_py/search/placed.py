"""A search whose workers a launcher starts over a cluster. This process trains nothing: it reads the shared study."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from crossbow_py.cli.launchers.crew import Crew, Ended, run_crew
from crossbow_py.cli.launchers.placement import RayLauncher, Share, share_of
from crossbow_py.cli.launchers.ray_cluster import Place, PlacedJob, RayCluster, RayProcess, connected
from crossbow_py.cli.launchers.ray_worker import machine_name
from crossbow_py.cli.overrides import as_override, parse
from crossbow_py.core.errors import unwritable
from crossbow_py.core.printing import print_line
from crossbow_py.core.signals import StopSignal
from crossbow_py.distributed.ranks import ALONE
from crossbow_py.search.build import maximizes
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.folder import JOURNAL_FILE, SearchFolder, check_hosts, opened_folder, told_how_to_go_on
from crossbow_py.search.hyperband import is_over
from crossbow_py.search.loop import SearchRules
from crossbow_py.search.outcome import trial_records
from crossbow_py.search.report.follower import Follower
from crossbow_py.search.study.storage import shown_address
from crossbow_py.search.study.study import SharedStudy
from crossbow_py.train.evaluation.metrics import checked_metrics, metrics_of

_OF_THE_FOLDER = ("output_dir", "resume")
_MARK = ".seen_by_workers_"  # the beginning of its name


def search_on_ray(config: SearchConfig, launcher: RayLauncher, words: Sequence[str]) -> int:
    """Search by workers over a cluster of Ray until nothing is left or a signal comes. Return the exit code.

    Each worker is the same command, in the folder that is chosen here. Ray places them, and decides nothing else.

    Args:
        config: the configuration.
        launcher: the settings of the cluster.
        words: the command line of a worker, as far as it says what is searched.

    Raises:
        UserError: there is no such cluster, no place in it for a worker, or nothing that its machines share.
        LaunchError: Ray cannot start.
        StorageError: the storage of the search cannot be read; workers have ended, and what is finished is kept.
    """
    metrics = checked_metrics(metrics_of(config.metrics), num_ranks=1)
    maximize = maximizes(config, metrics)
    with connected(launcher) as cluster:
        share = share_of(cluster.machines(), launcher, [config.device])
        with opened_folder(config, ALONE) as folder, _marked(folder.path) as mark:
            search = _PlacedSearch(config, maximize, folder)
            crew = search.crew(cluster, share, launcher, words, mark)
            with closing(search), told_how_to_go_on(config, folder):
                return search.run(crew)


def words_of_workers(words: Sequence[str], folder: Path) -> list[str]:
    """Return the command line of a worker that joins the search in a folder."""
    own = [word for word in words if word.startswith("-") or parse(word).key_or_group not in _OF_THE_FOLDER]
    return [*own, f"output_dir={as_override(str(folder))}", "resume=auto"]


class _PlacedSearch:
    """A search whose workers run elsewhere: what they print and how they end, and what is said of the study."""

    def __init__(self, config: SearchConfig, maximize: bool, folder: SearchFolder) -> None:
        self._config, self._maximize, self._folder = config, maximize, folder
        self._path = folder.path.absolute()
        self._address = config.storage or f"journal:{self._path / JOURNAL_FILE}"
        self._rules = SearchRules(
            config.brackets(), config.metric, config.packing, config.seed, lookahead=1, maximize=maximize
        )
        self._study: SharedStudy | None = None
        self._follower: Follower | None = None
        self._codes: list[int] = []
        self._printed: set[str] = set()

    def crew(
        self, cluster: RayCluster, share: Share, launcher: RayLauncher, words: Sequence[str], mark: Path
    ) -> Crew:  # fmt: skip
        """Return the workers, which start once they are asked for their turn."""
        number = launcher.num_workers or share.places
        job = PlacedJob("search", words_of_workers(words, self._folder.path), str(Path.cwd()), str(mark))
        trials = sum(bracket.num_trials for bracket in self._rules.brackets)
        self._say(
            f"{self._config.experiment}: {trials} trials, by {number} worker{'s' * (number > 1)} that Ray places, each "
            f"on {share.text}"
        )
        self._say(f"storage {shown_address(self._address)}")
        self._say(f"writing to {self._folder.path}")

        def start(_: int, __: bool) -> RayProcess:
            return cluster.start(share, job, self._check)

        names = [f"worker {index + 1}" for index in range(number)]
        return Crew(names, start, number, launcher.max_restarts, self._say)

    def run(self, crew: Crew) -> int:
        """Wait for the workers, and say how the search stands and ends. Return its exit code. Raises StorageError."""

        def ended(_: int, end: Ended) -> None:
            self._codes.append(end.code)
            text = end.err.strip()
            if end.code and text and text not in self._printed:  # the mistake of one is often that of all
                self._printed.add(text)
                print_line(text, sys.stderr)
            if end.code == 0:  # nothing is left to search, or it is enough
                crew.start_no_more()

        def look() -> None:
            if self._follower is None and not crew.has_printed:
                return  # a worker that is refused leaves nothing in a storage, and so does this
            self._followed().look(crew.num_placed)

        status = run_crew(crew, ended, look)
        if self._follower is not None or 0 in self._codes:
            follower, study = self._followed(), self._opened()
            done = is_over(self._rules.brackets, study.results(), maximize=self._maximize)
            follower.end("finished" if done else status or "stopped", self._folder.path)
        if 0 in self._codes:
            return 0
        return StopSignal.EXIT_CODES[status] if status is not None else max(self._codes)

    def close(self) -> None:
        """Close the connections to the storage. Does not raise."""
        if self._study is not None:
            self._study.close()

    def _opened(self) -> SharedStudy:
        """Return the study, of which this process claims nothing. Raises StorageError."""
        if self._study is None:
            config = self._config
            self._study = SharedStudy(
                self._address, config.study or config.experiment, sampler=config.sampler, space=config.parsed_space,
                seed=config.seed, maximize=self._maximize, worker=f"{socket.gethostname()}:{os.getpid()}",
                lease_s=config.lease_s,
            )  # fmt: skip
        return self._study

    def _followed(self) -> Follower:
        if self._follower is None:
            study, rules = self._opened(), self._rules
            self._follower = Follower(
                self._config, self._maximize, lambda: trial_records(rules, study), self._say,
                is_new=not self._folder.is_known,
            )  # fmt: skip
        return self._follower

    def _check(self, place: Place) -> None:
        """Raise UserError for a machine whose worker would not share what it finds."""
        is_one = place.sees_mark and place.machine == machine_name()
        check_hosts(self._config.storage, is_shared=place.sees_mark, is_one=is_one, who="workers")

    def _say(self, line: str) -> None:
        print_line(line, sys.stdout)


@contextmanager
def _marked(path: Path) -> Iterator[Path]:
    """Yield a file in the folder by which others see whether they share it."""
    mark = path.absolute() / f"{_MARK}{uuid.uuid4().hex[:12]}"
    try:
        mark.touch()
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield mark
    finally:
        with suppress(OSError):
            mark.unlink()
