"""Whatever comes up on one rank is decided alike on all: stops, learners, checkpoints, errors. And taken up again."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbow_py import SGD, SMA, CheckpointSettings, Independent
from crossbow_py.averaging import SNOO, DiLoCo, GroupedSMA, LocalSGD, SynchronousSGD
from crossbow_py.cli.configuration import compose
from crossbow_py.data.sampler import epoch_order
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests import rank_jobs
from tests.rank_jobs import assert_alike, results
from tests.ranks import Raised, on_ranks
from tests.support import linear_model
from tests.thinned import thinned
from tests.trainers import blobs, images, measured, weights

PER_ROUND = 16  # two ranks, two learners each, batches of 4
LINEAR = {"model": linear_model, "test_data": None, "augmentation": None}


def names_of(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def all_raised(found: list[Any], *kinds: str) -> list[Raised]:
    assert [each.kind for each in found if isinstance(each, Raised)] == list(kinds), found
    return found


# Checkpoints


@pytest.mark.parametrize(
    "executor", ["threads", *(pytest.param(executor, marks=pytest.mark.slow) for executor in ("serial", "fused"))]
)
def test_run_of_two_ranks_resumed_in_mid_epoch_equals_the_uninterrupted_one_in_every_bit(tmp_path, executor):
    whole, parts, options = tmp_path / "whole", tmp_path / "parts", {"executor": executor}
    uninterrupted = results(rank_jobs.train, 2, {**options, "output_dir": whole}, {"max_epochs": 3})
    results(rank_jobs.train, 2, {**options, "output_dir": parts}, {"max_samples": 80})
    assert names_of(parts) == ["samples-000000000080", "samples-000000000064"]
    assert sorted(path.name for path in checkpoints(parts)[0].iterdir()) == ["manifest.json", "rank-0.pt", "rank-1.pt"]
    resumed = results(rank_jobs.train, 2, {**options, "output_dir": parts, "resume": parts}, {"max_epochs": 3})
    assert weights(parts) == weights(whole)
    assert measured(parts)[-1] == measured(whole)[-1]
    for one, other in zip(resumed, uninterrupted, strict=True):
        for mine, theirs in zip([*one.learners, *one.momenta], [*other.learners, *other.momenta], strict=True):
            assert mine.tobytes() == theirs.tobytes()
    assert_alike(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_learners_that_go_by_themselves_lose_nothing_of_it_with_another_number_of_ranks(tmp_path, num_ranks):
    options: dict[str, Any] = {"executor": "threads", "output_dir": tmp_path, "num_learners": 1}
    options["averaging"] = LocalSGD(averaging_period=1000)
    before = results(rank_jobs.train, 2, options, {"max_rounds": 6})
    mean = (before[0].learners[0] + before[1].learners[0]) / 2
    found = results(rank_jobs.restore_and_train, num_ranks, {**options, "resume": tmp_path}, {"max_rounds": 1})
    for begun, _ in found:
        np.testing.assert_allclose(begun.z, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found[-1][0].learners[0], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_run_of_two_ranks_goes_on_with_another_number_of_them(tmp_path, num_ranks):
    options: dict[str, Any] = {"executor": "threads", "output_dir": tmp_path}
    before = results(rank_jobs.train, 2, options, {"max_samples": 160})  # the rate has dropped once, at 100
    found = results(rank_jobs.restore_and_train, num_ranks, {**options, "resume": tmp_path}, {"max_epochs": 5})
    begun, after = [each[0] for each in found], [each[1] for each in found]
    learners = [row for each in before for row in each.learners]
    momenta = [row for each in before for row in each.momenta]
    for rank, each in enumerate(begun):
        assert each.z.tobytes() == before[0].z.tobytes()
        assert each.z_prev.tobytes() == before[0].z_prev.tobytes()
        assert (each.samples_seen, each.rounds) == (160, 10)
        assert before[0].learning_rate == 0.025 * math.sqrt(4)
        assert each.learning_rate == pytest.approx(0.025 * math.sqrt(2 * num_ranks))
        for row in range(2):
            if (learner := 2 * rank + row) < 4:
                assert each.learners[row].tobytes() == learners[learner].tobytes()
                assert each.momenta[row].tobytes() == momenta[learner].tobytes()
            else:
                assert each.learners[row].tobytes() == each.z.tobytes()
                assert not each.momenta[row].any()
    assert_alike(after)
    per_round = 8 * num_ranks
    assert after[0].samples_seen == 160 + -(-(250 - 160) // per_round) * per_round
    assert np.isfinite(after[0].z).all() and (after[0].z != begun[0].z).any()


@pytest.mark.slow
def test_epoch_taken_up_by_more_ranks_counts_every_loss_once(tmp_path):
    # With a rate of zero the mean loss of an epoch is that of one model on all samples.
    options = {**LINEAR, "train_data": blobs(96), "test_data": blobs(96), "output_dir": tmp_path}
    options["optimizer"] = SGD(learning_rate=0.0)
    results(rank_jobs.train, 2, options, {"max_samples": 48})
    found = results(rank_jobs.train, 3, {**options, "resume": tmp_path}, {"max_epochs": 1})
    assert_alike(found)
    assert any("is of another number of ranks (2, now 3)" in message for message in found[0].messages)
    line = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (line["epoch"], line["samples_seen"]) == (1, 96)
    assert line["train_loss"] == pytest.approx(line["test_loss"], rel=1e-5)
    assert line["train_accuracy"] == pytest.approx(line["test_accuracy"])


@pytest.mark.slow
def test_one_learner_grows_to_two_ranks_and_back_with_z_exact(tmp_path):
    options: dict[str, Any] = {"num_learners": 1, "executor": "threads", "output_dir": tmp_path}
    (alone,) = results(rank_jobs.train, 1, options, {"max_rounds": 5})
    found = results(rank_jobs.restore_and_train, 2, {**options, "resume": tmp_path}, {"max_rounds": 5})
    for begun, _ in found:
        assert begun.z.tobytes() == begun.z_prev.tobytes() == begun.learners[0].tobytes() == alone.learners[0].tobytes()
    assert found[0][0].momenta[0].tobytes() == alone.momenta[0].tobytes() and not found[1][0].momenta[0].any()
    assert_alike([after for _, after in found])
    ((back, _),) = results(rank_jobs.restore_and_train, 1, {**options, "resume": tmp_path}, {"max_rounds": 5})
    assert back.learners[0].tobytes() == found[0][1].z.tobytes()  # one learner in all is z
    assert back.samples_seen == 5 * 4 + 5 * 8


@pytest.mark.slow
def test_ranks_whose_clocks_differ_write_checkpoints_in_the_same_rounds(tmp_path):
    settings = CheckpointSettings(every_epochs=None, every_s=0.2, keep=100)
    options = {"output_dir": tmp_path, "checkpoint": settings, "train_data": images(400)}
    found = results(rank_jobs.train_with_clocks_apart, 2, options, {"max_time_s": 2.2})
    assert_alike(found)
    assert len(names_of(tmp_path)) >= 3


@pytest.mark.slow
def test_fit_called_twice_is_one_run(tmp_path):
    once = results(rank_jobs.train, 2, {"executor": "threads"}, {"max_rounds": 9})
    twice = results(rank_jobs.train_in_two_calls, 2, {"executor": "threads"}, {"max_rounds": 4}, {"max_rounds": 5})
    assert twice[0].z.tobytes() == once[0].z.tobytes()
    assert_alike(twice)


# Stops


@pytest.mark.parametrize(
    ("number", "status"),
    thinned([(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")], quick=[], slow=[0]),
)
def test_signal_to_one_rank_stops_all_in_the_same_round_with_a_checkpoint(tmp_path, number, status):
    options, stops = {"train_data": images(400), "output_dir": tmp_path}, {"max_samples": 2400}
    found = results(rank_jobs.stopped_by_signal, 2, options, stops, number, 3)
    assert_alike(found)
    assert found[0].status == status == read_summary(tmp_path)["status"]
    assert 3 * PER_ROUND <= found[0].samples_seen < 2400
    assert names_of(tmp_path)[0] == f"samples-{found[0].samples_seen:012d}"
    resumed = results(rank_jobs.train, 2, {**options, "resume": tmp_path}, stops)
    whole = results(rank_jobs.train, 2, {**options, "output_dir": None}, stops)
    assert resumed[0].z.tobytes() == whole[0].z.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("stops", [{"max_time_s": 0.3}, {"target_accuracy": 0.3, "max_epochs": 50}])
def test_time_and_targets_stop_all_ranks_in_the_same_round(stops):
    assert_alike(results(rank_jobs.train, 2, {"executor": "threads"}, stops))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_patience_stops_all_ranks_at_once_and_all_have_the_best_model_also_after_a_resume(tmp_path, num_ranks):
    # One epoch is enough to get every sample right, so no later one is better.
    options = {**LINEAR, "train_data": blobs(96), "test_data": blobs(96), "output_dir": tmp_path}
    first = results(rank_jobs.train, 2, options, {"max_epochs": 1, "patience": 2})
    found = results(rank_jobs.train, num_ranks, {**options, "resume": tmp_path}, {"max_epochs": 9, "patience": 2})
    assert_alike(found)
    summary = read_summary(tmp_path)
    assert (first[0].test_accuracy, found[0].reason) == (1.0, "patience")
    assert (summary["model_epoch"], summary["epochs"]) == (1.0, 3.0)
    for each in found:
        assert each.z.tobytes() != first[0].z.tobytes()
        assert each.model is not None and first[0].model is not None
        assert all(each.model[name].tobytes() == value.tobytes() for name, value in first[0].model.items())


# Learners gone non-finite


def with_a_nan_at(position: int) -> dict[str, Any]:
    """Blobs of which the sample at a position of the first epoch's stream (seed 0) is NaN."""
    inputs, targets = blobs(400)
    inputs[epoch_order(0, 0, 400)[position]] = float("nan")
    return {**LINEAR, "train_data": (inputs, targets)}


SICK = 5 * PER_ROUND + 9  # round 5, learner 2, which is the first of rank 1


@pytest.mark.parametrize("executor", thinned(["serial", "threads"], quick=[1], slow=[0]))
def test_learner_gone_non_finite_on_one_rank_stops_all_and_leaves_the_checkpoint_before(tmp_path, executor):
    options = {**with_a_nan_at(SICK), "executor": executor, "output_dir": tmp_path}
    found = on_ranks(rank_jobs.train_in_two_calls, 2, options, {"max_rounds": 3}, {"max_epochs": 1})
    all_raised(found, "RankError", "RankError")
    for each in found:
        assert each.text.startswith("rank 1: learner 2 went non-finite in round 5; the last good checkpoint is")
        assert "samples-000000000048" in each.text
        assert each.exit_code == 1
    assert names_of(tmp_path) == ["samples-000000000048"]
    summary = read_summary(tmp_path)
    assert (summary["status"], summary["stop_reason"]) == ("failed", "non_finite")


@pytest.mark.slow
def test_learner_gone_non_finite_on_the_first_rank_is_its_own_error(tmp_path):
    options = {**with_a_nan_at(5 * PER_ROUND + 5), "output_dir": tmp_path}
    first, second = on_ranks(rank_jobs.train, 2, options, {"max_epochs": 1})
    assert (first.kind, second.kind) == ("NonFiniteError", "RankError")
    assert "learner 1 went non-finite in round 5" in first.text and first.text in second.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "num_learners", "averaging"),
    [
        ("threads", 1, SMA()),
        ("fused", 2, SMA()),
        ("fused", 3, SynchronousSGD()),  # six in all: a division by which is not exact
        ("threads", 3, GroupedSMA(group_size=2)),
        ("serial", 2, DiLoCo(averaging_period=2)),  # by which learners meet in round 5
    ],
)
def test_learner_gone_non_finite_on_one_rank_is_reseeded_and_all_go_on(tmp_path, executor, num_learners, averaging):
    position = 5 * 8 * num_learners + 4 * num_learners + 1  # round 5, the first learner of rank 1
    options = {**with_a_nan_at(position), "executor": executor, "on_nonfinite": "reseed", "num_learners": num_learners}
    options["averaging"] = averaging
    found = results(rank_jobs.train, 2, options, {"max_epochs": 3})  # ranks that meet late act late
    assert_alike(found)
    assert found[0].num_reseeded >= 1
    for each in found:
        assert np.isfinite([*each.learners, each.z]).all()
        expected = f"Learner {num_learners} went non-finite in round 5 and was reseeded from the average model."
        assert expected in each.messages


@pytest.mark.slow
def test_rank_whose_only_learner_is_lost_has_the_step_of_the_others_in_the_outer_step():
    options = {**with_a_nan_at(5 * 8 + 5), "num_learners": 1, "on_nonfinite": "reseed"}
    still = SNOO(averaging_period=1, outer_learning_rate=1.0, outer_momentum=0.0)
    outer, plain = (
        results(rank_jobs.train, 2, {**options, "averaging": rule}, {"max_epochs": 1})
        for rule in (still, SynchronousSGD())
    )
    assert outer[0].num_reseeded == 1
    np.testing.assert_allclose(outer[0].z, plain[0].z, rtol=1e-6)


@pytest.mark.slow
def test_learner_gone_non_finite_before_a_checkpoint_is_reseeded_by_another_number_of_ranks(tmp_path):
    data = rank_jobs.images_with_a_nan(SICK)
    options = {"train_data": data, "augmentation": None, "on_nonfinite": "reseed", "output_dir": tmp_path}
    before = results(rank_jobs.train, 2, options, {"max_rounds": 6})  # the round in which it was lost is the last
    assert before[0].num_reseeded == 0
    found = results(rank_jobs.train, 3, {**options, "resume": tmp_path}, {"max_rounds": 3})
    assert_alike(found)
    assert found[0].num_reseeded == 1
    assert "Learner 2 went non-finite in round 5 and was reseeded from the average model." in found[0].messages
    assert all(np.isfinite(value).all() for value in found[0].model.values())


# Data


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_sample_on_one_rank_stops_all_with_a_checkpoint_and_a_resume_finishes(tmp_path, num_workers):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    bad = int(epoch_order(0, 0, 50)[2 * PER_ROUND + 10])  # round 2, a learner of rank 1
    options: dict[str, Any] = {"executor": "threads", "augmentation": None, "num_workers": num_workers}
    broken = {**options, "train_data": rank_jobs.Pictures(50, bad=bad), "output_dir": parts}
    found = all_raised(on_ranks(rank_jobs.train, 2, broken, {"max_epochs": 1}), "RankError", "RankError")
    for each in found:
        assert each.exit_code == 2
        assert f"rank 1: item {bad} of the data set cannot be read" in each.text
    assert names_of(parts) == ["samples-000000000032"]
    assert read_summary(parts)["status"] == "failed"
    mended = {**options, "train_data": rank_jobs.Pictures(50)}
    results(rank_jobs.train, 2, {**mended, "output_dir": parts, "resume": parts}, {"max_epochs": 1})
    results(rank_jobs.train, 2, {**mended, "output_dir": whole}, {"max_epochs": 1})
    assert weights(parts) == weights(whole)


def test_bad_test_sample_in_one_ranks_share_is_raised_on_all_with_a_checkpoint(tmp_path):
    options = {"test_data": rank_jobs.Pictures(20, bad=6), "num_workers": 0, "output_dir": tmp_path}
    found = on_ranks(rank_jobs.evaluate_in_fours, 2, options)
    for each in all_raised(found, "RankError", "RankError"):
        assert "rank 1: item 6 of the data set cannot be read" in each.text
        assert each.exit_code == 2
    assert names_of(tmp_path) == ["samples-000000000064"]


@pytest.mark.slow
def test_batch_of_a_recalibration_that_one_rank_cannot_make_leaves_all_with_the_mean_of_their_statistics():
    # After 32 samples batches 8 and on are taken for it, by turns: batch 9 is rank 1's.
    odd = int(epoch_order(0, 0, 50)[32 + 4 + 1])
    options = {"train_data": rank_jobs.Pictures(50, odd=odd), "augmentation": None, "num_workers": 0}
    found, of_means = (
        results(rank_jobs.train, 2, {**options, "averaging": averaging}, {"max_rounds": 2})
        for averaging in (SMA(recalibration_batches=2), SMA(batch_norm="mean"))
    )
    assert_alike([*found, *of_means])
    (said,) = [message for message in found[0].messages or [] if message.startswith("BatchNorm's statistics are means")]
    assert "rank 1: " in said


# The number of learners


@pytest.mark.slow
@pytest.mark.parametrize(
    "averaging",
    [SMA(average_ema=5.0, batch_norm="mean"), DiLoCo(averaging_period=7)],
    ids=["ema", "diloco"],
)
def test_auto_tuner_decides_alike_on_all_ranks(averaging):
    options = {"executor": "threads", "averaging": averaging}
    found = results(rank_jobs.tune, 2, options, {"max_rounds": 120})
    (first, counts), (second, others) = found
    assert counts == others
    assert len(set(counts)) > 1
    assert_alike([first, second])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "where", "averaging"),
    [
        ("serial", "allocation", SMA()),
        ("fused", "round", SMA()),
        # An EMA that moves after almost every round, also in that which memory did not hold.
        ("threads", "round", SMA(average_ema=1.0)),
        ("serial", "round", SynchronousSGD(average_ema=1.0)),
        ("fused", "round", SynchronousSGD()),
        ("threads", "round", GroupedSMA(group_size=2)),
        ("threads", "round", LocalSGD(averaging_period=3)),
    ],
)
def test_out_of_memory_on_one_rank_takes_learners_away_on_all(where, executor, averaging):
    error: Exception = MemoryError("no room")
    if executor == "threads":
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    options = {"executor": executor, "averaging": averaging}
    found = results(rank_jobs.tune_out_of_memory, 2, where, error, options, {"max_rounds": 60})
    assert_alike([each for each, _ in found])
    for each, tuner in found:
        assert each.num_learners == 1
        assert tuner["out_of_memory_at"] in (2, 3)  # a round that fails may be heard of when more are wanted already
        assert tuner == found[0][1]
        assert np.isfinite(each.z).all()
        own, first = (
            {name: value.tobytes() for name, value in model.items() if not name.endswith("num_batches_tracked")}
            for model in (each.model, found[0][0].model)
        )
        assert own == first


# Refusals


@pytest.mark.slow
def test_rank_with_another_configuration_or_source_is_refused_on_all():
    config = config_to_mapping(compose(["+experiment=digits"], TrainConfig))
    other = config_to_mapping(compose(["+experiment=digits", "batch_size=8", "output_dir=/elsewhere"], TrainConfig))
    assert results(rank_jobs.check_agreement, 2, [config, config], ["a", "a"]) == ["agree", "agree"]
    for configs, codes, shown in (
        ([config, other], ["a", "a"], "rank 1 is not like rank 0 (config.batch_size: 16 → 8)"),
        ([config, config], ["a", "b"], "rank 1 is not like rank 0 (code.source: a → b)"),
    ):
        first, second = all_raised(on_ranks(rank_jobs.check_agreement, 2, configs, codes), "UserError", "RankError")
        assert first.text.startswith(shown)
        assert first.text in second.text
        assert (first.exit_code, second.exit_code) == (2, 2)


def test_independent_learners_on_several_ranks_are_refused():
    found = on_ranks(rank_jobs.train, 2, {"averaging": Independent()}, {"max_rounds": 1})
    first, _ = all_raised(found, "UserError", "RankError")
    assert "averaging=independent trains models that are never averaged, on one device, got 2 ranks" in first.text
