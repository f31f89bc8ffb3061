"""Results files are read back as they were written, and the repository stays small."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.bench.machine import ROOT
from experiments.bench.results import read_result, write_result

LARGEST_KIB = {".json": 400, ".png": 170}
TREE_MIB = 12


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """The bytes of every file in the repository; where this is no checkout, of those of experiments/ and docs/."""
    git = shutil.which("git")
    listed = git and subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name] if listed else []
    found = tracked or [path for folder in ("experiments", "docs") for path in (ROOT / folder).rglob("*")]
    return {str(path.relative_to(ROOT)): path.stat().st_size for path in found if path.is_file()}


def test_records_of_a_curve_are_written_as_columns_and_read_back(tmp_path: Path) -> None:
    epochs = [{"epoch": 1, "share": 1 / 3, "parts": {"a": None}}, {"epoch": 2, "share": 0.5, "parts": {"a": 2.0}}]
    write_result(tmp_path / "any.json", {"n": 2, "runs": [{"seed": 0, "share": 2 / 3, "epochs": epochs}, {"seed": 1}]})
    assert (tmp_path / "any.json").read_text().splitlines() == [
        "{",
        '"n":2,',
        '"runs":[',
        '{"seed":0,"share":0.66666667,"epochs":{"columns":{"epoch":[1,2],"share":[0.333333,0.5],'
        '"parts":{"columns":{"a":[null,2.0]}}}}},',
        '{"seed":1}',
        "]",
        "}",
    ]
    epochs[0]["share"] = 0.333333
    read = {"n": 2, "runs": [{"seed": 0, "share": 0.66666667, "epochs": epochs}, {"seed": 1}]}
    assert read_result(tmp_path / "any.json") == read


def test_results_files_and_pictures_are_small(sizes: dict[str, int]) -> None:
    limits = {name: LARGEST_KIB.get(Path(name).suffix) for name in sizes if name.startswith(("experiments/", "docs/"))}
    large = [f"{name} has {sizes[name] >> 10} KiB of {limit}" for name, limit in limits.items()
             if limit and sizes[name] > limit << 10]  # fmt: skip
    assert not large, (
        f"{'; '.join(large)}. Keep in a result only what tables and pictures read and write it by `write_result`; "
        "draw a picture by `python experiments/tables --pictures`, or save it by `write_picture`."
    )


def test_whole_repository_is_small(sizes: dict[str, int]) -> None:
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    assert sum(sizes.values()) <= TREE_MIB << 20, (
        f"The files of the repository have {sum(sizes.values()) / 2**20:.1f} MiB, and may have {TREE_MIB}. Make the "
        f"largest smaller: {', '.join(f'{name} ({sizes[name] >> 10} KiB)' for name in largest)}."
    )
