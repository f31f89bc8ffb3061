"""What needs no cluster of Ray: a job's process, the words of one that is started again, and what is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossbow_py.cli.launchers import ray_cluster, ray_sweep, ray_worker
from crossbow_py.cli.launchers.crew import Ended, Lost
from crossbow_py.cli.launchers.placement import Machine, RayLauncher, Share
from crossbow_py.cli.launchers.ray_cluster import Place, PlacedJob, RayCluster, RayProcess, connected
from crossbow_py.cli.launchers.ray_sweep import resumed
from crossbow_py.cli.launchers.ray_worker import JobHolder, machine_name
from crossbow_py.core.errors import UserError
from crossbow_py.train.__main__ import main
from tests.said import error_line
from tests.training_processes import await_true


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a script of the shell in Python's place."""

    def write(text: str) -> None:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@contextlib.contextmanager
def held() -> Iterator[JobHolder]:
    """A holder, whose files are closed in the end."""
    holder = JobHolder()
    with holder._out, holder._err:
        yield holder


def code_of(holder: JobHolder) -> int | None:
    await_true(lambda: holder.poll()[0] is not None)
    return holder.poll()[0]


@pytest.mark.parametrize(("given", "threads"), [(None, 3), ("5", 5)])
def test_job_has_its_words_its_folder_and_threads_and_no_gpu_and_its_output_comes_back(
    given: str | None, threads: int, program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    with held() as holder:
        program('echo "$4 $5 $6 $7 [$CUDA_VISIBLE_DEVICES] $OMP_NUM_THREADS"; pwd; echo wrong >&2; exit 3')
        holder.begin("train", str(tmp_path), ["seed=1", "a b"], False, 3)
        assert code_of(holder) == 3
        assert holder.poll() == (3, True, f"train seed=1 a b  [] {threads}\n{tmp_path}\n", "wrong\n")


def test_job_on_a_gpu_sees_the_one_that_its_holder_was_made_with(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with held() as holder:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
        program('echo "$CUDA_VISIBLE_DEVICES"')
        holder.begin("train", str(tmp_path), [], True, 1)
        assert code_of(holder) == 0 and holder.poll()[2] == "5\n"


def test_job_that_is_stopped_gets_sigterm(program: Callable[[str], None], tmp_path: Path) -> None:
    program("exec sleep 60")
    with held() as holder:
        assert holder.begin("train", str(tmp_path), [], False, 1) == (None, False, "", "")
        holder.stop()
        assert code_of(holder) == -15
        holder.stop()  # of one that has ended: nothing


def test_holder_sees_what_its_machine_has(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    with held() as holder:
        assert holder.look(str(tmp_path), str(tmp_path / "mark")) == (machine_name(), True, True)
        assert holder.look(str(tmp_path / "x"), str(tmp_path / "x")) == (machine_name(), False, False)
        assert holder.look(str(tmp_path), None) == (machine_name(), True, False)
        with pytest.raises(RuntimeError, match="was not started"):
            holder.poll()


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class Asked:
    """Ray, as far as it is used, whose holder gives these answers in turn; None is one that has not come yet."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> str:
            self.calls.append((name, arguments))
            return name

        return SimpleNamespace(remote=remote)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        if self.answers[0] is None:
            self.answers.pop(0)
            return [], refs
        return refs, []

    def get(self, _: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


HERE = ("host boot", True, True)
JOB = PlacedJob("train", ["seed=1"], "/somewhere", "/somewhere/mark")


def process(ray: Asked, places: list[Place] | None = None) -> RayProcess:
    return RayProcess(ray, ray, Share(4, 1, 2), JOB, (places if places is not None else []).append)


def test_job_begins_where_it_was_placed_and_ends_with_its_output() -> None:
    ray = Asked(None, HERE, (None, False, "", ""), (None, True, "", ""), (0, True, "out", "err"))
    places: list[Place] = []
    own = process(ray, places)
    assert own.poll() is None and not own.is_placed
    assert own.poll() is None and own.is_placed and places == [Place("host boot", True, True)]
    assert places[0].host == "host"
    assert own.poll() is None and not own.has_printed
    assert own.poll() is None and own.has_printed
    assert own.poll() == Ended(0, "out", "err")
    assert [name for name, _ in ray.calls] == ["look", "begin", "poll", "poll"]
    assert ray.calls[0][1] == ("/somewhere", "/somewhere/mark")
    assert ray.calls[1][1] == ("train", "/somewhere", ["seed=1"], True, 4)


def test_holder_that_is_gone_is_a_loss_and_one_that_does_not_answer_is_asked_again() -> None:
    gone = RayError("The actor died.\n\tclass_name: JobHolder\nIts node is gone.")
    ray = Asked(HERE, ActorUnavailableError("for now"), gone)
    own = process(ray)
    assert own.poll() is None and own.poll() is None
    assert own.poll() == Lost("Its node is gone")
    assert [name for name, _ in ray.calls] == ["look", "begin", "poll"]


def test_job_is_stopped_where_it_runs_and_given_up_where_it_does_not() -> None:
    ray = Asked(None, HERE)
    waiting, running = process(ray), process(ray)
    assert waiting.poll() is None and running.poll() is None
    waiting.stop()
    running.stop()
    assert waiting.poll() == Ended(143)
    assert [name for name, _ in ray.calls] == ["look", "look", "begin", "stop"]


def test_machine_without_the_folder_is_refused_by_name() -> None:
    own = process(Asked(("host boot", False, False)))
    with pytest.raises(UserError, match="machine host of the Ray cluster has no folder /somewhere, where the command"):
        own.poll()
    assert not own.is_placed


def test_machines_are_those_that_live() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}},
        {"Alive": False, "Resources": {}},
        {"Alive": True, "Resources": {"memory": 1e9}},
    ]
    assert RayCluster(SimpleNamespace(nodes=lambda: nodes)).machines() == [Machine(8, 2), Machine(0, 0)]


def test_place_of_a_job_is_asked_for_with_its_share() -> None:
    asked: list[Any] = []
    ray = Asked()

    def options(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(remote=lambda: ray)

    by_value: list[Any] = []
    module = SimpleNamespace(
        remote=lambda kind: SimpleNamespace(options=options) if kind is JobHolder else None,
        cloudpickle=SimpleNamespace(register_pickle_by_value=by_value.append),
    )
    RayCluster(module).start(Share(4, 1, 2), JOB, lambda _: None)
    assert by_value == [ray_worker]  # so that a holder need not import torch
    assert asked[0]["num_cpus"] == 4 and asked[0]["num_gpus"] == 1 and asked[0]["max_restarts"] == 0
    assert [name for name, _ in ray.calls] == ["look"]


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["seed=1", "output_dir=a"], ["seed=1", "output_dir=a", "resume=auto"]),
        (["seed=1"], ["seed=1"]),
        (["resume=runs/a", "output_dir=a"], ["resume=runs/a", "output_dir=a"]),
        (["++resume=null", "output_dir=a"], ["++resume=null", "output_dir=a", "resume=auto"]),
    ],
)
def test_run_that_is_started_again_goes_on_in_its_folder(words: list[str], again: list[str]) -> None:
    assert resumed(words) == again


def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "ray" else found(name, *more))


def _with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: "ray" if name == "ray" else found(name, *more))


@pytest.mark.usefixtures("in_an_empty_folder")
def test_ray_that_is_not_installed_is_one_line_that_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_ray(monkeypatch)
    assert main(["-m", "launcher=ray", "seed=1,2"]) == 2
    asked = 'launcher=ray needs Ray, which is not installed; run pip install "crossbow_py[ray]".\n'
    assert error_line(capsys) == f"error: {asked}"
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("in_an_empty_folder")
def test_launcher_that_cannot_start_this_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launcher=ray"]) == 2
    assert "launcher=ray is for the jobs of a sweep; add -m" in error_line(capsys)
    assert main(["-m", "launcher=ray", "hydra/launcher=joblib", "seed=1,2"]) == 2
    assert "launcher=ray and hydra/launcher=joblib exclude each other" in error_line(capsys)
    assert main(["launcher=ray", "--cfg", "job", "-p", "seed"]) == 0
    assert capsys.readouterr().out == "0\n"
    _with_ray(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", "launcher=ray", "seed=1,2"]) == 2
    assert "launcher=ray starts processes, and so does torchrun" in error_line(capsys)


@pytest.mark.parametrize("by_variable", [False, True])
def test_address_where_nothing_answers_is_one_line_in_bounded_time(
    by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_ray(monkeypatch)
    monkeypatch.setattr(ray_cluster, "_ANSWER_S", 0.2)
    with socket.socket() as taken:  # a port that nothing listens at
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address if by_variable else "")
        begun = time.monotonic()
        said = f"launcher.address={address}: no Ray cluster can be reached .* ray start --head"
        with pytest.raises(UserError, match=said), connected(RayLauncher(address="auto" if by_variable else address)):
            pass
    assert time.monotonic() - begun < 5


def test_address_of_rays_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_ray(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UserError, match="RAY_ADDRESS must be HOST:PORT, got 'ray://head:10001'"):
        connected(RayLauncher(address="auto")).__enter__()


class Done:
    """A process that has ended as is written down for its seed."""

    is_placed, has_printed = True, True

    def __init__(self, end: Ended | Lost) -> None:
        self._end = end

    def poll(self) -> Ended | Lost:
        return self._end

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class Sweep:
    """A cluster of three cores on which the run of seed 2 is lost once, and that of seed 3 is refused."""

    def __init__(self) -> None:
        self.jobs: list[PlacedJob] = []

    def machines(self) -> list[Machine]:
        return [Machine(3, 0)]

    def start(self, share: Share, job: PlacedJob, check: Callable[[Place], None]) -> Done:
        assert share == Share(1, 0, 3)
        check(Place("elsewhere boot", True, False))
        self.jobs.append(job)
        seed = next(word for word in job.words if word.startswith("seed="))
        if seed == "seed=2" and "resume=auto" not in job.words:
            return Done(Lost("its node is gone"))
        return Done(Ended(2, err="error: no.\n") if seed == "seed=3" else Ended(0, f"trained {seed}\n"))


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_sweep_prints_each_run_as_it_ends_and_resumes_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Sweep()
    monkeypatch.setattr(ray_sweep, "connected", lambda _: contextlib.nullcontext(cluster))
    words = ["-m", "launcher=ray", "launcher.num_workers=3", "seed=1,2,3", "output_dir=swept", "device=cpu"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err == "error: no.\n"
    assert said.out.splitlines() == [
        "launcher=ray starts 3 runs, 3 at a time, each on 1 core",
        "run 2: seed=2 was lost (its node is gone) and is started again, 1 of 3 times",
        "run 1 of 3: seed=1",
        "trained seed=1",
        "run 3 of 3: seed=3",
        "run 2 of 3: seed=2",
        "trained seed=2",
    ]
    assert [(job.command, job.folder) for job in cluster.jobs] == [("train", str(Path.cwd()))] * 4
    assert cluster.jobs[0].words == ["seed=1", "output_dir=swept", "device=cpu", 'output_dir="swept/seed=1"']
    assert cluster.jobs[3].words[-1] == "resume=auto"


class Interrupted:
    """A process at whose first look Ctrl-C is pressed, and that SIGTERM then stops."""

    is_placed, has_printed, _is_stopped = True, True, False

    def poll(self) -> Ended | None:
        if self._is_stopped:
            return Ended(143)
        signal.raise_signal(signal.SIGINT)
        return None

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("in_an_empty_folder")
def test_sweep_that_is_interrupted_ends_with_the_code_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimpleNamespace(machines=lambda: [Machine(1, 0)], start=lambda *_: Interrupted())
    monkeypatch.setattr(ray_sweep, "connected", lambda _: contextlib.nullcontext(cluster))
    assert main(["-m", "launcher=ray", "seed=1,2", "output_dir=swept", "device=cpu"]) == 130


@pytest.mark.usefixtures("in_an_empty_folder")
def test_recipe_that_sets_a_launcher_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text("# @package _global_\nlauncher:\n  name: ray\n")
    assert main(["+experiment=mine"]) == 2
    assert "experiment mine sets launcher, which counts on the command line alone" in error_line(capsys)
