"""Results files are read back as they were written, and the repository stays small."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from experiments.bench.machine import ROOT
from experiments.bench.results import read_result, write_result

LARGEST_KIB = {".json": 400, ".png": 170}
TREE_KIB = 12 << 10


def test_records_of_a_curve_are_written_as_columns_and_read_back(tmp_path: Path) -> None:
    path, epochs = tmp_path / "any.json", [{"epoch": 1, "share": 1 / 3}, {"epoch": 2, "share": None}]
    write_result(path, {"n": 2, "runs": [{"share": 2 / 3, "epochs": epochs}, {"share": 1}]})
    curve = '{"columns":{"epoch":[1,2],"share":[0.333333,null]}}'
    assert path.read_text() == f'{{\n"n":2,\n"runs":[\n{{"share":0.66666667,"epochs":{curve}}},\n{{"share":1}}\n]\n}}\n'
    epochs[0]["share"] = 0.333333
    assert read_result(path) == {"n": 2, "runs": [{"share": 0.66666667, "epochs": epochs}, {"share": 1}]}


def test_results_pictures_and_the_whole_repository_are_small() -> None:
    """Where this is no checkout, only experiments/ and docs/ are looked at."""
    git = shutil.which("git")
    listed = git and subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name] if listed else []
    paths = tracked or [path for folder in ("experiments", "docs") for path in (ROOT / folder).rglob("*")]
    sizes = {path.relative_to(ROOT): path.stat().st_size / 1024 for path in paths if path.is_file()}
    named = [f"{path} ({size:.0f} KiB)" for path, size in sorted(sizes.items(), key=lambda item: -item[1])
             if path.parts[0] in ("experiments", "docs") and size > LARGEST_KIB.get(path.suffix, TREE_KIB)]  # fmt: skip
    advice = "Write only what tables and pictures read, by write_result; draw by python experiments/tables --pictures."
    assert not named, f"Too large: {', '.join(named)}. {advice}"
    assert sum(sizes.values()) <= TREE_KIB, f"More than {TREE_KIB} KiB; largest: {sorted(sizes, key=sizes.get)[-5:]}"


def test_what_a_run_has_in_common_with_the_one_before_is_written_once(tmp_path: Path) -> None:
    path, machine = tmp_path / "result.json", "a processor of some make, with many cores and flags"
    runs = [{"machine": machine, "n": 1}, {"machine": machine, "n": 2}, {"n": 3}, {"machine": machine, "n": 3}]
    result = {"runs": runs}
    write_result(path, result)
    assert path.read_text().count(machine) == 2
    assert read_result(path) == result
