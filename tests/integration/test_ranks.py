"""One model over several ranks: as exact as over one, whatever the number of ranks, learners and executors."""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from crossbow_py import SGD, SMA, Muon
from crossbow_py.averaging import PAPA, SNOO, Crossbow, DiLoCo, Elastic, GroupedSMA, LocalSGD, SlowMo, SynchronousSGD
from crossbow_py.data.build import make_feed
from crossbow_py.optimizers import ParameterGroup, TorchOptimizer
from crossbow_py.train.schedules import Cosine
from tests import rank_jobs
from tests.event_files import read_events
from tests.rank_jobs import Ended, Values, assert_alike, distance, results
from tests.support import linear_model
from tests.thinned import thinned
from tests.trainers import blobs, deeper_image_model


def train(
    num_ranks: int, num_learners: int, executor: str = "serial", fp64: bool = True, **options: Any
) -> list[Ended]:
    """20 rounds on each rank, unless told otherwise."""
    stops = {"max_rounds": options.pop("rounds", 20)}
    options = {"executor": executor, "num_learners": num_learners, **options}
    return results(rank_jobs.train, num_ranks, options, stops, fp64)


def assert_same_run(found: list[Ended], reference: Ended, tolerance: float) -> None:
    """z, the learners in order, and the average model's statistics are those of one rank with all learners."""
    learners = [row for each in found for row in each.learners]
    for each in found:
        assert each.samples_seen == reference.samples_seen
        assert distance(each.z, reference.z) <= tolerance
        for name, expected in reference.model.items():
            if name.endswith("num_batches_tracked"):
                assert each.model[name] == expected
            else:
                assert distance(each.model[name], expected) <= 10 * tolerance, name
    assert len(learners) == len(reference.learners)
    for own, expected in zip(learners, reference.learners, strict=True):
        assert distance(own, expected) <= tolerance


@pytest.fixture(scope="module")
def alone() -> Callable[[int], Ended]:
    """20 rounds of one rank, in float64, by its number of learners."""
    return functools.cache(lambda num_learners: train(1, num_learners)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_learners", "executor"),
    [(2, 1, "fused"), (2, 2, "serial"), (2, 2, "threads"), (3, 1, "serial"), (4, 1, "threads")],
)
def test_ranks_follow_one_rank_of_as_many_learners(num_ranks, num_learners, executor, alone):
    found = train(num_ranks, num_learners, executor)
    assert_same_run(found, alone(num_ranks * num_learners), 1e-8)
    assert_alike(found)
    assert distance(found[0].learners[-1], found[1].learners[-1]) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads", "fused"])
def test_learners_that_come_on_two_ranks_and_outer_steps_are_those_of_one_rank(executor):
    common = {"executor": executor, "averaging": SNOO(averaging_period=3), "schedule": Cosine(epochs=4)}
    common["num_learners"] = "seesaw"
    found = results(rank_jobs.train, 2, {**common, "max_learners": 2}, {"max_epochs": 4}, True)
    (one,) = results(rank_jobs.train, 1, {**common, "min_learners": 2, "max_learners": 4}, {"max_epochs": 4}, True)
    assert found[0].num_learners == 2
    assert_same_run(found, one, 1e-8)
    assert_alike(found)


@pytest.mark.parametrize("executor", thinned(["serial", "threads", "fused"], quick=[2], slow=[1]))
def test_one_round_of_two_ranks_is_that_of_one_in_float32(executor):
    found = train(2, 2, executor, fp64=False, rounds=1)
    assert_same_run(found, train(1, 4, executor, fp64=False, rounds=1)[0], 1e-5)


@pytest.mark.slow
def test_gradients_summed_by_native_code_are_summed_over_ranks():
    options = {"averaging": SynchronousSGD(), "fp64": False, "rounds": 6}
    found = train(2, 3, "fused", **options)  # six in all: a division by which is not exact
    assert_same_run(found, train(1, 6, "serial", **options)[0], 1e-4)
    assert_alike(found)


@pytest.mark.parametrize(
    "averaging",
    thinned(
        [
            SMA(averaging_period=3),
            Crossbow(averaging_momentum=0.5),
            SMA(restart_momentum="average"),
            Elastic(averaging_period=2, rate_scaling="sqrt"),
            LocalSGD(averaging_period=3, learner_momentum="average", quadratic_period=0.08),
            DiLoCo(averaging_period=2),
            SlowMo(averaging_period=3, learner_momentum="reset"),
            PAPA(averaging_period=2, pull=0.3),
            Crossbow(final_correction_rate=0.8),
            SynchronousSGD(rate_scaling="linear"),
            GroupedSMA(group_size=2, rate_scaling="linear"),
            LocalSGD(averaging_period=3, average_ema=1.0, batch_norm="recalibrate", recalibration_batches=5),
            SynchronousSGD(average_ema=5.0),
        ],
        quick=[0, 6, 7, 9],
        slow=[1, 2, 3, 4, 5, 10, 11],
    ),
    ids=[
        "period",
        "crossbow",
        "restart",
        "elastic",
        "local_sgd",
        "diloco",
        "slowmo",
        "papa",
        "growing rate",
        "synchronous_sgd",
        "grouped_sma",
        "ema and recalibrate",
        "ema of synchronous_sgd",
    ],
)
def test_other_settings_of_averaging_follow_one_rank(averaging):
    options = {"averaging": averaging, "rounds": 14}  # the rate drops at 100 samples, in round 7
    found = train(2, 2, **options)
    assert_same_run(found, train(1, 4, **options)[0], 1e-8)
    assert_alike(found)


@pytest.mark.slow
@pytest.mark.parametrize(("averaging", "others"), [(SynchronousSGD(), "sgd"), (SMA(), "adamw")], ids=["mean", "sma"])
def test_muon_on_ranks_follows_one_rank(averaging, others):
    normalizes = averaging.gradient_mean is not None
    optimizer = Muon(
        weight_decay=0.05, normalize_weights=normalizes, other_optimizer=others, other_learning_rate=0.01, clip_norm=1.0
    )
    options = {"averaging": averaging, "optimizer": optimizer, "model": deeper_image_model, "rounds": 14}
    found = train(2, 2, **options)
    assert_same_run(found, train(1, 4, **options)[0], 1e-7)
    assert_alike(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "averaging"),
    [
        ({"accumulate": 3, "batch_size": 2}, SynchronousSGD()),
        ({"optimizer": SGD(learning_rate=0.05, groups=(ParameterGroup("7", rate=0.5, clip_norm=0.1),))}, SMA()),
        ({"optimizer": TorchOptimizer(learning_rate=0.005, target=torch.optim.NAdam, weight_decay=0.1)}, SMA()),
    ],
    ids=["accumulate", "groups", "torch"],
)
def test_other_settings_of_learning_follow_one_rank(options, averaging):
    found = train(2, 2, averaging=averaging, rounds=10, **options)
    assert_same_run(found, train(1, 4, averaging=averaging, rounds=10, **options)[0], 1e-7)
    assert_alike(found)


@pytest.mark.parametrize(("executor", "num_ranks"), thinned([("threads", 3), ("fused", 2)], quick=[0], slow=[1]))
def test_z_after_training_is_equal_to_the_bit_and_so_is_what_was_measured(num_ranks, executor):
    found = results(rank_jobs.train, num_ranks, {"executor": executor}, {"max_epochs": 3})
    assert_alike(found)
    assert found[0].epochs is not None
    assert [each[0] for each in found[0].epochs] == [1, 2, 3]
    assert found[0].test_accuracy is not None


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_evaluation_over_ranks_is_that_of_one_rank(num_ranks):
    found = results(rank_jobs.evaluate_twice, num_ranks, {})  # five batches
    for shared, alone in found:
        assert shared == found[0][0]
        assert shared == pytest.approx(alone, rel=1e-12)
        assert shared[2] == 20


@pytest.mark.parametrize("executor", thinned(["serial", "threads"], quick=[0], slow=[1]))
def test_ranks_take_every_position_of_the_stream_once_and_theirs_alone(executor):
    found = results(rank_jobs.starts_taken, 2, {"executor": executor, "averaging": SMA(batch_norm="mean")}, 7)
    for rank, starts in enumerate(found):
        assert sorted(starts) == sorted(16 * n + 8 * rank + 4 * j for n in range(7) for j in range(2))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_rounds", "epochs"), [(1, 20, 4), (2, 10, 4), (3, 10, 6)])
def test_samples_of_epochs_are_the_same_set_whatever_the_number_of_ranks(num_ranks, num_rounds, epochs):
    options = {"batch_size": 5, "averaging": SMA(batch_norm="mean")}  # evaluations take no training batches
    found = results(rank_jobs.samples_taken, num_ranks, options, num_rounds)
    assert {len(each) for each in found} == {10 * num_rounds}
    taken = sorted(sample for each in found for sample in each)
    assert taken == sorted(list(range(50)) * epochs)


# Two levels: nodes that average for themselves


def node_reference(num_nodes: int, per_node: int, num_rounds: int, period: int, node_period: int) -> list[list[Values]]:
    """z of every node, at first and after every round: the equations of `averaging.rule`, with gradients by hand."""
    momentum, decay, batch, num_learners = 0.8, 0.01, 4, num_nodes * per_node
    rate = 0.1 * math.sqrt(num_learners)
    feed = make_feed(blobs(40), batch, 0)
    start = linear_model()
    first = np.concatenate([start.weight.detach().double().numpy().ravel(), start.bias.detach().double().numpy()])
    z = [first.copy() for _ in range(num_nodes)]
    w, u = [first.copy() for _ in range(num_learners)], [np.zeros_like(first) for _ in range(num_learners)]
    found, averagings = [[first] * num_nodes], 0
    for n in range(num_rounds):
        averages = (n + 1) % period == 0
        for j in range(num_learners):
            node, (inputs, targets) = j // per_node, feed.batch((n * num_learners + j) * batch)
            x, y = inputs.double().numpy(), targets.numpy()
            logits = x @ w[j][:12].reshape(3, 4).T + w[j][12:]
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(batch), y] -= 1
            gradient = np.concatenate([(p.T @ x / batch + decay * w[j][:12].reshape(3, 4)).ravel(), p.mean(0)])
            correction = w[j] - z[node] if n % period == 0 else 0.0 * w[j]
            u[j] = momentum * u[j] + gradient
            w[j] = w[j] - rate * u[j] - correction
        if averages:
            averagings += 1
            z = [np.mean(w[i * per_node : (i + 1) * per_node], axis=0) for i in range(num_nodes)]
            if node_period > 1 and averagings % node_period == 0:
                z = [np.mean(z, axis=0)] * num_nodes
        found.append([each.copy() for each in z])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("period", "node_period"), [(1, 2), (3, 2)])
def test_nodes_that_average_for_themselves_follow_the_equations(period, node_period):
    options = {
        "num_learners": 1,
        "optimizer": SGD(learning_rate=0.1, momentum=0.8, weight_decay=0.01),
        "averaging": SMA(averaging_period=period, node_period=node_period),
    }
    found = results(rank_jobs.z_of_every_round, 4, options, 12, num_nodes=2)
    reference = node_reference(2, 2, 12, period, node_period)
    for n in range(13):
        for rank in range(4):
            np.testing.assert_allclose(found[rank][n], reference[n][rank // 2], rtol=1e-10, atol=1e-12)
        first, same, other, others_same = (each[n].tobytes() for each in found)
        assert (first, other) == (same, others_same)
        # z moves in the first averaging, and is one where nodes join.
        assert (first == other) is (n < period or n // period % node_period == 0)


@pytest.mark.slow
@pytest.mark.parametrize("average_ema", [None, 1e-9], ids=["z", "an EMA with a horizon too short for any past"])
def test_result_of_nodes_that_are_apart_is_the_mean_of_theirs(average_ema):
    averaging = SMA(node_period=50, average_ema=average_ema)
    options = {"executor": "serial", "num_learners": 2, "averaging": averaging}
    first, second = results(rank_jobs.train, 2, options, {"max_rounds": 6}, num_nodes=2)
    assert distance(first.z, second.z) > 1e-6
    for name in first.model:
        assert first.model[name].tobytes() == second.model[name].tobytes()
    assert (first.test_accuracy, first.test_loss) == (second.test_accuracy, second.test_loss)
    mean = (first.z + second.z) / 2
    # The order of the parameters in the bank and in the model differs; their values do not.
    names = [name for name in first.model if "running" not in name and "num_batches" not in name]
    model = np.sort(np.concatenate([first.model[name].ravel() for name in names]))
    np.testing.assert_allclose(model, np.sort(mean), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_ema_of_nodes_that_are_apart_is_one_to_the_bit_and_that_of_no_node():
    options = {"executor": "serial", "num_learners": 2, "averaging": SMA(node_period=4, average_ema=2.0)}
    first, second = results(rank_jobs.train, 2, options, {"max_rounds": 11}, num_nodes=2)
    alone = results(rank_jobs.train, 1, options, {"max_rounds": 11})[0]
    for name, value in first.model.items():
        assert value.tobytes() == second.model[name].tobytes()
    assert distance(first.model["0.weight"], alone.model["0.weight"]) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_slowest_rank_is_the_one_that_needs_most_time_by_itself(executor):
    """Rank 1 sleeps in its model: both take the same time for a round, and rank 0 waits for most of it."""
    for summary, progress, epoch in results(rank_jobs.paces, 2, {"executor": executor}, 25):
        fast, slow = summary.per_rank
        assert (fast.rank, slow.rank, slow.host) == (0, 1, socket.gethostname())
        assert slow.step_ms > max(1000 * rank_jobs.SLOW_S, fast.step_ms)  # whatever else the machine does
        assert fast.rank_wait_share > slow.rank_wait_share
        assert summary.ranks.slowest_rank == epoch.ranks.slowest_rank == 1
        assert len(progress.ranks) == 2
        assert summary.ranks.most_data_wait_share is None


@pytest.mark.slow
def test_first_rank_of_every_node_records_the_gpus_of_its_node(tmp_path):
    places, *others = results(rank_jobs.gpus_recorded, 4, tmp_path / "run", num_nodes=2)
    host = socket.gethostname()
    assert [tuple(place) for place in places] == [(rank // 2, host, (f"GPU-{rank}",)) for rank in range(4)]
    assert all(each == places for each in others)
    folder = tmp_path / "run" / "tensorboard"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [f"node_1_{host}"]
    for node, at in enumerate((folder, folder / f"node_1_{host}")):
        read = read_events(at)
        for index in range(2):
            assert read.Scalars(f"gpu/{index}/utilization_percent")[0].value == 10.0 * (2 * node + index)
        assert "gpu/2/utilization_percent" not in read.Tags()["scalars"]
        assert ("loss/train" in read.Tags()["scalars"]) is (node == 0)
