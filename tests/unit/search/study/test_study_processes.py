"""Two worker processes on one storage, opened, asked and claimed at the same moments."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.search.hyperband import Segment
from crossbow_py.search.space import Space
from crossbow_py.search.study.study import SharedStudy

SEGMENTS = [Segment(trial, rung) for rung in range(2) for trial in range(6)]
SPACE = Space.from_mapping({"rate": {"low": 0.001, "high": 0.5, "log": True}, "rule": ["sgd", "adam"]})


def shared_study(storage: str, name: str) -> SharedStudy:
    return SharedStudy(storage, "mine", sampler="tpe", space=SPACE, seed=1, maximize=True, worker=name, lease_s=60.0)


def started(storage: str, name: str, go: int) -> int:
    """The end to read from of a process that works once a byte comes from `go`, and then says what it was given."""
    read, write = os.pipe()
    if not os.fork():
        try:
            os.read(go, 1)
            said: Any = work(storage, name)
        except BaseException:
            said = traceback.format_exc()
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    return read


def work(storage: str, name: str) -> list[Any]:
    study = shared_study(storage, name)
    study.open({"metric": "accuracy"})
    params = [study.params(trial) for trial in range(6)]
    claimed = [segment for each in SEGMENTS for segment in study.claim([each])]
    assert all(study.finish(each, each.trial + each.rung / 10, epochs=1.0, seconds=0.0) for each in claimed)
    return [params, [[each.trial, each.rung] for each in claimed]]


@pytest.mark.parametrize("storage", ["journal:{}/a", "sqlite:///{}/a.db"])
def test_two_processes_share_trials_and_segments_none_twice(tmp_path: Path, storage: str) -> None:
    storage = storage.format(tmp_path)
    waiting, go = os.pipe()
    reads = []
    for name in ("first", "second"):
        reads.append(started(storage, name, waiting))
    os.write(go, b"..")
    said = []
    for read in reads:
        with open(read, "rb") as file:
            said.append(json.loads(file.read()))
        os.wait()
    os.close(waiting), os.close(go)
    assert isinstance(said[0], list) and isinstance(said[1], list), said
    assert said[0][0] == said[1][0]
    assert sorted(said[0][1] + said[1][1]) == sorted([each.trial, each.rung] for each in SEGMENTS)
    assert shared_study(storage, "later").results() == {each: each.trial + each.rung / 10 for each in sorted(SEGMENTS)}
