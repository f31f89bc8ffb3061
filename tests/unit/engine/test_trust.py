"""What may be used on a device: what is remembered to have passed there, and what the environment says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from crossbow_py.engine.executors import candidates
from crossbow_py.engine.kernels.checks import serves
from crossbow_py.engine.trust import Outcome, RememberedOutcomes, assumed, devices, in_use, proven, refusal, why_not
from crossbow_py.engine.trust.remember import UNKNOWN, forget
from tests.caches import trust_cuda, use_cache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERYTHING = ["update", "loss", "batches", "layers", "convolutions", "graphs"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(RememberedOutcomes, "_OWN", {})
    return tmp_path / "cache" / "crossbow_py" / "ladder.json"


def test_nothing_is_used_on_a_gpu_before_it_was_tried_and_everything_on_a_cpu() -> None:
    assert in_use(CUDA) == [] and in_use(CPU) == EVERYTHING
    assert candidates(CUDA) == ["serial"]
    reason = "not tried on this GPU yet (python -m crossbow_py.check tries it)"
    assert why_not("graphs", CUDA) == f"graphs were {reason}"
    assert reason in (serves("loss", CUDA, torch.float32) or "")


def test_what_passed_is_used_and_what_failed_is_not_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_cuda(monkeypatch, "layers", "streams")
    assert in_use(CUDA) == [each for each in EVERYTHING if each != "layers"]
    assert candidates(CUDA) == ["serial", "fused"]
    assert why_not("layers", CUDA) == "these kernels failed when they were tried here: numbers differ"
    trust_cuda(monkeypatch)
    assert candidates(CUDA) == ["serial", "fused", "streams"]


def test_switches_override_what_is_remembered_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSBOW_KERNELS", "update")
    monkeypatch.setenv("CROSSBOW_GRAPHS", "1")
    assert in_use(CUDA) == in_use(CPU) == ["update", "graphs"]
    trust_cuda(monkeypatch)
    monkeypatch.setenv("CROSSBOW_GRAPHS", "0")
    assert in_use(CUDA) == ["update"]
    assert why_not("graphs", CUDA) == "CROSSBOW_GRAPHS is 0"
    assert why_not("fused", CUDA) is None  # no switch of its own


@pytest.mark.parametrize("fact", ["_triton", "_code"])
def test_another_version_or_other_code_is_another_device(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_cuda(monkeypatch)
    monkeypatch.setattr(devices, fact, lambda: "99.0")
    assert in_use(CUDA) == []


def test_code_is_that_of_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(devices.PACKAGE, tmp_path / "crossbow_py", ignore=shutil.ignore_patterns("__pycache__"))
    before = devices._code()
    monkeypatch.setattr(devices, "PACKAGE", tmp_path / "crossbow_py")
    assert devices._code.__wrapped__() == before
    for kernels in ("engine/kernels/convolution.py", "data/resident/image_kernels.py"):
        with open(tmp_path / "crossbow_py" / kernels, "a", encoding="utf-8") as file:
            file.write("# another way\n")
        assert devices._code.__wrapped__() != before
        before = devices._code.__wrapped__()


def test_outcomes_are_kept_by_name_but_not_those_that_may_change() -> None:
    remembered = RememberedOutcomes()
    passed, failed = Outcome("passed", seconds=1.5, proves=("fused",)), Outcome("failed", "killed", proves=("graphs",))
    remembered.keep(CUDA, {"fused": passed, "graphs": failed})
    assert RememberedOutcomes().of(CUDA) == {"fused": passed, "graphs": failed}
    remembered.keep(CUDA, {"graphs": Outcome("failed", "out of memory", proves=("graphs",), may_change=True)})
    assert RememberedOutcomes().of(CUDA) == {"fused": passed}
    assert proven(RememberedOutcomes().of(CUDA)) == {"fused"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"KEY": "[]"}',
        '{"KEY": "{\\"fused\\": {\\"state\\": \\"passed\\"}}"}',
        '{"KEY": "{\\"fused\\": {\\"status\\": 5, \\"proves\\": []}}"}',
        '{"KEY": "{\\"fused\\": {\\"status\\": \\"passed\\", \\"proves\\": [[1]]}}"}',
    ],
)
def test_file_that_nobody_could_have_written_is_as_if_nothing_had_been_tried(text: str, own_cache: Path) -> None:
    RememberedOutcomes().keep(CUDA, {"fused": Outcome("passed", proves=("fused",))})
    key = next(iter(RememberedOutcomes()._read()))
    RememberedOutcomes._OWN.clear()
    own_cache.write_text(text.replace("KEY", key))
    assert RememberedOutcomes().of(CUDA) == {}


def test_question_is_asked_once_for_a_key_and_a_model_and_again_where_its_check_could_not_be_made() -> None:
    asked, model = list[str](), torch.nn.Linear(1, 1)

    def why(key: str, error: Exception | None, about: torch.nn.Module | None = None) -> str | None:
        def check() -> None:
            asked.append(key)
            if error is not None:
                raise error

        return refusal("mine", key, check, ValueError, about)

    found = [why("a", ValueError("no")), why("a", None), why("b", None), why("a", None, model)]
    assert found == ["no", "no", None, None]
    with assumed("mine", "assumed"):
        with assumed("mine", UNKNOWN):
            assert why("a", None) == "no"
        assert why("c", None) == "assumed"
    with pytest.raises(MemoryError):
        why("d", MemoryError())
    assert why("d", None) is None and asked == ["a", "b", "a", "d", "d"]
    forget("mine")
    assert why("a", None) is None and why("a", ValueError("no"), model) == "no"


def test_user_without_a_cache_has_tried_it_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RememberedOutcomes, "path", property(lambda _: Path("/dev/null/ladder.json")))
    RememberedOutcomes().keep(CUDA, {"fused": Outcome("passed", proves=("fused",))})
    assert why_not("fused", CUDA) is None
