"""Packs and searches on CUDA: every trial is what it is alone, in graphs too, whoever comes, goes or fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Augmentation
from crossbow_py.data.build import make_feed
from crossbow_py.data.resident.resident_feed import ResidentFeed
from crossbow_py.engine.device.memory import free_memory
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.modules.precision import FP32, FP64, Precision
from crossbow_py.estimate.estimation import within
from crossbow_py.packs import trial_registry
from crossbow_py.packs.pack import NON_FINITE, Pack, TrialRow
from crossbow_py.packs.slots import advance
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.width import Width
from crossbow_py.train import run_settings
from tests.gpu.support import HAS_KERNELS, slow_if_simulated
from tests.searches import assert_rungs_keep_the_best, report, search_digits, segments
from tests.thinned import thinned
from tests.trainers import images
from tests.unit.packs.test_pack import (
    ADAM,
    BATCH,
    LONGEST,
    NUM_SAMPLES,
    ORDER_SEED,
    TRIALS,
    assert_as_alone,
    assert_members_evaluated_as_each_model,
    job_of,
    members_of,
    planned,
    replace_member,
    run,
    trained_alone,
    trial,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]

DEVICE = torch.device("cuda", 0)
EXECUTORS = ["serial", "fused", "streams"]
GIB = 2**30
Alone = Callable[..., dict[str, Tensor]]


def pack_of(
    trials: Sequence[TrialSettings],
    executor: str,
    epochs: float = 2.0,
    members: Sequence[TrialRow] | None = None,
    precision: Precision = FP64,
) -> Pack:
    """As that of the tests on CPUs, with batches made by the kernel."""
    job = job_of(executor, epochs)
    job = replace(
        job,
        settings=replace(job.settings, device="cuda"),
        choices=replace(job.choices, device=DEVICE, precision=precision),
    )
    feed = make_feed(
        images(NUM_SAMPLES), BATCH, ORDER_SEED, DEVICE, augmentation=LONGEST, channels_last=True,
        dtype=precision.compute, kernels=HAS_KERNELS,
    )  # fmt: skip
    assert isinstance(feed, ResidentFeed)
    template = trials[0].new_model().to(DEVICE)
    members = members or members_of(trials, epochs, planned=epochs)
    return Pack(job, "signature", template, feed.without_augmentation(), members)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    """What a trial is after so many epochs, trained by a trainer alone, one learning task after another."""

    def train(own: TrialSettings, epochs: float = 2.0, precision: Precision = FP64) -> dict[str, Tensor]:
        monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: precision)
        return {name: value.to(DEVICE) for name, value in trained_alone(own, epochs, "cuda").items()}

    return train


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("trials", [TRIALS, ADAM], ids=["sgd", "adamw"])
def test_pack_of_different_trials_in_float64_is_what_each_is_alone(
    alone: Alone, executor: str, trials: tuple[TrialSettings, ...]
) -> None:
    with closing(pack_of(trials, executor)) as pack:
        run(pack)
        assert not [note for note in pack.notes if "CUDA graphs" in note]
        for row, own in enumerate(trials):
            assert_as_alone(pack, row, alone(own))


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[1, 2]))
def test_pack_in_float32_is_after_a_round_what_each_trial_is_alone(alone: Alone, executor: str) -> None:
    one_round = BATCH / NUM_SAMPLES
    with closing(pack_of(TRIALS, executor, one_round, precision=FP32)) as pack:
        run(pack)
        for row, own in enumerate(TRIALS):
            assert pack.members[row].num_rounds == 1
            assert_as_alone(pack, row, alone(own, one_round, FP32), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_trial_that_takes_a_row_later_is_what_it_is_alone_and_so_is_its_neighbour(alone: Alone, executor: str) -> None:
    first = members_of(TRIALS[:2], 2.0)
    first[1].end_samples = NUM_SAMPLES
    with closing(pack_of(TRIALS[:2], executor, members=first)) as pack:
        run(pack)
        assert first[1].is_over and not first[0].is_over
        assert_as_alone(pack, 1, planned(alone, TRIALS[1], 1.0))
        begun = pack.checkpoint(first[1])
        late = members_of(TRIALS[2:3], 1.0, first=2)[0]
        pack.assign([first[0], late])  # as many rows, with another's rate, smoothing and dropout in new graphs
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[0]))
        assert_as_alone(pack, 1, planned(alone, TRIALS[2], 1.0))
        resumed = replace_member(first[1], begun)
        pack.assign([resumed])  # fewer rows than before
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[1]))
        pack.assign([resumed, *members_of(TRIALS[3:], 2.0, first=3)])  # more rows; the first is over and stays as it is
        assert not pack.step()
        assert_as_alone(pack, 0, alone(TRIALS[1]))


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[1], slow=[2]))
def test_trial_that_joins_a_pack_in_graphs_takes_the_row_of_one_that_leaves_unfinished(
    alone: Alone, executor: str
) -> None:
    staying, leaving = members_of(TRIALS[:2], 2.0)
    with closing(pack_of(TRIALS[:2], executor, members=[leaving, staying])) as pack:
        for _ in range(WARM_UP_ROUNDS + 2):
            assert pack.step()
        pack.drain()
        joining = members_of(TRIALS[2:3], 2.0, first=2)[0]
        pack.assign([staying, joining])
        run(pack)
        assert [member.trial for member in pack.members] == [2, 0]
        assert_as_alone(pack, 1, alone(TRIALS[0]))
        pack.assign([joining])
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[2]))


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[2], slow=[1]))
def test_trial_that_diverges_harms_no_other(alone: Alone, executor: str) -> None:
    wild = trial(5, optimizer=SGD(learning_rate=1e30, momentum=0.0))
    with closing(pack_of([TRIALS[0], wild], executor)) as pack:
        good, bad = pack.members
        run(pack)
        assert bad.failure == NON_FINITE and good.failure is None and not good.is_over
        pack.assign([good])
        run(pack)
        assert_as_alone(pack, 0, alone(TRIALS[0]))
        assert good.num_losses == 2 * NUM_SAMPLES // BATCH


def dense() -> nn.Module:
    """Of another architecture than the network of `TRIALS`; for the same images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


DENSE: tuple[TrialSettings, ...] = tuple(
    replace(own, make_model=dense, model_key="dense", augmentation=Augmentation()) for own in TRIALS[1:]
)


@pytest.mark.slow
@pytest.mark.parametrize("executors", [("fused", "fused"), ("fused", "streams"), ("streams", "serial")], ids="-".join)
def test_packs_of_two_architectures_side_by_side_end_as_each_trial_alone(
    alone: Alone, executors: tuple[str, str]
) -> None:
    packs = [pack_of(TRIALS, executors[0], 1.0), pack_of(DENSE, executors[1], 2.0)]
    try:
        assert advance(packs, lambda: False, device=DEVICE) == {}
        assert all(member.num_rounds > 0 for pack in packs for member in pack.members)
        for pack in packs:  # until either is over
            advance([pack], lambda: False, device=DEVICE)
        for pack, trials, epochs in zip(packs, (TRIALS, DENSE), (1.0, 2.0), strict=True):
            for row, own in enumerate(trials):
                assert_as_alone(pack, row, alone(own, epochs))
    finally:
        for pack in packs:
            pack.close()


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[1], slow=[2]))
def test_evaluation_of_members_is_that_of_each_model(executor: str) -> None:
    feed = make_feed(images(30), 1, 0, DEVICE, channels_last=True, dtype=torch.float64)
    assert_members_evaluated_as_each_model(pack_of(TRIALS, executor, epochs=0.5), feed)


# --- whole searches ---------------------------------------------------------------------------------------------------

NINE = ["num_trials=9", "max_epochs=9", "method=successive_halving"]
ON_CUDA = ["device=cuda", "executor=auto", "packing=signature"]


def packs_of(size: int, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs are that wide without measuring, and a trial left over runs by `serial`."""
    width = Width(size, {("serial", 1): 1.0, (executor, size): 2.0}, f"Packs of {size}, for a test.")
    monkeypatch.setattr(trial_registry, "measured_width", lambda *_: (width, []))


def assert_every_rung_keeps_the_top_third(folder: str = "search") -> None:
    """Of nine trials; none has failed, and no segment was trained twice."""
    assert sorted(trial["state"] for trial in report(folder)["trials"]) == ["complete", *["pruned"] * 8]
    assert_rungs_keep_the_best([("1", "3", 3), ("3", "9", 1)], folder)
    assert len(segments(folder)) == 9 + 3 + 1


def assert_first_rung_is_as_on_a_cpu(folder: str = "search") -> None:
    """The same trials one at a time by `serial` on the CPU reach the same, but for a few of 150 samples."""
    assert search_digits(*NINE, "output_dir=reference") == 0
    ours, reference = report(folder)["trials"], report("reference")["trials"]
    assert [trial["params"] for trial in ours] == [trial["params"] for trial in reference]
    for own, other in zip(ours, reference, strict=True):
        assert own["values"]["1"] == pytest.approx(other["values"]["1"], abs=0.03)


@slow_if_simulated
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.timeout(300)
def test_search_that_measures_its_packs_on_cuda_ends_with_the_best_trial(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_digits(*NINE, *ON_CUDA) == 0
    assert "Trials of mlp with batches of 16 run" in capsys.readouterr().out
    found = report()
    assert (found["status"], found["info"]["device"]) == ("finished", str(DEVICE))
    assert_every_rung_keeps_the_top_third()
    assert found["best"]["value"] >= 0.9
    assert found["best"]["test_accuracy"] >= 0.85
    assert Path(found["best"]["model_path"]).exists()
    assert_first_rung_is_as_on_a_cpu()


@slow_if_simulated
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_search_in_packs_of_four_reaches_what_trials_reach_on_a_cpu(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs_of(4, executor, monkeypatch)
    assert search_digits(*NINE, *ON_CUDA) == 0
    assert_every_rung_keeps_the_top_third()
    assert_first_rung_is_as_on_a_cpu()


@slow_if_simulated
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_search_of_two_batch_sizes_has_two_packs_side_by_side(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packs_of(8, executor, monkeypatch)  # either size has about half of the nine trials: both packs fit
    steps: list[tuple[int, int]] = []
    step = Pack.step

    def seen(pack: Pack) -> bool:
        steps.append((pack.feed.batch_size, len(pack.members)))
        return step(pack)

    monkeypatch.setattr(Pack, "step", seen)
    assert search_digits(*NINE, *ON_CUDA, "space.batch_size=[16,32]") == 0
    assert_every_rung_keeps_the_top_third()
    turns = sum(one[0] != other[0] for one, other in pairwise(steps))
    assert turns > 40  # of the 43 and 85 rounds of the first rung, which are not done one after the other
    assert {size for size, width in steps if width > 1} == {16, 32}


@slow_if_simulated
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.timeout(300)
def test_memory_that_does_not_hold_a_pack_makes_it_narrower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A row of 17.1 million values: weights, gradient, corrections and momentum are 261 MiB, four of them over 1 GiB.
    packs_of(4, "fused", monkeypatch)
    wide = ["model.hidden=[4096,4096]", "num_trials=4", "max_epochs=1"]
    wide += ["space.optimizer.learning_rate=[1e-3,1e-2]", "space.optimizer.momentum=[0.5]"]
    free_memory(DEVICE)
    with within(5 * GIB // 4, DEVICE):
        assert search_digits(*ON_CUDA, *wide) == 0
    assert "Memory does not hold 4 trials side by side; 2 are tried." in capsys.readouterr().out
    assert [trial["state"] for trial in report()["trials"]] == ["complete"] * 4
