"""Who is started, who is started again, and how all are ended: with processes whose fate is written down."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from crossbow_py.cli.launchers.crew import Crew, Ended, Lost, run_crew
from crossbow_py.core.errors import UserError

Fate = Ended | Lost | UserError | None


class Fated:
    """A process that `poll` says these of in turn, and nothing from then on; one that is stopped ends with 143."""

    def __init__(self, fates: Sequence[Fate], is_placed: bool = True) -> None:
        self._fates, self.is_placed, self.has_printed = list(fates), is_placed, False
        self.is_stopped = self.is_closed = False

    def poll(self) -> Ended | Lost | None:
        if self.is_stopped:
            return Ended(143, "saved")
        fate = self._fates.pop(0) if self._fates else None
        if isinstance(fate, UserError):
            raise fate
        return fate

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.is_closed = True


class Cluster:
    """Starts processes in their order."""

    def __init__(self, *processes: Fated) -> None:
        self.processes, self.started, self.said = list(processes), list[tuple[int, bool]](), list[str]()

    def start(self, number: int, again: bool) -> Fated:
        self.started.append((number, again))
        return self.processes[len(self.started) - 1]

    def crew(self, names: Sequence[str], most: int = 9, max_restarts: int = 1) -> Crew:
        return Crew(names, self.start, most, max_restarts, self.said.append)


def test_as_many_jobs_run_at_once_as_may_and_the_next_takes_a_free_place() -> None:
    cluster = Cluster(Fated([None, Ended(0)]), Fated([None, None, Ended(2)]), Fated([Ended(0)]))
    crew = cluster.crew("abc", most=2)
    assert crew.turn() == [] and cluster.started == [(0, False), (1, False)]
    assert crew.turn() == [(0, Ended(0))] and len(cluster.started) == 2
    assert crew.turn() == [(1, Ended(2)), (2, Ended(0))]
    assert crew.is_over and all(process.is_closed for process in cluster.processes)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        (Lost("the node is gone"), "the node is gone"),
        (Ended(-9), "SIGKILL ended its process"),
        (Ended(143), "SIGTERM ended its process"),  # as where a machine is taken away
        (Ended(-40), "signal 40 ended its process"),
    ],
)
def test_process_that_is_lost_is_started_again_so_often(fate: Ended | Lost, reason: str) -> None:
    cluster = Cluster(Fated([fate]), Fated([fate]))
    crew = cluster.crew(["run 1"])
    assert crew.turn() == [] and not crew.is_over
    assert cluster.said == [f"run 1 was lost ({reason}) and is started again, 1 of 1 times"]
    text = f"run 1 was lost after it was started again 1 time ({reason}); what it had finished is kept."
    assert crew.turn() == [(0, Ended(1, err=text))]
    assert crew.is_over and cluster.started == [(0, False), (0, True)]


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_job_that_ends_by_itself_is_not_started_again(code: int) -> None:
    cluster = Cluster(Fated([Ended(code, "out", "err")]))
    assert cluster.crew(["run"]).turn() == [(0, Ended(code, "out", "err"))]


def test_jobs_that_are_stopped_end_and_none_is_started() -> None:
    cluster = Cluster(Fated([]), Fated([None, Lost("gone")]))
    crew = cluster.crew("abc", most=2)
    crew.turn()
    crew.stop()
    cluster.processes[1].is_stopped = False  # it is lost before it hears of it
    assert crew.turn() == [(0, Ended(143, "saved")), (1, Ended(143))]
    assert crew.is_over and len(cluster.started) == 2 and cluster.said == []


def test_workers_without_a_place_are_given_up_once_nothing_is_left() -> None:
    cluster = Cluster(Fated([None, None, Ended(0)]), Fated([], is_placed=False), Fated([None, Ended(-9)]))
    crew = cluster.crew("abc")
    assert crew.turn() == [] and crew.num_placed == 2
    crew.start_no_more()
    assert crew.turn() == [(1, Ended(143, "saved")), (2, Ended(143))]
    assert not cluster.processes[0].is_stopped
    assert crew.turn() == [(0, Ended(0))] and crew.is_over and cluster.said == []


def test_signal_stops_all_jobs_and_their_ends_are_taken() -> None:
    cluster, found, looks = Cluster(Fated([]), Fated([])), list[tuple[int, Ended]](), list[int]()

    def sleep(_: float) -> None:
        if len(looks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    crew = cluster.crew("ab")
    status = run_crew(crew, lambda *end: found.append(end), lambda: looks.append(1), sleep)
    assert status == "terminated" and len(looks) == 2
    assert found == [(0, Ended(143, "saved")), (1, Ended(143, "saved"))]


def test_mistake_is_raised_once_all_have_ended() -> None:
    cluster = Cluster(Fated([]), Fated([None, UserError("not there")]))
    crew, found = cluster.crew("ab"), list[tuple[int, Ended]]()
    with pytest.raises(UserError, match="not there"):
        run_crew(crew, lambda *end: found.append(end), sleep=lambda _: None)
    assert [number for number, _ in found] == [0, 1]
    assert run_crew(Cluster(Fated([Ended(0)])).crew("a"), lambda *_: None, sleep=lambda _: None) is None
