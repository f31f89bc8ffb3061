"""Metrics with states: over unequal batches, several models, several ranks and tokens, against NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crossbow_py import Independent, Trainer, UserError
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.train.evaluation.evaluator import Evaluator, evaluate_bank
from crossbow_py.train.evaluation.metrics import checked_metrics, metrics_of, named_values, try_metric
from tests.state_metrics import (
    Bare,
    Counting,
    Curve,
    MacroF1,
    Meaning,
    Ranking,
    area_under_curve,
    dim_zero_cat,
    f1_scores,
)
from tests.support import features, feed_of, linear_model
from tests.thread_ranks import on_threads
from tests.trainers import image_trainer
from tests.unit.train.evaluation.test_evaluator import make_bank

INPUTS, TARGETS = features(10)


def evaluator_of(model: nn.Module, metrics: dict[str, Any], **options: Any) -> Evaluator:
    settings = {"loss": nn.functional.cross_entropy, "batch_size": 4, **options}
    return Evaluator(model, precision=FP64, metrics=metrics, **settings)


def measured(model: nn.Module, metrics: dict[str, Any], ranks: Ranks, **options: Any) -> dict[str, float]:
    feed = feed_of(options.pop("inputs", INPUTS), options.pop("targets", TARGETS))
    return evaluator_of(model, metrics, **options).evaluate(model.state_dict(), feed, ranks).metrics


def outputs_of(model: nn.Module, inputs: Tensor = INPUTS) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(inputs.double()).numpy()


def two_classes() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2).double(), torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 1])


def test_metric_with_states_is_of_the_whole_evaluation_and_no_mean_of_batches() -> None:
    model, targets = two_classes()
    f1 = MacroF1(2)
    f1.right += 100  # what it had seen before does not count
    found = measured(model, {"f1": f1, "mean": lambda outputs, _: outputs.mean()}, Ranks(), targets=targets)
    outputs = outputs_of(model)
    f1_score = f1_scores(outputs, targets.numpy()).mean()
    assert found == {"mean": pytest.approx(outputs.mean()), "f1": pytest.approx(f1_score)}
    batches = [f1_scores(outputs[at : at + 4], targets.numpy()[at : at + 4]).mean() for at in (0, 4, 8)]
    assert f1_score != pytest.approx(np.average(batches, weights=[4, 4, 2]), rel=1e-3)
    assert f1.right.tolist() == [100, 100]


def test_values_of_a_vector_and_of_a_mapping_are_named() -> None:
    model, targets = two_classes()
    found = measured(
        model, {"f1": MacroF1(2, average=None), "roc": Ranking()}, Ranks(), targets=targets, class_names=("cat", "dog")
    )
    outputs = outputs_of(model)
    each = f1_scores(outputs, targets.numpy())
    assert found == {
        "f1/cat": pytest.approx(each[0]), "f1/dog": pytest.approx(each[1]),
        "roc/area": pytest.approx(area_under_curve(outputs[:, 1] - outputs[:, 0], targets.numpy())), "roc/samples": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "names", "found"),
    [
        (torch.tensor([[3.0]]), (), {"m": 3.0}),
        (np.float32(0.5), (), {"m": 0.5}),
        (torch.tensor([1, 2]), ("same", "same"), {"m/0": 1.0, "m/1": 2.0}),
        (torch.tensor([1, 2]), ("one", "two", "three"), {"m/0": 1.0, "m/1": 2.0}),
        ({"a": {"b": 1.0}, "c": torch.tensor([2.0, 3.0])}, (), {"m/a/b": 1.0, "m/c/0": 2.0, "m/c/1": 3.0}),
    ],
)
def test_values_are_named(value: Any, names: tuple[str, ...], found: dict[str, float]) -> None:
    assert named_values("m", value, names) == found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, 3), "got a tensor of shape [2, 3]"),
        ((torch.zeros(1), torch.ones(1)), "got (tensor([0.]), tensor([1.]))"),
        ("text", "got 'text'"),
        (None, "got 'NoneType'"),
    ],
)
def test_values_that_are_no_numbers_are_refused(value: Any, said: str) -> None:
    with pytest.raises(UserError, match="must compute a number, a vector of them or a mapping") as error:
        named_values("m", value)
    assert said in str(error.value)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_with_unequal_shares_measure_what_one_does(num_ranks: int) -> None:
    # Three batches: with four ranks the last one has none, and knows no shape of a state that is a list.
    model, targets = two_classes()
    metrics = {"f1": MacroF1(2), "roc": Ranking()}
    alone = measured(model, metrics, Ranks(), targets=targets)
    each = on_threads(lambda ranks: measured(model, metrics, ranks, targets=targets), num_ranks)
    assert each == [{name: pytest.approx(value) for name, value in alone.items()}] * num_ranks


@pytest.mark.parametrize("fused", [False, True])
def test_each_model_of_a_bank_has_metrics_of_its_own(fused: bool) -> None:
    bank = make_bank(linear_model)
    evaluator = Evaluator(
        bank.template, precision=FP64, loss=nn.functional.cross_entropy, batch_size=4, metrics={"f1": MacroF1(3)}
    )
    found = evaluate_bank(bank, evaluator, feed_of(INPUTS, TARGETS), [0, 1, 2], fused=fused)
    each = [f1_scores(outputs_of(bank.module(row)), TARGETS.numpy()).mean() for row in range(3)]
    assert [one.metrics["f1"] for one in found] == pytest.approx(each)
    assert len(set(each)) > 1


class Tokens(nn.Module):
    """Scores [B, T, V] of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(ids)


def test_tokens_are_samples_of_a_metric_and_ignored_ones_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (10, 5), generator=generator)
    targets = torch.randint(3, (10, 5), generator=generator)
    targets[3:, 2:] = -100
    targets[8:] = -100  # a whole batch of four has but two samples with targets
    model = Tokens().double()
    found = measured(model, {"f1": MacroF1(3)}, Ranks(), inputs=ids, targets=targets)
    outputs, kept = model(ids).detach().numpy(), (targets != -100).numpy()
    assert found["f1"] == pytest.approx(f1_scores(outputs[kept], targets.numpy()[kept]).mean())


def test_loss_that_writes_its_outputs_changes_no_metric() -> None:
    def writes(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.zero_().sum() + nn.functional.cross_entropy(outputs, targets)

    model, targets = two_classes()
    found = measured(model, {"roc": Ranking()}, Ranks(), targets=targets, loss=writes)
    outputs = outputs_of(model)
    assert found["roc/area"] == pytest.approx(area_under_curve(outputs[:, 1] - outputs[:, 0], targets.numpy()))


def test_run_records_metrics_with_states_of_every_independent_learner_as_their_mean() -> None:
    trainer = image_trainer(averaging=Independent(), num_learners=2, metrics={"f1": MacroF1(3)})
    result = trainer.fit(max_rounds=4)
    images, targets = trainer.run.data.test
    with torch.no_grad():
        each = [f1_scores(call(trainer, model, images), targets.numpy()).mean() for model in result.models]
    assert result.summary.metrics == {"f1": pytest.approx(np.mean(each))}
    assert trainer.evaluate().metrics == result.summary.metrics


def call(trainer: Trainer, model: nn.Module, images: Tensor) -> np.ndarray[Any, Any]:
    batch = trainer.run.test_feed.first_samples(len(images))
    outputs: np.ndarray[Any, Any] = model.double()(batch.inputs.double()).numpy()
    return outputs


class Collection(nn.ModuleDict):
    """As `torchmetrics.MetricCollection`."""

    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__()
        self.members = members

    def items(self) -> Any:  # type: ignore[override]
        return self.members.items()

    update = compute = reset = lambda self: None


def test_members_of_a_collection_are_metrics_of_their_own() -> None:
    one, other = MacroF1(3), Bare()
    found = checked_metrics({"all": Collection({"f1": one, "largest": other})}, 1)
    assert found == {"all/f1": one, "all/largest": other}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([nn.L1Loss()], "metrics must be a mapping of names and metrics, got [L1Loss()]"),
        ({"accuracy": nn.L1Loss()}, "metrics must have names of their own, other than loss, accuracy, perplexity"),
        ({"loss": MacroF1(3)}, "got 'loss'; call it something else"),
        ({3: MacroF1(3)}, "got 3; call it something else"),
        ({"f1": MacroF1}, "metrics['f1'] must be an object, got the class MacroF1; give MacroF1(...)"),
        ({"f1": 3}, "metrics['f1'] must be a function of (outputs, targets), or have update, compute and reset"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        image_trainer(metrics=metrics)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (MacroF1(4), "metrics['m'] cannot take the model's output [2, 3] with targets [2] (ValueError: preds must be"),
        (Curve(), "metrics['m'] must compute a number, a vector of them or a mapping, got (tensor([0., 0.]), tensor("),
        (Ranking(), None),
        (Bare(), None),
        (Counting(), None),
    ],
)
def test_metric_that_does_not_fit_is_refused_before_training(metric: Any, said: str | None) -> None:
    if said is None:
        image_trainer(metrics={"m": metric})
        return
    with pytest.raises(UserError) as error:
        image_trainer(metrics={"m": metric})
    assert said in str(error.value)


class Holding(nn.Module):
    """A metric that holds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self._reductions = {"states": dim_zero_cat}
        self.states: list[Tensor] = []

    update = compute = reset = lambda self: None


class Inner(nn.Module):
    update = compute = reset = lambda self: None


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Bare(), "metrics['m'], a Bare, does not say how its states are put together, which several ranks have to"),
        (Holding(), "metrics['m'], a Holding, holds other metrics"),
        (Meaning(reduction=None), "has the state value, which cannot be put together over ranks by None"),
        (Meaning(reduction=torch.logsumexp), "by logsumexp: only sums, extremes and lists can"),
        (Meaning(), "metrics['m'] changes its value, which cannot be put together over 2 ranks"),
        (Counting(), "metrics['m'] changes its calls, which cannot be put together over 2 ranks"),
        (MacroF1(3), None),
        (Meaning(constant=True), None),
    ],
)
def test_metric_that_ranks_cannot_share_is_refused_by_its_name(metric: Any, said: str | None) -> None:
    def check() -> None:
        checked_metrics({"m": metric}, 2)
        try_metric("m", metric, torch.randn(2, 3), torch.tensor([0, 2]), None, num_ranks=2)

    checked_metrics({"m": metric}, 1)
    if said is None:
        check()
        return
    with pytest.raises(UserError) as error:
        check()
    assert said in str(error.value)
    assert "compute it from result.model after the run, or train on one device" in str(error.value)


class Late(Bare):
    """A metric that fails once it has seen some samples."""

    def compute(self) -> float:
        if len(self.largest) > 1:
            raise ValueError("too many")
        return 0.0


def test_metric_that_fails_in_an_evaluation_is_named() -> None:
    trainer = image_trainer(metrics={"late": Late()})
    trainer.run.evaluator.batch_size = 4
    with pytest.raises(UserError, match=r"metrics\['late'\] cannot take the model's .* \(ValueError: too many\)"):
        trainer.evaluate()


def test_targets_of_the_command_line_make_metrics() -> None:
    path = "tests.state_metrics.MacroF1"
    found = metrics_of(
        {
            "f1": {"target": path, "num_classes": 3, "average": None},
            "l1": {"target": "torch.nn.functional.l1_loss"},
            "sum": {"target": "torch.nn.functional.l1_loss", "reduction": "sum"},
            "module": {"target": "torch.nn.L1Loss"},
        }
    )
    assert (found["f1"].num_classes, found["f1"].average) == (3, None)  # type: ignore[union-attr]
    assert found["l1"] is nn.functional.l1_loss
    assert isinstance(found["sum"], partial)
    assert float(found["sum"](torch.ones(4), torch.zeros(4))) == 4.0
    assert isinstance(found["module"], nn.L1Loss)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"num_classes": 3}, "metrics.m must have a target, the dotted name of a metric, got {'num_classes': 3}; set"),
        ("tests.state_metrics.MacroF1", "metrics.m must have a target, the dotted name of a metric, got 'tests."),
        ({"target": 3}, "metrics.m must have a target"),
        ({"target": "tests.state_metrics.Missing"}, "metrics.m.target=tests.state_metrics.Missing cannot be imported"),
        ({"target": "math.pi"}, "metrics.m.target=math.pi must be callable, got float"),
        ({"target": "tests.state_metrics.MacroF1", "classes": 3}, "cannot be made with metrics.m.classes (TypeError"),
        ({"target": "tests.state_metrics.MacroF1"}, "cannot be made with no arguments (TypeError"),
        ({"target": "torch.nn.functional.l1_loss", "power": 3}, "cannot be made with metrics.m.power (TypeError"),
        ({"target": "collections.OrderedDict"}, "metrics.m.target=collections.OrderedDict must be a metric, got"),
    ],
)
def test_targets_that_are_no_metrics_are_refused(entry: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        metrics_of({"m": entry})
    assert said in str(error.value)
