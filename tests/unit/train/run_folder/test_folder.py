"""Choosing the folder that a run writes to and what it resumes from."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import RankError, UserError
from crossbow_py.distributed import launch as launching
from crossbow_py.distributed.launch import Launch, write_launch
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.run_folder.folder import DONE, RunFolder, open_run
from tests.thread_ranks import on_threads

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
BASE = compose(["+experiment=digits"], TrainConfig)


def config(**changes: Any) -> TrainConfig:
    return dataclasses.replace(BASE, **changes)


def record(path: Path, samples: int | None = 1000, status: str | None = None) -> Path:
    """Write what training would leave in the folder."""
    if samples is not None:
        (path / "checkpoints" / f"samples-{samples:012d}").mkdir(parents=True)
    if status is not None:
        (path / "summary.json").write_text(json.dumps({"status": status}))
    return path


def past_run(samples: int | None = 1000, status: str | None = None, age_s: int = 0, **changes: Any) -> Path:
    with open_run(config(**changes)) as folder:
        record(folder.path, samples, status)
    config_file = folder.path / "config.yaml"
    os.utime(config_file, (1e9 - age_s, 1e9 - age_s))
    return folder.path


def opened(**changes: Any) -> RunFolder:
    with open_run(config(**changes)) as folder:
        return folder


def refused(message: str, **changes: Any) -> None:
    with pytest.raises(UserError, match=message), open_run(config(**changes)):
        pass


def test_new_run_without_output_dir_is_named_after_experiment_and_time() -> None:
    with open_run(config()) as first, open_run(config()) as second:
        assert first.path.parent == second.path.parent == Path("runs/digits")
        assert first.path != second.path
        assert first.resume is None
        assert read_yaml(first.path / "config.yaml")["experiment"] == "digits"


def test_new_run_with_output_dir_makes_it_and_writes_the_configuration() -> None:
    with open_run(config(output_dir="a/b")) as folder:
        assert folder.path == Path("a/b")
        assert read_yaml(folder.path / "config.yaml")["batch_size"] == 16


@pytest.mark.parametrize("trace", ["checkpoints/samples-000000001000/x", "metrics.jsonl", "summary.json"])
def test_new_run_in_the_folder_of_a_run_is_refused(trace: str) -> None:
    (Path("a") / trace).parent.mkdir(parents=True)
    (Path("a") / trace).write_text("{}")
    refused("already holds a run; continue it with resume=auto", output_dir="a")
    assert not Path("a/config.yaml").exists()


def test_new_run_in_the_folder_of_a_search_is_refused_and_leaves_it_as_it_was() -> None:
    Path("a").mkdir()
    Path("a/config.yaml").write_text("space: {batch_size: [8, 16]}\n")
    for resume in (None, "auto"):
        refused("output_dir a holds a search, not a run; choose another folder", output_dir="a", resume=resume)
    assert [path.name for path in Path("a").iterdir()] == ["config.yaml"]
    assert read_yaml(Path("a/config.yaml")) == {"space": {"batch_size": [8, 16]}}


def test_folder_made_for_a_run_that_never_began_is_removed_again() -> None:
    with pytest.raises(UserError, match="no data"), open_run(config(output_dir="a/b")):
        raise UserError("no data")
    assert not Path("a/b").exists()


@pytest.mark.parametrize("output_dir", ["${a", "runs/${a"])
def test_configuration_that_cannot_be_written_leaves_no_folder_behind(output_dir: str) -> None:
    refused("cannot be written", output_dir=output_dir)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("error", [UserError("after an epoch"), RuntimeError("our fault")])
def test_folder_of_a_run_that_failed_later_is_kept(error: Exception) -> None:
    def train() -> None:
        with open_run(config(output_dir="a")) as folder:
            record(folder.path)
            raise error

    with pytest.raises(type(error)):
        train()
    assert Path("a/config.yaml").exists()


def test_folder_that_was_there_before_is_kept_after_a_mistake() -> None:
    Path("a").mkdir()
    with pytest.raises(UserError, match="no data"), open_run(config(output_dir="a")):
        raise UserError("no data")
    assert Path("a").exists()
    assert opened(output_dir="a").resume is None


@pytest.mark.parametrize("output_dir", ["file/run", "file", "/proc/no/such"])
def test_output_dir_that_cannot_be_made_is_a_user_error(output_dir: str) -> None:
    Path("file").write_text("")
    refused(f"output_dir {output_dir} cannot be written", output_dir=output_dir)


def test_output_dir_that_is_a_link_to_nothing_is_a_user_error() -> None:
    Path("link").symlink_to("nowhere")
    refused(r"output_dir link cannot be written \(it is a link to nowhere, which does not exist\);", output_dir="link")


def test_output_dir_that_another_run_writes_is_refused() -> None:
    with (
        open_run(config(output_dir="a")),
        pytest.raises(UserError, match="another process"),
        open_run(config(output_dir="a")),
    ):
        pass


def test_resume_auto_with_output_dir_continues_there() -> None:
    past_run(output_dir="a", status="finished")
    with open_run(config(output_dir="a", resume="auto", max_epochs=99.0)) as folder:
        assert folder.resume == folder.path == Path("a")
        assert read_yaml(folder.path / "config.yaml")["max_epochs"] == 99.0


def test_resume_auto_without_a_checkpoint_starts_afresh_in_the_same_folder() -> None:
    past_run(samples=None, output_dir="a")
    Path("a/metrics.jsonl").write_text("{}\n")
    folder = opened(output_dir="a", resume="auto", batch_size=8)
    assert (folder.path, folder.resume) == (Path("a"), None)


def test_resume_auto_takes_the_newest_unfinished_run_of_equal_configuration() -> None:
    past_run(age_s=50)
    newest = past_run(age_s=40, status="terminated", max_epochs=7.0, keep_checkpoints=5)
    past_run(age_s=30, seed=1)
    past_run(age_s=20, status="finished")
    past_run(age_s=10, status="target_reached")
    past_run(age_s=0, samples=None)
    folder = opened(resume="auto")
    assert folder.path == folder.resume == newest


def test_resume_auto_leaves_a_run_that_is_being_written_alone() -> None:
    with open_run(config()) as other:
        record(other.path)
        with open_run(config(resume="auto")) as folder:
            assert folder.path != other.path
            assert folder.resume is None


def test_resume_auto_without_any_run_starts_afresh() -> None:
    assert opened(resume="auto").resume is None


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/samples-000000001000"])
def test_resume_path_of_a_run_or_a_checkpoint_continues_in_the_runs_folder(inside: str) -> None:
    run = past_run()
    with open_run(config(resume=str(run / inside))) as folder:
        assert folder.path == run
        assert folder.resume == run / inside


def test_resume_path_with_another_output_dir_writes_there() -> None:
    run = past_run()
    assert opened(resume=str(run), output_dir="b") == RunFolder(Path("b"), run, None)


def test_resume_path_into_the_folder_of_another_run_is_refused() -> None:
    run, other = past_run(), past_run(output_dir="b")
    refused("already holds a run", resume=str(run), output_dir=str(other))


@pytest.mark.parametrize("inside", ["nowhere", "tensorboard", "checkpoints/samples-000000009999"])
def test_resume_path_that_is_no_run_is_a_user_error(inside: str) -> None:
    run = past_run()
    (run / "tensorboard").mkdir()
    refused("is not a run folder with checkpoints", resume=str(run / inside))


def test_resume_with_more_changed_than_stops_names_the_keys_with_both_values() -> None:
    run = past_run()
    optimizer = dataclasses.replace(BASE.optimizer, learning_rate=0.5)
    changed = config(resume=str(run), batch_size=8, max_epochs=3.0, optimizer=optimizer)
    with pytest.raises(UserError) as raised, open_run(changed):
        pass
    said = str(raised.value)
    assert "batch_size: 16 → 8" in said
    assert "optimizer.learning_rate: 0.05 → 0.5" in said
    assert "max_epochs" not in said


def test_resume_with_a_trace_or_without_is_allowed() -> None:
    past_run(output_dir="a")
    assert opened(output_dir="a", resume="auto", trace=True).resume == Path("a")


def test_resume_with_another_data_root_is_allowed() -> None:
    lenet = compose(["+experiment=lenet", "output_dir=a"], TrainConfig)
    with open_run(lenet) as folder:
        record(folder.path)
    moved = dataclasses.replace(lenet, resume="auto", data=dataclasses.replace(lenet.data, root="elsewhere"))
    with open_run(moved) as folder:
        assert folder.resume == Path("a")


# Ranks that torchrun has started anew, with the same command


@pytest.fixture
def launched_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make this process part of a launch: its --rdzv-id, and the process that started it."""

    def launch(run_id: str, launcher: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setattr(launching, "process_name", lambda pid: launcher)

    return launch


@pytest.mark.parametrize("output_dir", [None, "a"])
@pytest.mark.parametrize("run_id", ["none", "job"])
def test_ranks_started_anew_go_on_with_the_run_they_began(launched_by, output_dir, run_id) -> None:
    launched_by(run_id, "a:7")
    begun = past_run(output_dir=output_dir)
    with open_run(config(output_dir=output_dir)) as folder:
        assert folder.path == folder.resume == begun
        assert folder.note is None


def test_ranks_started_anew_without_the_first_host_go_on_with_the_run_they_began(launched_by, monkeypatch) -> None:
    launched_by("job", "a:7")
    host = threading.local()
    monkeypatch.setattr(launching, "process_name", lambda pid: f"{host.name}:7")

    def begin(ranks: Ranks) -> Path:
        host.name = "ab"[ranks.rank]
        with open_run(config(), ranks) as folder:
            return record(folder.path) if ranks.is_first else folder.path

    begun, _ = on_threads(begin, 2)
    host.name = "b"
    assert opened().resume == begun


def test_ranks_started_anew_before_the_first_checkpoint_start_afresh_in_the_same_folder(launched_by) -> None:
    launched_by("none", "a:7")
    begun = past_run(samples=None)
    (begun / "metrics.jsonl").write_text("{}\n")
    with open_run(config()) as folder:
        assert (folder.path, folder.resume) == (begun, None)
        assert not (begun / "metrics.jsonl").exists()


def test_ranks_started_anew_take_the_newest_of_the_runs_of_their_launch(launched_by) -> None:
    runs = []
    for launcher, age_s in (("a:1", 60), ("a:2", 30), ("a:3", 0)):
        launched_by("none", launcher)
        runs.append(past_run(age_s=age_s))
    for run in runs[:2]:
        write_launch(run, Launch("none", ["a:7"]))
    launched_by("none", "a:7")
    assert opened().resume == runs[1]


@pytest.mark.parametrize("run_id", ["none", "job"])
def test_another_launch_of_the_same_command_begins_a_run_of_its_own(launched_by, run_id) -> None:
    launched_by(run_id, "a:7")
    begun, past_b = past_run(), past_run(output_dir="b")
    launched_by(run_id, "a:8")
    folder = opened()
    assert folder.path != begun and folder.resume is None
    refused("already holds a run", output_dir=str(past_b))


def test_ranks_started_anew_in_a_sweep_have_nothing_left_of_a_run_that_is_done(launched_by) -> None:
    launched_by("none", "a:7")
    begun = past_run(output_dir="sweep/seed=1", status="finished")
    folder = opened(output_dir="sweep/seed=1")
    assert folder.path == folder.resume == begun


@pytest.mark.parametrize("status", [None, "failed", "terminated", "finished", "target_reached"])
def test_ranks_started_anew_go_on_with_a_run_that_failed_and_leave_one_that_is_done(launched_by, status) -> None:
    launched_by("none", "a:7")
    begun = past_run(status=status)
    folder = opened()
    assert (folder.path, folder.resume) == (begun, begun) if status not in DONE else folder.path != begun


def test_ranks_started_anew_do_as_resume_says_when_it_is_set(launched_by) -> None:
    other = past_run(output_dir="a")
    launched_by("none", "a:7")
    past_run()
    assert opened(resume="a").path == other


def test_launch_that_takes_up_a_run_of_another_one_is_its_launch_from_then_on(launched_by) -> None:
    launched_by("none", "a:7")
    begun = past_run(output_dir="a")
    launched_by("none", "a:8")
    assert opened(output_dir="a", resume="auto").resume == begun
    assert opened(output_dir="a").resume == begun


def test_process_that_no_launcher_started_writes_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with open_run(config(output_dir="a")):
        assert not Path("a/.launch").exists()


# Several ranks


def opened_on(ranks: Ranks, path: str) -> tuple[RunFolder, bool]:
    with open_run(config(output_dir=path if ranks.is_first else "nowhere"), ranks) as folder:
        return folder, Path("nowhere").exists()


def test_folder_is_the_first_ranks_on_all() -> None:
    assert on_threads(opened_on, 3, "a") == [(RunFolder(Path("a"), None, None), False)] * 3


def test_folder_that_is_refused_to_the_first_rank_is_refused_on_all() -> None:
    past_run(output_dir="a")
    first, second = on_threads(opened_on, 2, "a")
    assert isinstance(first, UserError)
    assert isinstance(second, RankError)
    assert second.exit_code == 2
    assert "already holds a run" in str(second)


def test_folder_that_another_host_does_not_see_is_refused_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    sees = Path.is_file
    seen = threading.local()

    def is_file(path: Path) -> bool:
        return sees(path) and not (path.name == "config.yaml" and getattr(seen, "blind", False))

    def open_blindly(ranks: Ranks) -> None:
        seen.blind = ranks.rank == 1
        with open_run(config(output_dir="a"), ranks):
            pass

    monkeypatch.setattr(Path, "is_file", is_file)
    found = on_threads(open_blindly, 2)
    assert all(isinstance(each, RankError) for each in found)
    assert "output_dir a, which rank 0 writes to, is not seen from this host" in str(found[0])
    assert not Path("a").exists()
