"""The Python interface: what a trainer takes and refuses, and what `fit` and `evaluate` return."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from crossbow_py import SGD, SMA, Augmentation, Independent, Listener, UserError
from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import CheckpointError
from crossbow_py.schedules import MultiStep
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.train.checkpoints.weights import save_weights
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.loop.average_model import spread
from tests.networks import Net, net
from tests.support import linear_model
from tests.trainers import Recorder, blobs, equal_states, make_trainer


def outputs_right(module: nn.Module, num_samples: int = 30) -> float:
    inputs, targets = blobs(num_samples)
    return float((module(inputs).argmax(1) == targets).float().mean())


def test_time_in_all_includes_the_making_of_the_trainer():
    def slow_model() -> nn.Module:
        time.sleep(0.2)
        return nn.Linear(4, 3)

    trainer = make_trainer(model=slow_model)
    made_s = trainer.state.wall_s
    assert made_s >= 0.2
    assert trainer.fit(max_rounds=1).summary.wall_time_s > made_s


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_fit_of_two_learners_on_tensors_learns_and_returns_the_average_model(executor):
    trainer = make_trainer(test_data=blobs(30), executor=executor)
    before = trainer.evaluate()
    result = trainer.fit(max_epochs=3)
    assert before.accuracy < 0.9 < result.test_accuracy
    assert (result.status, result.stop_reason) == ("finished", "max_epochs")
    assert result.images_per_s > 0
    assert result.models == []
    assert not result.model.training
    assert outputs_right(result.model) == pytest.approx(result.test_accuracy)
    z = trainer.run.bank.z.shaped()
    assert all(torch.equal(value, z[name]) for name, value in result.model.state_dict().items())
    assert result.summary.epochs == 3.0


def test_fit_of_one_learner_equals_a_plain_torch_loop_with_its_schedule():
    optimizer = SGD(learning_rate=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, decay_norm_and_bias=True)
    trainer = make_trainer(num_learners=1, optimizer=optimizer, schedule=MultiStep(milestones=(1.0, 1.5), gamma=0.1))
    result = trainer.fit(max_epochs=2)
    model = linear_model()
    reference = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    for n in range(20):
        # 40 samples in batches of 4: the rate drops at samples 40 and 60, which is before rounds 10 and 15.
        reference.param_groups[0]["lr"] = 0.05 * (1.0 if n < 10 else 0.1 if n < 15 else 0.01)
        batch = trainer.run.train_feed.batch(4 * n)
        reference.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        reference.step()
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_fit_of_two_learners_equals_the_equations_worked_out_by_hand():
    trainer = make_trainer(optimizer=SGD(learning_rate=0.05, momentum=0.5), averaging=SMA(correction_rate=0.5))
    result = trainer.fit(max_rounds=6)
    models = [linear_model(), linear_model()]
    velocity = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    z = [p.detach().clone() for p in linear_model().parameters()]
    rate = 0.05 * math.sqrt(2)
    for n in range(6):
        for j, model in enumerate(models):
            batch = trainer.run.train_feed.batch((2 * n + j) * 4)
            parameters = list(model.parameters())
            loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
            for i, (w, g) in enumerate(zip(parameters, torch.autograd.grad(loss, parameters), strict=True)):
                velocity[j][i] = 0.5 * velocity[j][i] + g
                w.data -= rate * velocity[j][i] + 0.5 * (w.detach() - z[i])
        z = [(a.detach() + b.detach()) / 2 for a, b in zip(*(model.parameters() for model in models), strict=True)]
    for ours, expected in zip(result.model.parameters(), z, strict=True):
        torch.testing.assert_close(ours.detach(), expected, rtol=1e-5, atol=1e-6)


def test_fit_of_independent_learners_returns_records_and_saves_each(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(
        averaging=Independent(), optimizer=SGD(learning_rate=(1e-6, 0.1)), test_data=blobs(30), output_dir=tmp_path,
        callbacks=[recorder],
    )  # fmt: skip
    result = trainer.fit(max_epochs=2)
    (_, record) = recorder.of("epoch")
    accuracies = [outputs_right(model) for model in result.models]
    assert record.learner_accuracy == pytest.approx(tuple(accuracies))
    assert accuracies[0] < accuracies[1]
    assert result.test_accuracy == pytest.approx(sum(accuracies) / 2)
    assert (record.spread, record.correction_norm, record.samples_seen) == (None, None, 80)
    for learner, model in enumerate(result.models):
        saved = load_file(tmp_path / f"model_{learner}.safetensors")
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "model.safetensors").exists()


def test_second_fit_goes_on_and_ends_where_one_long_fit_does():
    recorder, straight = Recorder(), Recorder()
    long = make_trainer(test_data=blobs(30), callbacks=[straight]).fit(max_epochs=3)
    trainer = make_trainer(test_data=blobs(30), callbacks=[recorder])
    trainer.fit(max_samples=56)
    assert [record.epoch for record in recorder.of("epoch")] == [1, 1.4]
    result = trainer.fit(max_epochs=3)
    assert equal_states(result.model, long.model)
    assert [record.epoch for record in recorder.of("epoch")] == [1, 1.4, 2, 3]
    losses, unbroken = ([record.train_loss for record in told.of("epoch")] for told in (recorder, straight))
    assert losses[2:] == unbroken[1:]  # the epoch in which it stopped has lost no round
    assert [info.samples_seen for info in recorder.of("start")] == [0, 56]


def test_fit_without_output_dir_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(test_data=blobs(30)).fit(max_epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_fit_with_output_dir_leaves_records_checkpoints_and_the_model(tmp_path):
    folder = tmp_path / "new" / "run"
    result = make_trainer(test_data=blobs(30), output_dir=folder).fit(max_epochs=2)
    assert {path.name for path in folder.iterdir()} == {
        "metrics.jsonl", "summary.json", "confusion_test.csv", "tensorboard", "checkpoints", "model.safetensors",
    }  # fmt: skip
    assert [line["epoch"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2]
    assert read_summary(folder)["test_accuracy"] == result.test_accuracy
    path = folder / "model.safetensors"
    assert read_summary(folder)["model_path"] == str(path)
    assert read_summary(folder)["model_sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    saved = load_file(path)
    assert all(torch.equal(value, saved[name]) for name, value in result.model.state_dict().items())


def test_evaluate_measures_the_current_model_and_changes_nothing():
    trainer = make_trainer(test_data=blobs(30))
    first = trainer.evaluate()
    model = linear_model()
    inputs, targets = blobs(30)
    assert first.loss == pytest.approx(nn.functional.cross_entropy(model(inputs), targets).item(), rel=1e-5)
    assert first.accuracy == pytest.approx(outputs_right(model))
    assert trainer.evaluate() == first
    assert trainer.fit(max_epochs=1).summary.test_loss == trainer.evaluate().loss != first.loss


def test_init_from_starts_at_the_saved_weights(tmp_path):
    first = make_trainer(test_data=blobs(30)).fit(max_epochs=3)
    save_weights(first.model, tmp_path / "model.safetensors")
    tuned = make_trainer(test_data=blobs(30), init_from=tmp_path / "model.safetensors")
    assert tuned.evaluate().accuracy == first.test_accuracy
    for learner in range(2):
        state = tuned.run.bank.learner_state(learner)
        assert all(torch.equal(value, state[name]) for name, value in first.model.state_dict().items())
    assert tuned.fit(max_epochs=1).summary.test_loss < first.summary.test_loss
    with pytest.raises(CheckpointError, match="init_from=.* does not fit this model"):
        make_trainer(model=lambda: nn.Linear(4, 5), init_from=tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_data": (blobs(40)[0], torch.arange(40) % 5)}, "the data has 5 classes, 0 to 4; its last layer must"),
        ({"num_classes": 4}, r"output has shape \[batch, 3\] and the data has 4 classes"),
        ({"model": nn.Linear(4, 3)}, "model must be a function that returns an nn.Module, got Linear"),
        ({"model": lambda: nn.Linear(5, 3)}, r"the model cannot take the training data, inputs of shape \[4\]"),
        ({"batch_size": 41}, "batch_size=41 must be between 1 and the size of the data set, which has 40 samples"),
        ({"train_data": 40}, "the data set must be tensors"),
        ({"train_data": (blobs(40)[0], blobs(39)[1])}, "as many inputs as targets"),
        ({"optimizer": SGD(learning_rate=[0.1, 0.2, 0.3])}, "optimizer.learning_rate lists 3 values for 2 learners"),
        ({"optimizer": "adam"}, "optimizer has no 'adam'; did you mean 'adamw'?"),
        ({"optimizer": nn.Linear}, r"optimizer must be one of crossbow_py's, such as SGD\(\), got <class"),
        ({"optimizer": torch.optim.SGD(linear_model().parameters())}, r"as SGD\(\), got SGD \( Parameter Group 0"),
        ({"schedule": 0.1}, r"schedule must be one of crossbow_py's, such as Constant\(\), got 0.1"),
        ({"loss": "mse"}, r"loss must be a function \(outputs, targets\) -> tensor, such as nn.MSELoss\(\), got 'mse'"),
        ({"loss": 0.5}, r"a function \(outputs, targets\) -> tensor, such as nn.MSELoss\(\), got 0.5; give one"),
        ({"averaging": None}, r"averaging must be one of crossbow_py's, such as SMA\(\), got None; import one from"),
        ({"averaging": Independent(), "num_learners": "auto"}, "needs a fixed num_learners, got auto; set it"),
        ({"loss": nn.NLLLoss(), "label_smoothing": 0.1}, r"label_smoothing=0\.1 is for cross-entropy, and another"),
        ({"seed": "0"}, "seed must be a whole number, got '0'"),
        ({"max_evaluation_batches": 0}, "max_evaluation_batches must be at least 1 or None, got 0; None evaluates"),
        ({"on_nonfinite": "reseed", "num_learners": 1}, "sma with num_learners=1 has none; set on_nonfinite=stop"),
        ({"on_nonfinite": "reseed", "averaging": Independent()}, "averaging=independent with num_learners=2 has none"),
        ({"augmentation": Augmentation(2)}, "need uint8 image tensors"),
        ({"init_from": "nowhere.safetensors"}, "init_from=nowhere.safetensors cannot be read as safetensors"),
        ({"resume": "nowhere"}, "no checkpoint in nowhere"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_before_training_in_one_sentence(options, message):
    with pytest.raises(UserError, match=message) as caught:
        make_trainer(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ({}, "a run needs an end"),
        ({"max_rounds": 0}, "max_rounds must be at least 1, got 0"),
        ({"max_epochs": -1}, "max_epochs must be greater than 0"),
        ({"max_rounds": "3"}, "max_rounds must be a whole number"),
        ({"max_rounds": 1, "after_round": 3}, "after_round must be a function of a RoundEnd, got 3; give one"),
        ({"target_accuracy": 0.9}, "go by evaluations, got neither test_data nor validation_data"),
        ({"target_loss": 0.1, "max_epochs": 1}, "target_loss, patience and restore_best go by evaluations"),
    ],
)
def test_fit_refuses_an_end_that_cannot_come(stops, message):
    with pytest.raises(UserError, match=message):
        make_trainer().fit(**stops)


def test_evaluate_without_test_data_is_refused():
    with pytest.raises(UserError, match=r"evaluate\(\) needs test_data, got none"):
        make_trainer().evaluate()


def test_output_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir .*file/run cannot be written \(Not a directory\); choose another"):
        make_trainer(output_dir=tmp_path / "file" / "run").fit(max_epochs=1)


def test_random_numbers_that_are_asked_of_torchs_own_generator_are_warned_about_once():
    draws = net(lambda self, x: Net.forward(self, x + torch.rand(4, generator=torch.default_generator)))
    trainer = make_trainer(model=draws, callbacks=[recorder := Recorder()])
    for _ in range(2):
        trainer.fit(max_rounds=1)
    (message,) = recorder.of("message")
    assert "random numbers outside nn.Dropout" in message


def test_fresh_fit_into_a_folder_that_holds_a_run_is_refused_and_spoils_nothing(tmp_path):
    make_trainer(output_dir=tmp_path).fit(max_epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="already holds a run; give resume='auto'"):
        make_trainer(output_dir=tmp_path).fit(max_epochs=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_independent_learners_begin_apart_and_the_first_as_a_single_model_does():
    alone = make_trainer(model=lambda: nn.Linear(4, 3), num_learners=1)
    trainer = make_trainer(model=lambda: nn.Linear(4, 3), averaging=Independent())
    first, second = (trainer.run.bank.learner_state(learner)["weight"] for learner in range(2))
    assert torch.equal(first, alone.run.bank.learner_state(0)["weight"])
    assert not torch.equal(first, second)


def test_label_smoothing_of_targets_that_are_not_classes_is_refused():
    inputs, targets = blobs(40)
    probabilities = nn.functional.one_hot(targets, 3).float()
    make_trainer(train_data=(inputs, probabilities))
    with pytest.raises(UserError, match=r"label_smoothing=0\.1 is for outputs \[batch, classes\] with a class"):
        make_trainer(train_data=(inputs, probabilities), label_smoothing=0.1)


@pytest.mark.parametrize("what", ["test", "validation"])
def test_target_accuracy_of_a_task_without_one_is_refused_before_training(what):
    numbers = torch.zeros(8, 4), torch.zeros(8, 1)
    trainer = make_trainer(
        model=lambda: nn.Linear(4, 1), train_data=numbers, loss=nn.MSELoss(), **{f"{what}_data": numbers}
    )
    with pytest.raises(UserError, match=r"target_accuracy=0\.9 is for outputs \[batch, classes\]"):
        trainer.fit(max_epochs=1, target_accuracy=0.9)
    assert trainer.fit(max_epochs=1, target_loss=0.1).stop_reason in {"max_epochs", "target_loss"}


@pytest.mark.parametrize("what", ["test", "validation"])
def test_data_of_another_shape_than_the_training_data_is_refused_before_training(what):
    with pytest.raises(UserError, match=f"the model cannot take the {what} data, inputs of shape"):
        make_trainer(**{f"{what}_data": (torch.zeros(8, 5), torch.zeros(8, dtype=torch.int64))})


@pytest.mark.parametrize(
    ("shape", "precision", "remedy"),
    [
        ((5,), "fp32", "batch size that fit each other."),
        ((5,), "bf16", "batch size that fit each other, or precision=fp32."),
        ((3, 2, 2), "fp32", "batch size that fit each other, or, where a view fails, channels_last=false."),
    ],
)
def test_remedies_for_inputs_that_do_not_fit_are_those_that_may_help(shape, precision, remedy):
    data = torch.zeros(8, *shape), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(UserError, match=rf"; choose a model, data and a {remedy}$"):
        make_trainer(train_data=data, precision=precision)


def test_auto_precision_falls_back_to_fp32_where_the_model_cannot_compute_in_bf16(monkeypatch):
    single = net(lambda self, x: Net.forward(self, x) @ torch.eye(3))  # a float32 constant
    monkeypatch.setattr("crossbow_py.engine.modules.precision.has_fast_bf16", lambda device: True)
    recorder = Recorder()
    trainer = make_trainer(model=single, precision="auto", callbacks=[recorder])
    assert trainer.fit(max_rounds=1).summary.precision == "fp32"
    assert "precision is fp32, because in bf16" in recorder.of("message")[0]
    with pytest.raises(UserError, match=r"precision=fp32"):
        make_trainer(model=single, precision="bf16")


def test_restart_on_demand_takes_every_learner_to_the_average_model():
    trainer = make_trainer()
    trainer.fit(max_rounds=3)
    assert spread(trainer.run) > 0
    trainer.restart()
    assert spread(trainer.run) == 0


def test_resume_auto_starts_afresh_goes_on_and_needs_a_folder(tmp_path):
    folder = tmp_path / "run"
    first = make_trainer(output_dir=folder, resume="auto")
    first.fit(max_rounds=3)
    again = make_trainer(output_dir=folder, resume="auto")
    assert again.state.round_index == 3
    with pytest.raises(UserError, match="resume=auto goes on in output_dir, got none; set one"):
        make_trainer(resume="auto")


@pytest.mark.slow
def test_paths_beneath_the_home_folder_are_written_and_read_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_trainer(output_dir="~/run").fit(max_rounds=3)
    assert (tmp_path / "home" / "run" / "summary.json").is_file()
    assert make_trainer(resume="~/run").state.round_index == 3
    assert make_trainer(resume=Path("~/run/checkpoints")).state.round_index == 3
    assert make_trainer(output_dir="~/run", resume="auto").state.round_index == 3
    state = make_trainer(init_from="~/run/model.safetensors").run.bank.learner_state(0)
    written = load_file(tmp_path / "home" / "run" / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("key", ["output_dir", "resume", "init_from"])
@pytest.mark.parametrize("kind", [str, Path])
def test_path_of_an_unknown_user_is_refused_as_on_the_command_line(key, kind):
    said = f"{key}=~nobody-there/x is in the home folder of an unknown user; write the whole path."
    with pytest.raises(UserError) as given:
        make_trainer(**{key: kind("~nobody-there/x")})
    with pytest.raises(UserError) as typed:
        compose([f"{key}=~nobody-there/x"], TrainConfig)
    assert (str(given.value), str(typed.value)) == (said, said)


def test_resume_auto_after_a_kill_before_the_first_checkpoint_drops_what_was_recorded(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"samples_seen": 7}\n')
    make_trainer(output_dir=tmp_path, resume="auto").fit(max_epochs=1)
    assert [line["samples_seen"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [40]


def test_fit_with_test_images_of_nan_reports_them_and_reaches_no_target(tmp_path):
    inputs, _ = blobs(12)
    test_data = (torch.full_like(inputs, torch.nan), torch.zeros(12, dtype=torch.int64))
    recorder = Recorder()
    result = make_trainer(test_data=test_data, callbacks=[recorder], output_dir=tmp_path).fit(
        max_epochs=1, target_accuracy=0.9
    )
    assert (result.stop_reason, result.test_accuracy, result.summary.best_test_accuracy) == ("max_epochs", 0.0, 0.0)
    assert [record.num_non_finite for record in recorder.of("epoch")] == [12]
    assert read_summary(tmp_path)["num_non_finite"] == 12
    assert [said for said in recorder.of("message") if "not finite" in said] == [
        "test data after 40 samples: the outputs of 12 of 12 samples are not finite, which counts as wrong; look for "
        "NaN in these data, or for weights that have grown too large."
    ]


@pytest.mark.parametrize(
    ("damage", "kept", "warns"),
    [
        (lambda text: text + '{"epoch": 3, "sampl', 2, False),  # a kill while the third was written
        (lambda text: "#" + text[1:], 1, True),
        (lambda text: text.splitlines(keepends=True)[0], 1, True),
        (lambda text: "", 0, True),
    ],
)
def test_fit_resumed_beside_damaged_metrics_keeps_what_can_be_read_and_says_so(tmp_path, damage, kept, warns):
    make_trainer(output_dir=tmp_path).fit(max_epochs=2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(damage(metrics.read_text()))
    recorder = Recorder()
    make_trainer(output_dir=tmp_path, resume="auto", callbacks=[recorder]).fit(max_epochs=3)
    said = [message for message in recorder.of("message") if "metrics.jsonl" in message]
    assert len(read_metrics(metrics)) == kept + 1
    assert [f"what can be read of them is kept (lines: {kept})" in message for message in said] == [True] * warns


def test_fit_resumed_without_metrics_says_that_they_are_lost(tmp_path):
    make_trainer(output_dir=tmp_path).fit(max_epochs=1)
    (tmp_path / "metrics.jsonl").unlink()
    recorder = Recorder()
    make_trainer(output_dir=tmp_path, resume="auto", callbacks=[recorder]).fit(max_epochs=2)
    assert any("is damaged or has lost lines of earlier epochs" in message for message in recorder.of("message"))
    assert [line["epoch"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2]


@pytest.mark.parametrize("callbacks", [["mlflow"], "mlflow", [Listener], Listener()])
def test_callbacks_that_are_no_listeners_are_refused_at_once(callbacks: Any) -> None:
    with pytest.raises(UserError, match=r"callbacks must be a list of objects of .*; write it as callbacks=\[MLflow"):
        make_trainer(callbacks=callbacks)


def test_model_and_data_given_to_fit_are_sent_to_the_trainer() -> None:
    with pytest.raises(TypeError, match=r"fit\(\) takes keyword arguments alone.*Trainer\(model=\.\.\., train_data="):
        make_trainer().fit(nn.Linear(1, 1), [])  # type: ignore[misc]
