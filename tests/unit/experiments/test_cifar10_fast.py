"""The comparison with airbench's script: what is replaced in its text, what it prints, and what the table says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from experiments.cifar10_fast import run
from experiments.cifar10_fast.airbench_side import FOR_CPU, SCRIPT, ChangedScriptError, Changes, changed

CHANGES = Changes((4, 8, 8), 500, 2.0, 0.5)
PRINTED = """\
-----------------------------------------
|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |
|       0  |      0  |     0.5000  |   0.8125  |               |       10.5000  |
|          |      1  |     0.7000  |   0.9025  |               |       21.0000  |
|          |   eval  |     0.7000  |   0.9025  |       0.9025  |       21.0000  |
Mean: 0.9025    Std: nan
"""


def script() -> str:
    """A script that has every fragment as often as the published one, in a text, and prints the table it was given."""
    fragments = [fragment for fragment, count, _ in (*FOR_CPU, *CHANGES.replacements()) for _ in range(count)]
    text = "\n".join(fragment if fragment.endswith("\n") else f"{fragment}\n" for fragment in fragments)
    return f"CODE = '''\n{text}'''\nimport torchvision.transforms as T\nassert T.Normalize\nprint('''{PRINTED}''')\n"


def test_nothing_that_needs_a_gpu_is_left_and_sizes_are_those_asked_for() -> None:
    found = changed(script(), CHANGES)
    assert not any(word in found for word in ("cuda", "half()", "compile", "bfloat16", "64, "))
    for line in ("dict(block1=4, block2=8, block3=8)", "    batch_size = 500\n", "ceil(2.0 * len(train_loader))",
                 "ceil(0.75 * len(train_loader))", "lr=0.5", "range(1)", "CpuEvent()"):  # fmt: skip
        assert line in found


@pytest.mark.parametrize("fragment", [fragment for fragment, *_ in (*FOR_CPU, *CHANGES.replacements())])
def test_script_without_a_fragment_is_refused(fragment: str) -> None:
    with pytest.raises(ChangedScriptError, match=r"it is another version; check out commit \w+"):
        changed(script().replace(fragment, "\n", 1), CHANGES)


def options(clone: Path, *more: str) -> argparse.Namespace:
    """The options of a command line, as the program parses them."""
    found: list[argparse.Namespace] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "measure_and_write", lambda parser, argv, *_: found.append(parser.parse_args(argv)) or 0)
        run.main(["--airbench", str(clone), *more])
    return found[0]


def test_side_runs_the_script_and_reads_its_table(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text(script())
    own = {"epochs": 1.5, "batch_size": 500, "rate": 0.5}
    curve, batches = run._theirs(options(tmp_path), own, 0, tmp_path)
    assert curve == [(1.0, 10.5, 0.8125), (1.5, 21.0, 0.9025)]
    assert batches == "500"


def test_missing_or_changed_script_is_said_in_a_sentence(tmp_path: Path) -> None:
    given = options(tmp_path, "--sides", run.SMALL)
    with pytest.raises(UserError, match=r"is missing; git clone https://github\.com/KellerJordan/cifar10-airbench"):
        run.measure(given)
    (tmp_path / SCRIPT).write_text("print('another')")
    with pytest.raises(UserError, match="times instead of 1: it is another version"):
        run.measure(given)


def test_table_compares_seconds_seed_by_seed() -> None:
    curves = {run.OURS: [[1.0, 60.0, 0.85], [2.0, 120.0, 0.91]], run.SMALL: [[1.0, 100.0, 0.8], [2.0, 200.0, 0.9]]}
    runs = [
        {"side": side, "seed": seed, "batches": "256", "curve": curve, "foreign_share": 0.02}
        for side, curve in curves.items() for seed in range(2)
    ]  # fmt: skip
    runs[0] = {**runs[0], "curve": [[2.0, 130.0, 0.89]]}
    text = run.result_text({"target": 0.9, "sides": {side: {"epochs": 2.0} for side in curves}, "runs": runs})
    ours, small = text.splitlines()[2:]
    assert "1 of 2" in ours and "120.0 (120.0–120.0)" in ours and "0.60 (0.60–0.60)" in ours
    assert "2 of 2" in small and "200.0 (200.0–200.0)" in small and "1.00 (1.00–1.00)" in small
