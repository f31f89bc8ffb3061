"""Two worker processes on one storage, opened, asked and claimed at the same moments."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from crossbow_py.packing.hyperband import Segment
from crossbow_py.packing.space import Space
from crossbow_py.packing.study import SharedStudy

TRIALS, RUNGS = 5, 2
SPACE = {"rate": {"low": 0.001, "high": 0.5, "log": True}, "rule": ["sgd", "adam"]}
WORKER = f"""
import json, sys, time
from pathlib import Path
from crossbow_py.packing.hyperband import Segment
from crossbow_py.packing.space import Space
from crossbow_py.packing.study import SharedStudy

name, storages = sys.argv[1], sys.argv[2:]
Path(name).touch()
found = {{}}
for storage in storages:
    while not Path("go").exists():
        time.sleep(0.001)
    study = SharedStudy(
        storage, "mine", sampler="tpe", space=Space.from_mapping({SPACE}), seed=1, maximize=True, worker=name,
        lease_s=60.0,
    )
    study.open({{"metric": "accuracy"}})
    params = [study.params(trial) for trial in range({TRIALS})]
    mine = []
    for rung in range({RUNGS}):
        for trial in range({TRIALS}):
            for segment in study.claim([Segment(trial, rung)]):
                mine.append([trial, rung])
                study.finish(segment, trial + rung / 10, epochs=1.0, seconds=0.0)
    found[storage] = [params, mine]
print(json.dumps(found))
"""


def test_two_processes_share_trials_and_segments_none_twice(tmp_path: Path) -> None:
    storages = [f"journal:{tmp_path}/a", f"sqlite:///{tmp_path}/a.db"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WORKER, name, *storages],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("first", "second")
    ]  # fmt: skip
    while not ((tmp_path / "first").exists() and (tmp_path / "second").exists()):
        assert all(worker.poll() is None for worker in workers), workers[0].communicate()
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = [worker.communicate() for worker in workers]
    assert [each[1] for each in said] == ["", ""]
    first, second = (json.loads(each[0]) for each in said)
    segments = [Segment(trial, rung) for trial in range(TRIALS) for rung in range(RUNGS)]
    for storage in storages:
        assert first[storage][0] == second[storage][0]
        assert sorted(first[storage][1] + second[storage][1]) == [[each.trial, each.rung] for each in segments]
        study = SharedStudy(
            storage, "mine", sampler="tpe", space=Space.from_mapping(SPACE), seed=1, maximize=True, worker="later",
            lease_s=60.0,
        )  # fmt: skip
        assert study.results() == {each: each.trial + each.rung / 10 for each in segments}
