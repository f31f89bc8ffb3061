"""The command line's searches of tiny models, called in process, and what they leave."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from crossbow_py.search import __main__ as search
from crossbow_py.telemetry.records import read_metrics
from crossbow_py.train import __main__ as train

_CREATE_TRIAL, _END_TRIAL, _COMPLETE = 4, 6, 1  # as Optuna's journal has them
# One trial at a time, which needs no measuring of how wide packs pay.
DIGITS = [
    "+experiment=search_digits", "model.hidden=[16]", "device=cpu", "precision=fp32", "executor=serial", "packing=none",
    "num_trials=3", "max_epochs=3", "output_dir=search",
]  # fmt: skip


def search_digits(*overrides: str) -> int:
    """Its exit code."""
    return search.main(merged(DIGITS, overrides))


def linear() -> nn.Module:
    """A target for model=custom."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def merged(base: list[str], overrides: tuple[str, ...]) -> list[str]:
    """The base without what the overrides set anew."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(each for each in base if each.partition("=")[0] not in keys), *overrides]


def report(folder: Path | str = "search") -> dict[str, Any]:
    """Its search.json."""
    plain: dict[str, Any] = json.loads((Path(folder) / "search.json").read_text(encoding="utf-8"))
    return plain


def values(folder: Path | str = "search") -> dict[int, dict[str, float]]:
    """By trial, its values by epochs."""
    return {trial["trial"]: trial["values"] for trial in report(folder)["trials"]}


def segments(folder: Path | str = "search") -> list[tuple[int, int]]:
    """Trial and rung of every segment that was finished or failed, by the journal, in their order."""
    return [segment for event, segment, _ in events(folder) if event == "finished"]


def assert_rungs_keep_the_best(rungs: Sequence[tuple[str, str, int]], folder: Path | str = "search") -> None:
    """Of each (epochs, epochs of the next rung, how many are kept); and no segment was trained twice."""
    for epochs, after, kept in rungs:
        reached = {trial: own[epochs] for trial, own in values(folder).items() if epochs in own}
        ranked = sorted(reached, key=lambda trial: (-reached[trial], trial))
        assert {trial for trial, own in values(folder).items() if after in own} == set(ranked[:kept])
    assert len(segments(folder)) == len(set(segments(folder)))


def events(folder: Path | str = "search") -> list[tuple[str, tuple[int, int], str]]:
    """Every `claimed` and `finished` of the journal: the event, the segment's trial and rung, and the worker."""
    claims: dict[int, tuple[tuple[int, int], str]] = {}
    found, number = [], -1
    for line in (Path(folder) / "search.journal").read_text(encoding="utf-8").splitlines(keepends=True):
        record = json.loads(line) if line.endswith("\n") else {"op_code": None}  # being written, or torn
        if record["op_code"] == _CREATE_TRIAL:
            number += 1
            attributes = record.get("user_attrs", {})
            if "rung" in attributes:
                claims[number] = (attributes["trial"], attributes["rung"]), attributes["holder"].split()[0]
                found.append(("claimed", *claims[number]))
        if record["op_code"] == _END_TRIAL and record["state"] == _COMPLETE and record["trial_id"] in claims:
            found.append(("finished", *claims[record["trial_id"]]))
    return found


def trained_by_command() -> dict[str, Any]:
    """The last line of metrics of the run that the best trial's command starts, called in process."""
    words = shlex.split(report()["best"]["command"])
    assert words[:3] == ["python", "-m", "crossbow_py.train"]
    assert train.main([*words[3:], "output_dir=again"]) == 0
    return read_metrics(Path("again/metrics.jsonl"))[-1]
