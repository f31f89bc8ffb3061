"""Members of one call: each is what it would be alone, on its own samples, to its own end, whatever is beside it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from crossbow_py import SGD, AdamW, Augmentation, Collated, Independent, Muon, Trainer, UserError
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.streaming.items import loaded
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.many.loop import ManyLoop
from crossbow_py.many.members import Fold, Member, folds
from crossbow_py.many.results import MemberResult, Results
from crossbow_py.many.train_many import train_many
from crossbow_py.packs import slots
from crossbow_py.train import run_settings
from crossbow_py.train.checks.seeded_model import seeded_model
from tests.thinned import thinned
from tests.trainers import blobs

DATA = blobs(60)
TEST = blobs(30)
EXECUTORS = ("serial", "threads", "fused")


def make(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


class Items(Dataset[Any]):
    """The blobs, item by item, in types that PyTorch's loaders take."""

    def __init__(self, count: int = 60) -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {"x": DATA[0][index % 60].numpy(), "ids": [index, 1], "labels": int(DATA[1][index % 60])}


class Images(Items):
    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return item["x"], item["labels"]


class Flipped(Images):
    """Some of whose items are turned round at random."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (-x if np.random.default_rng().random() < 0.1 else x), y


def train(members: Any, **given: Any) -> Results:
    options: dict[str, Any] = {"max_epochs": 2, "batch_size": 8, "optimizer": SGD(learning_rate=0.1, momentum=0.5)}
    options |= {"executor": "serial", "device": "cpu", "precision": "fp32", **given}
    return train_many(options.pop("model", make), options.pop("data", DATA), members=members, **options)


def alone(member: Member, data: tuple[Tensor, Tensor], seed: int = 0, epochs: float = 2) -> dict[str, Tensor]:
    """The member as a run of its own, of one learner."""
    trainer = Trainer(
        model=member.model or make, train_data=data, seed=seed, order_seed=member.order_seed or 0, num_learners=1,
        batch_size=member.batch_size or 8, averaging=Independent(), executor="serial", device="cpu", precision="fp32",
        optimizer=member.optimizer or SGD(learning_rate=0.1, momentum=0.5), sample_weights=member.sample_weights,
        augmentation=member.augmentation, label_smoothing=member.label_smoothing or 0.0,
    )  # fmt: skip
    return {**trainer.fit(max_epochs=epochs).model.state_dict()}


def subset(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    return DATA[0][list(ids)], DATA[1][list(ids)]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


HALF, BOOTSTRAP = list(range(0, 60, 2)), [5, 5, 5, 7, 8, 9, 10, 40, 41, 41, 59, 12]
KINDS = {
    "all": (Member(), DATA),
    "half": (Member(subset=HALF), subset(HALF)),
    "mask": (Member(subset=np.arange(60) % 2 == 0), subset(HALF)),
    "bootstrap": (Member(subset=BOOTSTRAP), subset(BOOTSTRAP)),
    "order": (Member(order_seed=7), DATA),
    "weights": (Member(subset=HALF, sample_weights=[1.0] * 15 + [0.0] * 15), subset(HALF)),
    "optimizer": (Member(subset=HALF, optimizer=SGD(learning_rate=0.01, weight_decay=0.1)), subset(HALF)),
    "mixup": (Member(augmentation=Augmentation(mixup=0.4)), DATA),
    "other mixup": (Member(subset=HALF, augmentation=Augmentation(mixup=2.0), label_smoothing=0.1), subset(HALF)),
}


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[2], slow=[0]))
def test_members_of_every_kind_are_what_they_are_alone(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bits; fused, in float64 after 56 rounds, to 1e-10."""
    if is_fused := executor == "fused":
        monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    epochs = 8 if is_fused else 2
    found = train([member for member, _ in KINDS.values()], executor=executor, max_epochs=epochs)
    for number, (member, data) in enumerate(KINDS.values()):
        own = {**found[number].model.state_dict()}
        assert_equal(own, alone(member, data, number, epochs), 1e-10 if is_fused else 0.0)


@pytest.mark.parametrize("executor", thinned(EXECUTORS, quick=[2], slow=[0]))
def test_members_that_wait_take_rows_as_they_come_free_and_disturb_none(executor: str) -> None:
    # Of different lengths, so that they leave one by one: seven on three rows, with idle rows at the end.
    members = [Member(subset=range(10 + 7 * n), max_epochs=1 + n % 3) for n in range(7)]
    rows: list[int] = []
    found = train(members, executor=executor, max_pack_size=3, progress=lambda loop: rows.append(len(loop.running)))
    assert 2 <= max(rows) <= 3 and len(rows) > 5
    for number, member in enumerate(members):
        expected = alone(member, subset(range(10 + 7 * number)), number, member.max_epochs or 0)
        assert_equal({**found[number].model.state_dict()}, expected, 0.0 if executor != "fused" else 1e-5)


def test_members_of_other_architectures_and_batch_sizes_train_in_packs_of_their_own() -> None:
    wide = partial(make, 9)
    members = [Member(), Member(model=wide), Member(model=wide, batch_size=4), Member(batch_size=4)]
    found = train(members)
    for number, member in enumerate(members):
        assert_equal({**found[number].model.state_dict()}, alone(member, DATA, number))


@pytest.mark.parametrize("data", [Images(), Collated(Images(), default_collate)])
def test_data_set_of_items_is_read_into_memory_and_has_subsets_of_rows(data: Any) -> None:
    found = train([Member(subset=HALF), Member()], data=data)
    expected = train([Member(subset=HALF), Member()])
    for own, other in zip(found, expected, strict=True):
        assert_equal({**own.model.state_dict()}, {**other.model.state_dict()})
    assert "All 60 samples of the training data were read into memory." in found.notes


def test_items_are_put_together_as_runs_do_and_read_once_but_for_some() -> None:
    items = Items(600)
    inputs, targets = loaded(items, 2**20)
    assert [own.shape for own in inputs.values()] == [(600, 2), (600, 4)] and targets.shape == (600,)
    assert inputs["ids"][599].tolist() == [599, 1] and targets[599] == DATA[1][59]
    assert items.reads == 600 + 2 * 64


def test_data_set_that_memory_does_not_hold_is_refused_before_it_is_read() -> None:
    items = Images(6000)
    with pytest.raises(UserError, match=r"the training data take .* GiB, and members learn from data in memory"):
        loaded(items, 1000)
    assert items.reads < 200


def test_makers_that_differ_only_as_objects_share_a_pack() -> None:
    packs: set[int] = set()
    members = [Member(model=partial(make, 9)) for _ in range(3)]
    train(members, progress=lambda loop: packs.add(loop.packs.count))
    assert packs <= {0, 1}


def test_muons_other_rates_follow_from_each_members_own() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    members = [Member(optimizer=Muon(learning_rate=rate)) for rate in (0.005, 0.05, 0.02)]
    serial, fused = (train(members, model=deep, executor=own, max_epochs=1) for own in ("serial", "fused"))
    for own, other in zip(serial, fused, strict=True):
        assert_equal({**own.model.state_dict()}, {**other.model.state_dict()}, 1e-3)


class Watch:
    """Stands in for `BusyCores`."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.stops = 0

    def after_round(self, images: int, num_learners: int, training_s: float) -> str:
        assert training_s > 0
        self.rounds.append((images, num_learners))
        return "Threads sleep." if len(self.rounds) == 3 else ""

    def stop(self) -> None:
        self.stops += 1


@pytest.mark.slow
def test_threads_of_the_only_pack_may_sleep_beside_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[Watch] = []
    monkeypatch.setattr(slots, "busy_cores", lambda executor, kind: watches.append(Watch()) or watches[-1])
    found = train([Member(subset=HALF), Member(subset=HALF)], max_epochs=1)
    (watch,) = watches
    assert watch.rounds == [(16, 2)] * 4 and watch.stops == 1 and "Threads sleep." in found.notes
    train([Member(), Member(batch_size=4)], max_epochs=1)  # two packs share the cores
    assert all(own.stops == 1 and {each for each, _ in own.rounds} <= {4, 8} for own in watches[1:])


# --- losses and metrics --------------------------------------------------------------------------------------------

LOSSES = {
    "mse": (nn.MSELoss(), (60, 3), torch.float32),
    "huber": (nn.HuberLoss(), (60, 3), torch.float32),
    "several labels": (nn.BCEWithLogitsLoss(), (60, 3), torch.float32),
    "own": (lambda output, targets: (output - targets).abs().mean(), (60, 3), torch.float32),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_any_loss_trains_as_a_plain_loop_does_and_is_measured(executor: str, loss: str) -> None:
    function, shape, dtype = LOSSES[loss]
    targets = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5).to(dtype)
    data = DATA[0], targets

    def linear() -> nn.Module:
        return nn.Linear(4, 3)

    found = train(
        [Member(subset=HALF), Member()], model=linear, data=data, test_data=data, loss=function, executor=executor,
        metrics={"mae": lambda output, targets: (output - targets).abs().mean()}, batch_size=10, max_epochs=3,
    )  # fmt: skip
    for number, ids in enumerate((HALF, list(range(60)))):
        torch.manual_seed(number)
        model = plain_loop(linear, function, data[0][ids], targets[ids], seed=number, order_seed=0, epochs=3)
        assert_equal({**found[number].model.state_dict()}, {**model.state_dict()}, 1e-5)
        with torch.no_grad():
            output = model(data[0])
        assert found[number].test_loss == pytest.approx(float(function(output, targets)), abs=1e-5)
        assert found[number].test_metrics["mae"] == pytest.approx(float((output - targets).abs().mean()), abs=1e-5)
        assert found[number].test_accuracy is None


def plain_loop(make: Any, loss: Any, inputs: Tensor, targets: Tensor, seed: int, order_seed: int, epochs: int) -> Any:
    """A PyTorch loop, with the order of samples alone from this package."""
    model = seeded_model(make, seed, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    order = np.concatenate([epoch_order(order_seed, epoch, len(targets)) for epoch in range(epochs + 1)])
    for round_index in range(math.ceil(epochs * len(targets) / 10)):
        ids = torch.from_numpy(order[10 * round_index : 10 * round_index + 10])
        optimizer.zero_grad()
        loss(model(inputs[ids]), targets[ids]).backward()
        optimizer.step()
    return model


# --- ends ----------------------------------------------------------------------------------------------------------


class ShiftsLabels(nn.Module):
    """A model of tokens that returns its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
                "logits": logits}  # fmt: skip


def test_losses_that_models_return_are_trained_by() -> None:
    ids = torch.randint(0, 9, (24, 5), generator=torch.Generator().manual_seed(0))
    data: Any = ({"input_ids": ids}, ids)
    found = train(2, model=ShiftsLabels, data=data, test_data=data, executor="serial")
    trainer = Trainer(
        ShiftsLabels, data, data, seed=1, order_seed=0, num_learners=1, batch_size=8, averaging=Independent(),
        executor="serial", device="cpu", precision="fp32", optimizer=SGD(learning_rate=0.1, momentum=0.5),
    )  # fmt: skip
    assert found[1].test_loss == trainer.fit(max_epochs=2).test_loss


def test_member_stops_by_its_own_patience_and_returns_its_best_weights() -> None:
    # One member learns; one diverges slowly from a start that is as good as it gets.
    members = [Member(optimizer=SGD(learning_rate=0.05)), Member(optimizer=SGD(learning_rate=3.0))]
    found = train(members, validation_data=TEST, test_data=TEST, patience=2, max_epochs=12)
    for result in found:
        values = [entry["validation_accuracy"] for entry in result.history]
        best = values.index(max(values))
        assert result.best_epoch == result.history[best]["epoch"]
        assert result.validation_accuracy == result.test_accuracy == values[best]  # both on the same samples
        stopped = len(values) - 1 - best >= 2
        assert result.status == ("stopped early" if stopped and len(values) < 12 else "finished")
        assert len(values) == 12 or len(values) - 1 - best == 2
        with torch.no_grad():
            right = (result.model(TEST[0]).argmax(1) == TEST[1]).float().mean()
        assert float(right) == pytest.approx(values[best])


def test_member_that_diverges_fails_alone_with_its_reason() -> None:
    found = train([Member(), Member(optimizer=SGD(learning_rate=1e30, momentum=0.0))])
    assert [each.status for each in found] == ["finished", "failed"]
    assert found[1].reason == "its loss or gradient is not finite"
    assert_equal({**found[0].model.state_dict()}, alone(Member(), DATA))
    with pytest.raises(UserError, match="member 1 has no model, as it failed: its loss or gradient is not finite"):
        _ = found[1].model
    assert "1 (failed)" in found.table()


def test_seeds_that_do_not_change_the_weights_are_told() -> None:
    made = make()
    for model, told in ((lambda: made, True), (make, False)):
        learners = Trainer(
            model=model, train_data=DATA, num_learners=2, averaging="independent", device="cpu", executor="serial"
        )
        for notes in (train(2, model=model).notes, learners.run.warnings):
            assert any("begin with the same weights" in note for note in notes) == told


def test_members_that_train_the_same_are_told() -> None:
    """Catches an interval of ± 0 of one model that is there twice."""
    members = [
        Member(seed=1),
        Member(seed=1),
        Member(seed=1, order_seed=3),
        Member(seed=1, subset=HALF),
        Member(seed=2),
    ]
    for own, said in ((members, True), (members[1:], False)):
        notes = train(own, max_rounds=1).notes
        assert any(note.startswith("Of 5 members 1 repeat the seed") for note in notes) == said


@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_row_that_diverges_once_its_member_has_ended_stops_nobody(executor: str) -> None:
    # The first grows without bound, and ends before it is not finite; its row goes on for nobody.
    wild = Member(optimizer=SGD(learning_rate=6.0, momentum=0.0), max_epochs=1)
    members = [wild, *(Member(optimizer=SGD(learning_rate=0.01), max_epochs=30) for _ in range(5))]
    data = DATA[0], DATA[0][:, :1]
    options: dict[str, Any] = {"model": partial(nn.Linear, 4, 1), "data": data, "loss": nn.MSELoss()}
    found = train(members, executor=executor, **options)
    assert [each.status for each in found][1:] == ["finished"] * 5
    apart = train([Member(seed=3, optimizer=SGD(learning_rate=0.01), max_epochs=30)], **options)
    assert_equal({**found[3].model.state_dict()}, {**apart[0].model.state_dict()}, 1e-5)


@pytest.mark.parametrize(("count", "size", "per_epoch"), [(65, 32, 2), (100, 11, 3), (30, 8, 4)])
def test_evaluations_within_epochs_come_once_each(count: int, size: int, per_epoch: int) -> None:
    data = blobs(count)
    found = train(1, data=data, validation_data=TEST, batch_size=size, evaluations_per_epoch=per_epoch, max_epochs=3)
    seen = [entry["samples"] for entry in found[0].history]
    due = [math.ceil(math.ceil(n * count / per_epoch) / size) * size for n in range(1, 3 * per_epoch + 1)]
    assert seen == list(dict.fromkeys(due))


def test_ctrl_c_keeps_what_has_ended_and_the_same_call_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    members = [Member(seed=n, subset=range(10 + 7 * n), validation=range(50, 60), max_epochs=3) for n in range(5)]
    options: dict[str, Any] = {"max_pack_size": 2, "optimizer": AdamW(learning_rate=0.01), "restore_best": True}
    whole = train(members, **options)

    def stop(loop: ManyLoop) -> None:
        if len(loop.results) >= 2 and loop.running:
            raise KeyboardInterrupt

    for _ in range(3):  # killed again and again, each time with somebody on the way
        try:
            train(members, **options, output_dir=tmp_path, checkpoint_every_s=1e-9, progress=stop)
        except KeyboardInterrupt:
            continue
    trained: list[int] = []
    found = train(members, **options, output_dir=tmp_path, progress=lambda loop: trained.append(loop.samples))
    for own, expected in zip(found, whole, strict=True):
        assert own.history == expected.history and own.status == "finished"
        assert_equal(dict(own.state), dict(expected.state))
    assert max(trained) < sum(3 * len(member.subset) for member in members[2:])  # type: ignore[arg-type]
    again = train(members[::-1], **options, output_dir=tmp_path)  # in whatever order
    assert again.images_per_s == 0
    assert_equal(dict(again[0].state), dict(whole[4].state))


def test_other_settings_in_the_same_folder_train_anew(tmp_path: Path) -> None:
    first = train([Member()], output_dir=tmp_path)
    other = train([Member(optimizer=SGD(learning_rate=0.3))], output_dir=tmp_path)
    assert first.images_per_s and other.images_per_s
    assert not train([Member()], output_dir=tmp_path).images_per_s
    assert train([Member()], output_dir=tmp_path, data=blobs(61)).images_per_s


@pytest.mark.slow
def test_models_losses_metrics_and_data_that_differ_in_what_no_name_shows_have_results_of_their_own(
    tmp_path: Path,
) -> None:
    """What a folder holds is of equal values and code; see `core.digest`."""

    class Scaled(nn.Linear):
        def __init__(self, scale: float) -> None:
            super().__init__(4, 3)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    flipped = DATA[0], DATA[1].clone()
    flipped[1][17] = (flipped[1][17] + 1) % 3
    calls: list[dict[str, Any]] = [
        {}, {"data": flipped}, {"test_data": blobs(31)}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))},
        {"loss": partial(nn.functional.cross_entropy, reduction="mean")},
        {"loss": lambda output, targets: nn.functional.cross_entropy(3 * output, targets)},
        {"loss": lambda output, targets: nn.functional.cross_entropy(2 * output, targets)},
        {"metrics": {"m": lambda output, targets: output.mean()}},
        {"metrics": {"m": lambda output, targets: output.amax()}}, {"seed": 1},
        {"model": partial(Scaled, 0.1)}, {"model": partial(Scaled, 5.0)}, {"schedule": "cosine"},
    ]  # fmt: skip
    options: dict[str, Any] = {"members": [Member()], "test_data": TEST, "output_dir": tmp_path}
    for count, given in enumerate(calls, 1):
        assert train(**{**options, **given}).images_per_s > 0
        assert len(list((tmp_path / "members").glob("*.json"))) == count
    for given in calls:  # and each is found again
        assert train(**{**options, **given}).images_per_s == 0


def test_member_that_failed_is_tried_again(tmp_path: Path) -> None:
    wild = [Member(), Member(optimizer=SGD(learning_rate=1e30, momentum=0.0))]
    assert [each.status for each in train(wild, output_dir=tmp_path)] == ["finished", "failed"]
    again = train(wild, output_dir=tmp_path)
    assert [each.status for each in again] == ["finished", "failed"] and again.images_per_s > 0


def test_balanced_sampling_draws_by_class_for_members_of_every_order() -> None:
    data = DATA[0], (torch.arange(60) > 50).long()
    members = [Member(), Member(order_seed=5), Member(subset=range(40, 60))]
    found = train(members, model=partial(nn.Linear, 4, 3), data=data, sampling="balanced")
    for number, (member, ids) in enumerate(zip(members, (range(60), range(60), range(40, 60)), strict=True)):
        trainer = Trainer(
            model=partial(nn.Linear, 4, 3), train_data=(data[0][list(ids)], data[1][list(ids)]), seed=number,
            order_seed=member.order_seed or 0, num_learners=1, batch_size=8, averaging=Independent(), device="cpu",
            executor="serial", precision="fp32", optimizer=SGD(learning_rate=0.1, momentum=0.5), sampling="balanced",
        )  # fmt: skip
        assert_equal({**found[number].model.state_dict()}, {**trainer.fit(max_epochs=2).model.state_dict()})


# --- folds and results ---------------------------------------------------------------------------------------------


def test_folds_hold_each_sample_out_once_and_share_out_classes() -> None:
    found = folds(DATA, 4)
    assert sorted(np.concatenate([fold.validation for fold in found])) == list(range(60))
    counts = torch.bincount(DATA[1])
    for train_ids, validation in found:
        assert sorted([*train_ids, *validation]) == list(range(60))
        held = torch.bincount(DATA[1][torch.from_numpy(validation)], minlength=3)
        assert all(abs(int(own) - int(count) / 4) < 1 for own, count in zip(held, counts, strict=True))
    assert [len(fold.validation) for fold in folds(10, 3)] == [4, 3, 3]
    assert all(np.array_equal(a.train, b.train) for a, b in zip(folds(DATA, 4), folds(DATA, 4), strict=True))
    assert not np.array_equal(folds(DATA, 4, seed=1)[0].train, found[0].train)
    of_arrays: Any = DATA[0].numpy(), DATA[1].numpy()  # not two samples
    assert all(np.array_equal(a.train, b.train) for a, b in zip(folds(of_arrays, 4), found, strict=True))


def test_out_of_fold_predictions_are_by_members_that_did_not_see_the_sample() -> None:
    members = [Member(seed=seed, subset=fold) for fold in folds(DATA, 3) for seed in range(2)]
    found = train(members)
    predictions = found.out_of_fold()
    assert predictions.shape == (60, 3)
    for number, fold in enumerate(folds(DATA, 3)):
        ids = torch.from_numpy(fold.validation)
        with torch.no_grad():
            both = [found[2 * number + seed].model(DATA[0][ids]).softmax(1) for seed in range(2)]
        torch.testing.assert_close(predictions[ids], (both[0] + both[1]) / 2)
        right = (both[0].argmax(1) == DATA[1][ids]).double().mean()
        assert found[2 * number].validation_accuracy == pytest.approx(float(right))
    partly = train([Member(subset=folds(DATA, 3)[0])]).out_of_fold()
    assert int(partly.isnan().any(1).sum()) == 40


def test_member_is_not_trained_on_what_it_is_measured_on() -> None:
    held = [0, 7, 8, 20]
    rest = [n for n in range(60) if n not in held]
    expected = alone(Member(), subset(rest))
    splits = [(np.array(rest), np.array(held)), (list(rest), list(held))]  # as those of scikit-learn
    members = [Member(seed=0, validation=held), *(Member(seed=0, subset=split) for split in splits)]  # type: ignore[arg-type]
    found = train(members)
    for each in found:
        assert_equal({**each.model.state_dict()}, expected)
        assert each.held_out == 4


def test_ensemble_of_shares_of_classes_and_of_ignored_classes_is_measured_as_its_members_are() -> None:
    shares = nn.functional.one_hot(TEST[1], 3).float() * 0.7 + 0.1
    ignoring = torch.where(torch.arange(30) < 15, TEST[1], -100)
    same = [Member(seed=0), Member(seed=0)]  # whose mean is each of them
    for targets in (shares, ignoring):
        found = train(same, test_data=(TEST[0], targets))
        together = found.ensemble() or {}
        assert together["loss"] == pytest.approx(found[0].test_loss, abs=1e-5)
        assert together.get("accuracy") == pytest.approx(found[0].test_accuracy)


def test_tokens_have_predictions_and_an_ensemble_too() -> None:
    ids = torch.randint(0, 9, (40, 6), generator=torch.Generator().manual_seed(0))
    data = ids[:, :-1], ids[:, 1:]

    def tokens() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    held = [1, 5, 6]
    found = train([Member(seed=0, validation=held), Member(seed=0, name="same", validation=held)], model=tokens,
                  data=data, test_data=data)  # fmt: skip
    predictions = found.out_of_fold()
    assert predictions.shape == (40, 5, 9)
    torch.testing.assert_close(predictions[held].sum(-1), torch.ones(3, 5))
    assert (found.ensemble() or {})["loss"] == pytest.approx(found[0].test_loss, abs=1e-5)


def test_table_has_a_line_a_member_a_group_and_the_mean_with_its_interval() -> None:
    members = [Member(name=f"{rate} {n}", group=f"rate {rate}", seed=n, optimizer=SGD(learning_rate=rate))
               for rate in (0.1, 0.2) for n in range(2)]  # fmt: skip
    right = {"right": lambda scores, targets: (scores.argmax(1) == targets).float().mean()}
    found = train(members, test_data=TEST, metrics=right)
    values = [each.test_accuracy or 0.0 for each in found]
    summary = found.summary()["test_accuracy"]
    assert summary.mean == pytest.approx(np.mean(values)) and summary.n == 4
    assert summary.half_width == pytest.approx(3.182 * np.std(values, ddof=1) / 2)
    assert found.groups()["rate 0.2"]["test_accuracy"].mean == pytest.approx(np.mean(values[2:]))
    lines = found.table().splitlines()
    assert [line.split("  ")[1] for line in lines[1:5]] == [each.name for each in found]
    assert lines[5].startswith("  mean of rate 0.1") and lines[-1].startswith("  mean of rate 0.2")  # not of both
    assert found.rows()[1]["name"] == "0.1 1" and "4 finished" in repr(found)
    together = found.ensemble()
    with torch.no_grad():
        mean = torch.stack([each.model(TEST[0]).softmax(1) for each in found]).mean(0)
    assert together is not None
    accuracy = float((mean.argmax(1) == TEST[1]).double().mean())
    loss = float(nn.functional.nll_loss(mean.log(), TEST[1]))
    assert together == pytest.approx({"accuracy": accuracy, "loss": loss, "right": accuracy})


def test_results_are_pickled_without_models_and_say_so() -> None:
    """Catches results of a model from a local function, which no process could be given."""

    def local() -> nn.Module:
        return make()

    found = train([Member(subset=fold) for fold in folds(DATA, 2)], model=local, test_data=TEST, max_rounds=1)
    assert found[0].model is not None
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found)
    assert_equal(dict(again[1].state), dict(found[1].state))
    for ask in (lambda: again[0].model, again.ensemble, again.out_of_fold):
        with pytest.raises(UserError, match="results that were pickled have figures and weights alone"):
            ask()


def test_only_members_that_have_ended_count_in_what_is_summed_up() -> None:
    """After Ctrl-C those on their way have weights and figures too."""
    ended = MemberResult("a", 0, "finished", 2.0, test_loss=1.0, state={"w": torch.zeros(1)})
    found = Results([ended, replace(ended, name="b", status="not finished", test_loss=9.0)], 10, 0.0, 0.0)
    assert found.summary()["test_loss"].n == 1 and [each.name for each in found.best_first()] == ["a"]
    assert "b (not finished)" in found.table() and "mean of 1" in found.table()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "members must be at least one, got none; give members=8 for eight seeds, or a list of Member."),
        (0, "members must be at least one, got none"),
        ([{"seed": 1}], r"members\[0\] must be a Member, got dict; Member\(seed=0\) is one."),
        ([Member(name="a"), Member(), Member(name="a")], "members has 2 of the name 'a'; give each its own."),
        ([Member(subset=[])], "member 0: subset must be places of training samples, 0 to 59, or 60 booleans, got"),
        ([Member(subset=[0.5])], "member 0: subset must be places"),
        ([Member(subset=[[1], [2, 3]])], "member 0: subset must be places"),  # type: ignore[list-item]
        ([Member(subset=[True] * 59)], "member 0: subset must be places"),
        ([Member(subset=np.arange(60) % 2)], "member 0: subset looks like a mask, 60 zeros and ones; give it as bool"),
        ([Member(validation=[1] * 60)], "member 0: validation looks like a mask"),
        ([Member(), Member(subset=[1, 60])], "member 1: subset has place 60, and there are 60 training samples, 0 to"),
        ([Member(subset=[-1])], "member 0: subset has place -1"),
        ([Member(validation=[3, 3])], "member 0: validation has place 3 2 times; give each once."),
        ([Member(subset=[1, 2, 3])], "member 0: batch_size=8 is more than its samples; choose at most 3."),
        ([Member(sample_weights=[1.0])], "member 0: sample_weights must be one number for each of the 60 training"),
        ([Member(sample_weights=[-1.0] * 60)], "member 0: sample_weights must be finite, not negative and not all 0"),
        ([Member(sample_weights=[0.0] * 60)], "member 0: sample_weights must be finite, not negative and not all 0"),
        ([Member(name="1"), Member()], "members has 2 of the name '1'; give each its own."),
        ([Member(validation=range(60))], "member 0: validation has every training sample, so that none is left"),
        ([Member(subset=[1, 2], validation=[2])], "member 0: place 2 is both in subset and in validation; measure on"),
        ([Member(max_epochs=-1)], "member 0: max_epochs must be greater than 0, got -1"),
        ([Member(max_epochs=math.inf)], "member 0: max_epochs must be"),
        ([Member(max_epochs=math.nan)], "member 0: max_epochs must be"),
        ([Member(batch_size="8")], "member 0: batch_size must be a whole number, got '8'"),  # type: ignore[arg-type]
        ([Member(batch_size=1.5)], "member 0: batch_size must be a whole number"),  # type: ignore[arg-type]
        ([Member(label_smoothing=2)], "member 0: label_smoothing must be"),
        ([Member(seed=-1)], "member 0: seed must be"),
        ([Member(seed=2**70)], "member 0: seed must be"),
        ([Member(order_seed="a")], "member 0: order_seed must be"),  # type: ignore[arg-type]
        ([Member(augmentation=Augmentation(cutmix=0.2))], "member 0: data.cutmix=0.2 is for images"),
        ([Member(augmentation=3)], "member 0: augmentation must be an Augmentation, got 3."),  # type: ignore[arg-type]
        ([Member(optimizer="adam")], "member 0: optimizer has no 'adam'; did you mean 'adamw'?"),
        ([Member(schedule=0.1)], "member 0: schedule must be an object or a name"),  # type: ignore[arg-type]
        (2.5, "members must be a number or a list of Member, got 2.5."),
        ([Member(subset=Fold(np.arange(30), np.arange(30, 61)))], "member 0: validation has place 60"),
    ],
)
def test_members_that_cannot_be_are_refused_by_name(members: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(members)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_epochs": 0}, "max_epochs"),
        ({"patience": 0}, "patience"),
        ({"patience": 2}, "patience and restore_best go by evaluations, got neither validation_data nor members with"),
        ({"max_pack_size": 0}, "max_pack_size must be at least 1, got 0"),
        ({"max_pack_size": "8"}, "max_pack_size must be at least 1, got 8"),
        ({"batch_size": 0}, "batch_size"),
        ({"loss": nn.MSELoss(), "label_smoothing": 0.1}, "member 0: label_smoothing is for cross-entropy, got another"),
        ({"loss": nn.MSELoss()}, "the loss cannot take the model's output"),
        ({"data": [(torch.zeros(4 + n % 2), 0) for n in range(300)]}, "samples of the data set cannot be stacked"),
        ({"data": [(torch.zeros(4 + (n == 299)), 0) for n in range(300)]}, "cannot be stacked"),
        ({"data": Flipped()}, "is another one when it is read again, as by a random transform"),
        ({"data": (DATA[0].numpy(), DATA[1].numpy().astype(str))}, r"<U21\); give .* names of classes as np.unique"),
        ({"data": (DATA[0].numpy(), DATA[1].numpy().astype("i4"))}, r"got int32; .* or an array as y.astype\("),
        ({"test_data": (torch.zeros(5, 7), torch.zeros(5).long())}, "the model cannot take the test data, inputs"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(2, **given)


def test_unknown_argument_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'; did you mean max_epochs=..."):
        train(2, epochs=3)

    with pytest.raises(TypeError, match=r"'lr'; did you mean optimizer=SGD\(learning_rate=...\)?"):
        Member(lr=0.1)  # type: ignore[call-arg]


def test_numbers_of_numpy_are_taken_as_pythons_are(tmp_path: Path) -> None:
    """Catches a loop over np.arange that is refused, or that is not found again by the same numbers of Python's."""
    numbers: list[Any] = [*np.arange(2)]
    sizes: Any = {"batch_size": np.int32(8), "max_epochs": np.float32(2)}
    own = [Member(seed=s, order_seed=s, **sizes) for s in numbers]
    found = train(own, output_dir=tmp_path, optimizer=SGD(learning_rate=np.float32(0.5)))  # type: ignore[arg-type]
    plain = [Member(seed=s, order_seed=s, max_epochs=2) for s in range(2)]
    again = train(plain, output_dir=tmp_path, optimizer=SGD(learning_rate=0.5))
    assert found.images_per_s > 0 and again.images_per_s == 0
    assert [type(each.seed) for each in found] == [int, int]
    assert len(folds(np.int64(9), np.int64(3))) == 3 and len(train(np.int64(2), max_rounds=1)) == 2  # type: ignore[arg-type]


def test_folds_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="folds must be between 2 and the 60 training samples, got 1"):
        folds(DATA, 1)
    with pytest.raises(UserError, match="folds=2: class 7 has a single sample, which the fold that holds it out would"):
        folds((DATA[0][:3], torch.tensor([0, 0, 7])), 2)
