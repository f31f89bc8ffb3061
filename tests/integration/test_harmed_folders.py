"""Every file of a run and of a search, harmed in every way, before every command that reads it.

A command works, or says one line and ends with exit code 2: no traceback, no waiting for a pipe, nothing changed
elsewhere.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from crossbow_py.predict import __main__ as predict
from crossbow_py.report import __main__ as report
from crossbow_py.search import __main__ as search
from crossbow_py.train import __main__ as train
from tests.caches import use_cache
from tests.said import called
from tests.searches import DIGITS

TRAIN = [
    "+debug=fast", "device=cpu", "precision=fp32", "executor=serial", "num_learners=2", "model.hidden=[8]",
]  # fmt: skip
SEARCH = [*DIGITS[:-1], "model.hidden=[8]", "num_trials=1", "method=none", "max_epochs=0.1"]
COMMANDS = [
    ("run", train, [*TRAIN, "output_dir=run", "resume=auto", "max_rounds=4"]),
    ("run", train, ["config=run", "output_dir=other"]),
    ("run", predict, ["run", "device=cpu", "latency_s=0", "output_dir=other"]),
    ("run", report, ["run", "output_dir=other"]),
    ("search", search, [*SEARCH, "output_dir=search", "resume=auto"]),
    ("search", predict, ["search", "device=cpu", "latency_s=0", "output_dir=other"]),
]


def cut(path: Path, elsewhere: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) + 1)])


def flip(path: Path, elsewhere: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(min(3, len(content))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def link(path: Path, elsewhere: Path, chance: random.Random) -> None:
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def pipe(path: Path, elsewhere: Path, chance: random.Random) -> None:
    removed(path)
    os.mkfifo(path)


def folder(path: Path, elsewhere: Path, chance: random.Random) -> None:
    removed(path)
    path.mkdir()


def missing(path: Path, elsewhere: Path, chance: random.Random) -> None:
    removed(path)


def empty_file(path: Path, elsewhere: Path, chance: random.Random) -> None:
    removed(path)
    path.touch()


OF_FILES = (cut, flip, link, pipe, folder, missing, empty_file)
OF_FOLDERS = (link, pipe, folder, missing, empty_file)
Case = tuple[Callable[[Sequence[str]], int], list[str], Path, Callable[[Path, Path, random.Random], None]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a search that ended."""
    made = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert train.main([*TRAIN, "output_dir=run", "trace=true"]) == 0
        assert search.main([*SEARCH, "output_dir=search"]) == 0
    return made


def cases(whole: Path) -> list[Case]:
    return [
        (command.main, arguments, path.relative_to(whole), harm)
        for name, command, arguments in COMMANDS
        for path in sorted((whole / name).rglob("*"))
        for harm in (OF_FOLDERS if path.is_dir() else OF_FILES)
    ]


def contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def outcome(case: Case, whole: Path, work: Path, seed: int) -> str:
    """`worked` or `refused`; fails for anything else."""
    main, arguments, path, harm = case
    shutil.copytree(whole, work / "here")
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    harm(work / "here" / path, elsewhere, random.Random(seed))
    before = contents(elsewhere)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work / "here")
        code, said = called(main, arguments)
    what = f"{main.__module__} {arguments}, {path}: {harm.__name__}, seed {seed}: exit code {code}, {said}"
    assert contents(elsewhere) == before, what
    assert code in (0, 2), what
    lines = said.splitlines()
    assert code == 0 or (len(lines) == 1 and lines[0].startswith("error: ")), what
    shutil.rmtree(work / "here")
    shutil.rmtree(elsewhere)
    return "refused" if code else "worked"


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(4, id="quick"),
        pytest.param(None, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)], id="all"),
    ],
)
def test_harmed_file_of_a_run_or_a_search_is_refused_in_a_line_or_does_not_matter(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    every = cases(whole)
    tried = every if most is None else random.Random(0).sample(every, most)
    counts: Counter[str] = Counter()
    problems = []
    for number, case in enumerate(tried):
        work = tmp_path / str(number)
        work.mkdir()
        try:
            counts[outcome(case, whole, work, number)] += 1
        except AssertionError as error:
            problems.append(str(error).splitlines()[0][:600])
    print(f"{len(tried)} cases: {counts['worked']} worked, {counts['refused']} refused, {len(problems)} neither")
    assert problems == []
