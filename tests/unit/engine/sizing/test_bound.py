"""How many learners fit: at once where memory is ample, else by a probe that is remembered."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.core.measured import Remembered
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.sizing.bound import free_bytes, learners_that_fit, saved_bytes
from crossbow_py.engine.sizing.memory import Job, Sample
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.optimizers import SGD

JOB = Job(nn.functional.cross_entropy, SGD(), SMA(), FP32)
INPUTS, TARGETS = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.5), nn.Flatten(), nn.Linear(1024, 3)
    )


def bound(limit_bytes: float, known: Remembered, in_turn: bool = False, max_learners: int = 8) -> int:
    return learners_that_fit(
        model(), INPUTS, TARGETS, JOB, batch_size=32, max_learners=max_learners, in_turn=in_turn,
        limit_bytes=limit_bytes, known=known,
    )  # fmt: skip


@pytest.fixture
def known(tmp_path: Path) -> Remembered:
    return Remembered("activations.json", tmp_path / "activations.json")


def test_bound_with_ample_memory_is_all_there_may_be_without_a_probe(known: Remembered) -> None:
    assert bound(2**40, known) == 8
    assert not known.path.exists()


@pytest.mark.parametrize("learners", [1, 3, 7])
def test_bound_with_little_memory_is_what_the_memory_model_says(known: Remembered, learners: int) -> None:
    found = estimate_learner(model, Sample((3, 8, 8)), JOB, most=32)
    limit = found.predicted_bytes(32, learners, learners) / 0.9 + 1
    assert bound(limit, known) == learners
    assert known.path.exists()


def test_bound_of_learners_in_turn_counts_one_pass(known: Remembered) -> None:
    found = estimate_learner(model, Sample((3, 8, 8)), JOB, most=32)
    assert bound(found.predicted_bytes(32, 5, at_once=1) / 0.9 + 1, known, in_turn=True) == 5


def test_bound_takes_what_is_remembered(known: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate_learner(model, Sample((3, 8, 8)), JOB, most=32)
    limit = found.predicted_bytes(32, 2, 2) / 0.9 + 1
    assert bound(limit, known) == 2
    monkeypatch.setattr("crossbow_py.engine.sizing.bound._probed", None)  # would fail if it were called
    assert bound(limit, known) == 2


def test_bound_where_not_even_one_learner_fits_is_one(known: Remembered) -> None:
    assert bound(1000, known) == 1


def test_bound_leaves_the_model_and_the_generators_as_they_were() -> None:
    own = model()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    assert saved_bytes(own, INPUTS, FP32) > 0
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


def test_saved_bytes_are_those_kept_for_the_backward_pass() -> None:
    # Of linear, tanh, linear: the input, 5 · 4 values, and the output of tanh, 5 · 7, each once; no weights.
    chain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    assert saved_bytes(chain, torch.zeros(5, 4), FP32) == 4 * (5 * 4 + 5 * 7)


@pytest.mark.slow
def test_pass_that_is_counted_leaves_no_graph_behind() -> None:
    """Of outputs that are saved for the backward pass, as ReLU's is; with them the model's weights would live on."""
    chain = nn.Sequential(nn.Linear(61, 67), nn.ReLU(), nn.Linear(67, 61), nn.ReLU())
    saved_bytes(chain, torch.zeros(5, 61), FP32)
    gc.collect()
    weights = [own for own in gc.get_objects() if type(own) is nn.Parameter and own.shape in ((67, 61), (61, 67))]
    assert {id(own) for own in weights} == {id(chain[0].weight), id(chain[2].weight)}


def test_free_bytes_of_the_host_are_known() -> None:
    assert free_bytes(torch.device("cpu")) > 0
