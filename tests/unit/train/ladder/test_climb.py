"""Climbing, with children that are only pretended: what is tried, with what, and what a failure stops."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from crossbow_py.core.switches import Switches
from crossbow_py.engine.trust import Outcome, proven
from crossbow_py.train.ladder.rungs import RUNGS, Rung, Task, climb, untried

ON_CUDA = [rung for rung in RUNGS if "cuda" in rung.devices]


class Children:
    """Fail the rungs they are told to, and keep what was tried."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.tasks, self.switches = failing, dict[str, Task](), dict[str, Switches]()

    def __call__(self, rung: Rung, has: frozenset[str]) -> Outcome:
        self.tasks[rung.name], self.switches[rung.name] = rung.task("cuda", has, ""), rung.switches(has)
        return Outcome("failed" if rung.name in self.failing else "passed", "numbers differ", proves=rung.proves)


def statuses(outcomes: Mapping[str, Outcome], status: str) -> list[str]:
    return [name for name, outcome in outcomes.items() if outcome.status == status]


def test_table_has_every_name_once_and_every_predecessor_before() -> None:
    seen: set[str] = set()
    for rung in RUNGS:
        assert rung.name not in seen and set(rung.after) <= seen
        seen.add(rung.name)


def test_every_rung_adds_to_what_has_passed_before_it() -> None:
    children = Children()
    found = climb(ON_CUDA, children)
    assert statuses(found, "passed") == [rung.name for rung in ON_CUDA]
    switches = children.switches
    assert switches["fused"] == Switches(frozenset(), False)
    assert switches["graphs"] == Switches(frozenset(), True)
    assert switches["update"] == Switches(frozenset({"update"}), True)
    assert switches["layers"] == Switches(frozenset({"update", "loss", "batches", "layers"}), True)
    assert switches["resume"] == Switches(frozenset({"update", "loss", "batches", "layers", "convolutions"}), True)
    assert children.tasks["resume"].executor == "fused"
    assert [*children.tasks["serial"].tolerance] == ["fp32"]
    assert [*children.tasks["layers"].tolerance] == ["fp32", "bf16"]


@pytest.mark.parametrize(
    ("failing", "skipped", "without"),
    [
        ("layers", ["convolutions"], {"layers", "convolutions"}),
        ("graphs", [], {"graphs"}),
        ("update", [], {"update"}),
        ("fused", ["graphs", "update", "loss_and_batches", "layers", "convolutions"], None),
        ("sum", ["ranks"], set()),
        ("serial", [rung.name for rung in ON_CUDA if rung.name not in ("serial", "ranks")] + ["ranks"], None),
    ],
)
def test_failure_stops_what_depends_on_it_and_is_left_out_of_the_rest(
    failing: str, skipped: list[str], without: set[str] | None
) -> None:
    children = Children(failing)
    found = climb(ON_CUDA, children)
    assert statuses(found, "failed") == [failing]
    assert sorted(statuses(found, "skipped")) == sorted(skipped)
    for name in skipped:
        assert "which failed" in found[name].reason or "which was skipped" in found[name].reason
    if without is not None:
        switches = children.switches["resume"]
        every = {"update", "loss", "batches", "layers", "convolutions", "graphs"}
        assert {*(switches.kernels or ()), *(["graphs"] if switches.graphs else [])} == every - without
    elif failing == "fused":
        assert children.tasks["resume"].executor == "serial"


def test_without_bf16_rungs_train_in_float32_alone() -> None:
    children = Children()
    found = climb(ON_CUDA, children, lambda rung: "no bf16 here" if "bf16" in rung.needs else None)
    assert (found["bf16"].status, found["bf16"].reason) == ("skipped", "no bf16 here")
    assert [*children.tasks["fused"].tolerance] == ["fp32"]


def test_what_is_known_is_not_tried_again_but_what_was_skipped_is() -> None:
    known = {
        **{rung.name: Outcome("passed", proves=rung.proves) for rung in ON_CUDA},
        "layers": Outcome("failed", "killed by signal 11 (SIGSEGV)", proves=("layers",)),
        "ranks": Outcome("skipped", "there is one GPU"),
    }
    children, told = Children(), dict[str, bool]()
    found = climb(ON_CUDA, children, known=known, tell=lambda rung, _, is_known: told.update({rung.name: is_known}))
    assert list(children.tasks) == ["ranks"]
    assert [rung.name for rung in untried(ON_CUDA, lambda _: None, known)] == ["ranks"]
    assert (told["fused"], told["ranks"]) == (True, False)
    assert found["convolutions"].status == "skipped" and "layers" not in proven(found)


def test_skip_after_a_failure_that_may_change_may_change_too() -> None:
    full = Outcome("failed", "out of memory", proves=("fused",), may_change=True)
    found = climb([Rung("fused", "fused", after=()), Rung("graphs", "graphs", after=("fused",))], lambda *_: full)
    assert found["graphs"].may_change and found["graphs"].status == "skipped"
