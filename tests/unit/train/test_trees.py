"""Inputs and outputs that are trees: dicts, tuples and named tuples of tensors, in every executor and feed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from crossbow_py import SGD, Augmentation, Collated, Independent, Trainer, UserError, model_loss
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.data.build import make_feed
from crossbow_py.data.sampler import epoch_order
from crossbow_py.data.streaming.items import ItemData
from crossbow_py.data.streaming.streamed_data import Key

SAMPLES, TOKENS, WORDS, CLASSES, BATCH = 48, 6, 20, 3, 8
EXECUTORS = ["serial", "threads", "fused", "fused_threads"]


class Outputs(NamedTuple):
    """As models of torchvision return them."""

    logits: Tensor
    aux: Tensor


class Reader(nn.Module):
    """Reads ids with a mask, and features."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.embedding, self.returns = nn.Embedding(WORDS, 8), returns
        self.features, self.head = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
        words = self.embedding(ids) * mask.unsqueeze(-1)
        hidden = words.sum(1) / mask.sum(1, keepdim=True) + self.features(features)
        scores = self.head(hidden.tanh())
        match self.returns:
            case "dict":
                return {"hidden": hidden, "logits": scores}
            case "named tuple":
                return Outputs(scores, hidden)
        return scores


def samples(form: str = "dict") -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)).float()
    features = torch.randn(SAMPLES, 4, generator=generator)
    targets = (ids[:, 0] + (features[:, 0] > 0)) % CLASSES
    inputs = (ids, mask, features) if form == "tuple" else {"ids": ids, "mask": mask, "features": features}
    return inputs, targets


class Items(Dataset[Any]):
    """The samples one by one, as mappings with labels, as Hugging Face has them, or as pairs."""

    def __init__(self, as_lists: bool = False, pairs: bool = False) -> None:
        self.inputs, self.targets = samples()
        self.as_lists, self.pairs = as_lists, pairs

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        own = {key: values[index].tolist() if self.as_lists else values[index] for key, values in self.inputs.items()}
        target = int(self.targets[index])
        return (own, target) if self.pairs else {**own, "labels": target}


class Trained(NamedTuple):
    """A trainer that has trained, and its average model's weights."""

    trainer: Trainer
    weights: dict[str, Tensor]


def trained(data: Any, executor: str = "serial", returns: str = "tensor", rounds: int = 6, **options: Any) -> Trained:
    options = {"num_learners": 2, "averaging": SynchronousSGD(), "model": lambda: Reader(returns), **options}
    trainer = Trainer(
        train_data=data, test_data=options.pop("test_data", data), batch_size=BATCH,
        optimizer=SGD(learning_rate=0.2, momentum=0.9), executor=executor, device="cpu", precision="fp32", seed=3,
        **options,
    )  # fmt: skip
    return Trained(trainer, dict(trainer.fit(max_rounds=rounds).model.named_parameters()))


def plain(rounds: int, loss: Any = F.cross_entropy, returns: str = "tensor") -> dict[str, Tensor]:
    """A loop of plain PyTorch over the batches that two learners who average gradients take."""
    torch.manual_seed(3)
    model = Reader(returns)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    inputs, targets = samples()
    order = torch.cat([torch.from_numpy(epoch_order(3, epoch, SAMPLES)) for epoch in range(3)])
    for taken in order[: rounds * 2 * BATCH].split(2 * BATCH):
        optimizer.zero_grad()
        loss(model(**{key: values[taken] for key, values in inputs.items()}), targets[taken]).backward()
        optimizer.step()
    return dict(model.named_parameters())


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, own in found.items():
        torch.testing.assert_close(own, expected[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_several_inputs_train_as_in_a_plain_loop(executor: str, form: str) -> None:
    assert_alike(trained(samples(form), executor).weights, plain(6))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("returns", ["dict", "named tuple"])
def test_losses_of_torch_take_the_logits_of_an_output(executor: str, returns: str) -> None:
    trainer, weights = trained(samples(), executor, returns)
    assert_alike(weights, plain(6))
    assert trainer.evaluate().accuracy is not None


def both(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], targets) + 0.01 * output["hidden"].square().mean()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_loss_of_ones_own_takes_all_of_an_output(executor: str) -> None:
    metrics = {"size": lambda output, _: output["hidden"].norm()}
    trainer, weights = trained(samples(), executor, "dict", loss=both, metrics=metrics)
    assert_alike(weights, plain(6, both, "dict"))
    found = trainer.evaluate()
    assert found.accuracy is not None and found.metrics["size"] > 0


class Backwards(Items):
    """Every other item has its entries in the other order, which means nothing."""

    def __getitem__(self, index: int) -> Any:
        own = super().__getitem__(index)
        return dict(reversed(own.items())) if index % 2 else own


DATA = {
    "a mapping of tensors": lambda: {**samples()[0], "labels": samples()[1]},
    "a TensorDataset": lambda: TensorDataset(*samples("tuple")[0], samples()[1]),
    "mappings with labels": Items,
    "mappings of lists": lambda: Items(as_lists=True),
    "pairs": lambda: Items(pairs=True),
    "mappings in another order": Backwards,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_sets_of_every_form_give_the_same_numbers(name: str, num_workers: int) -> None:
    assert_alike(trained(DATA[name](), num_workers=num_workers).weights, plain(6))


def test_members_of_an_ensemble_train_and_predict_on_several_inputs() -> None:
    trainer, _ = trained(samples(), "fused", averaging=Independent())
    assert trainer.evaluate().accuracy is not None


class Ragged(Items):
    """Every item has as many ids as it has words."""

    def __getitem__(self, index: int) -> Any:
        own = super().__getitem__(index)
        return {**own, "ids": own["ids"][: 1 + index % TOKENS]}


class Changing(Items):
    """Some items have features, others have none."""

    def __getitem__(self, index: int) -> Any:
        own = super().__getitem__(index)
        return own if index == 0 else {key: value for key, value in own.items() if key != "features"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Ragged(), r"cannot be stacked.*, or pad them: Collated\(dataset, collate\)\.$"),
        (Changing(), "cannot be stacked.*features.*return the same entries, of equal shape, or pad them"),
        ({"ids": torch.zeros(4, 2)}, "call the targets labels"),
        (({"ids": torch.zeros(4, 2), "mask": torch.zeros(3, 2)}, torch.zeros(4)), "as many inputs as targets"),
        ((*samples()[:1], samples()[1]), None),
    ],
)
def test_data_that_do_not_fit_are_refused(data: Any, says: str | None) -> None:
    if says is None:
        trained(data, rounds=1)
        return
    with pytest.raises(UserError, match=says):
        trained(data, rounds=8)


def test_items_of_a_chunk_with_other_entries_are_refused_by_name() -> None:
    keys = [Key(0, 0), Key(0, 5)]
    entries = r"\(\{features: \*, ids: \*, mask: \*\} and \{ids: \*, mask: \*\}\)"
    with pytest.raises(UserError, match=rf"items 0 and 5 .*{entries}"):
        ItemData(Changing()).fetch(keys, seed=0, training=True, on_sample=lambda _: None)


def test_inputs_that_the_model_does_not_take_are_refused() -> None:
    inputs, targets = samples()
    with pytest.raises(UserError, match=r"takes \(ids, mask, features\).*data has ids, .*, labels_of_words"):
        trained(({**inputs, "labels_of_words": inputs["ids"]}, targets))


def test_an_output_without_scores_needs_a_loss_of_ones_own() -> None:
    class Two(Reader):
        def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
            scores = super().forward(ids, mask, features)
            return scores, scores

    with pytest.raises(UserError, match="call it logits"):
        Trainer(model=Two, train_data=samples(), batch_size=BATCH)


def padded(items: list[Any], length: int | None = None) -> dict[str, Tensor]:
    """Stack items whose ids and masks are of different lengths, padded to the longest or to a length."""
    longest = length or max(len(item["ids"]) for item in items)
    ids, mask = torch.zeros(len(items), longest, dtype=torch.int64), torch.zeros(len(items), longest)
    for row, item in enumerate(items):
        ids[row, : len(item["ids"])], mask[row, : len(item["ids"])] = item["ids"], 1.0
    features, labels = (torch.stack([torch.as_tensor(item[key]) for item in items]) for key in ("features", "labels"))
    return {"ids": ids, "mask": mask, "features": features, "labels": labels}


class Cut(Items):
    """Every item has no more ids than its mask counts, as a tokenizer gives them."""

    def __getitem__(self, index: int) -> Any:
        own = super().__getitem__(index)
        own["ids"] = own["ids"][: int(own.pop("mask").sum())]
        return own


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_collate_of_ones_own_may_differ_in_shape(executor: str, num_workers: int) -> None:
    trainer, weights = trained(Collated(Cut(), padded), executor, num_workers=num_workers)
    assert_alike(weights, plain(6))  # what is padded is masked
    assert trainer.choices.executor in ("serial", "threads")
    with_masks, _ = trained(samples(), "serial")
    assert trainer.evaluate().loss == pytest.approx(with_masks.evaluate().loss, rel=1e-5)


def test_fused_learners_need_batches_of_one_shape() -> None:
    with pytest.raises(UserError, match="may differ in shape.*one_shape=True"):
        trained(Collated(Cut(), padded), "fused")
    data = Collated(Cut(), partial(padded, length=TOKENS), one_shape=True)
    assert_alike(trained(data, "fused").weights, plain(6))


@pytest.mark.slow
def test_independent_learners_are_evaluated_on_batches_of_any_shape() -> None:
    trainer, _ = trained(Collated(Cut(), padded), averaging=Independent(), learning_statistics=True)
    assert trainer.evaluate().accuracy is not None


def fails(items: list[Any]) -> Any:
    if len(items) > 1:
        raise ValueError("no room")
    return padded(items)


@pytest.mark.parametrize(
    ("collate", "says"),
    [
        (fails, "collate of the data set raised.*no room.*on 2 items"),
        (lambda items: ({"ids": "all of them"}, torch.zeros(len(items))), "must return tensors"),
        (lambda items: (torch.zeros(len(items) + 1, 2), torch.zeros(len(items))), "a row for each item"),
        (lambda items: torch.zeros(len(items), 2), r"must be \(input, target\)"),
    ],
)
def test_a_collate_that_makes_no_batch_is_refused(collate: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        trained(Collated(Cut(), collate))


class ReaderWithLoss(Reader):
    """Computes its loss from labels, as models of transformers do."""

    def forward(self, ids: Tensor, mask: Tensor, features: Tensor, labels: Tensor | None = None) -> Any:
        scores = super().forward(ids, mask, features)
        loss = None if labels is None else 2 * F.cross_entropy(scores, labels)
        return {"loss": loss, "logits": scores, "cache": (scores, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["pairs", "a mapping of tensors", "mappings of lists"])
def test_a_model_that_takes_labels_trains_on_the_loss_it_returns(executor: str, name: str) -> None:
    trainer, weights = trained(DATA[name](), executor, model=ReaderWithLoss)
    assert_alike(weights, plain(6, lambda scores, labels: 2 * F.cross_entropy(scores, labels)))
    found = trainer.evaluate()
    assert found.accuracy is not None
    reader, inputs, targets = Reader(), *samples()
    reader.load_state_dict(weights)
    assert found.loss == pytest.approx(2 * F.cross_entropy(reader(**inputs), targets).item(), rel=1e-5)


def test_a_loss_that_was_given_replaces_the_models_own() -> None:
    assert_alike(trained(samples(), model=ReaderWithLoss, loss=nn.CrossEntropyLoss()).weights, plain(6))


def test_collated_batches_reach_a_model_with_their_labels() -> None:
    found = trained(Collated(Cut(), padded), model=ReaderWithLoss, num_workers=1)
    assert_alike(found.weights, plain(6, lambda scores, labels: 2 * F.cross_entropy(scores, labels)))


class NoLoss(ReaderWithLoss):
    def forward(self, ids: Tensor, mask: Tensor, features: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": Reader.forward(self, ids, mask, features)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": model_loss}, "whose forward takes `labels`"),
        ({"model": ReaderWithLoss, "label_smoothing": 0.1}, "computes its loss itself"),
        ({"model": NoLoss}, "must return the loss"),
    ],
)
def test_a_loss_of_the_model_that_does_not_fit_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        trained(samples(), **options)


class Photographs(Dataset[Any]):
    """Images with features beside them."""

    def __init__(self, others: bool = True, shape: tuple[int, ...] = (3, 8, 8)) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randint(256, (20, 3, 8, 8), generator=generator, dtype=torch.uint8)
        self.features, self.targets = torch.randn(20, 4, generator=generator), torch.arange(20)
        self.others, self.small = others, torch.zeros(20, *shape, dtype=torch.uint8)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        image, target = self.images[index], int(self.targets[index])
        return (image, self.features[index], self.small[index], target) if self.others else (image, target)


@pytest.mark.parametrize("erases", [0.0, 0.5])
@pytest.mark.parametrize("is_resident", [True, False])
def test_images_among_several_inputs_are_augmented_as_alone(erases: float, is_resident: bool) -> None:
    augmentation = Augmentation(flip=True, random_erasing=erases)
    data, alone = Photographs(), Photographs(others=False)
    given: Any = (((data.images, data.features, data.small), data.targets), (alone.images, alone.targets))
    several, single = (
        make_feed(own, 8, 5, torch.device("cpu"), augmentation, mean=[0.5], std=[0.25], num_workers=0)
        for own in (given if is_resident else (data, alone))
    )
    for start in (0, 8, 16, 24):
        found, expected = several.batch(start), single.batch(start)
        assert torch.equal(found.inputs[0], expected.inputs)
        assert torch.equal(found.inputs[1], data.features[expected.targets])  # not normalised
        assert torch.equal(found.targets, expected.targets)
        together, alone_together = several.batches([start, start + 8]), single.batches([start, start + 8])
        assert torch.equal(together.inputs[0], alone_together.inputs)


def test_erasing_needs_streamed_images_of_one_size() -> None:
    with pytest.raises(UserError, match="of one size"):
        make_feed(Photographs(shape=(3, 4, 4)), 8, 5, torch.device("cpu"), Augmentation(random_erasing=0.5))


@dataclasses.dataclass
class Scored:
    """An output of fields, as newer libraries have them."""

    logits: Tensor
    hidden: Tensor | None = None


class ReturnsFields(Reader):
    def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
        return Scored(super().forward(ids, mask, features))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_may_be_dataclasses(executor: str) -> None:
    assert_alike(trained(samples(), executor, model=ReturnsFields).weights, plain(6))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"test_data": (torch.zeros(4, 2), torch.zeros(4).long()), "model": ReaderWithLoss},
            "the test data must have dicts of inputs",
        ),
        ({"test_data": {"ids": torch.zeros(4, 2)}}, "the test data must be tensors.*call the targets labels"),
        ({"metrics": {"size": lambda output, _: 1 / (len(output) - SAMPLES)}}, r"metrics\['size'\] fails on a batch"),
    ],
)
def test_what_does_not_fit_the_evaluation_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        trained(samples(), rounds=20, **options)


def test_data_whose_keys_are_no_words_are_refused() -> None:
    inputs, targets = samples()
    with pytest.raises(UserError, match=r"takes \(ids, mask, features\).*has 0, 1"):
        trained(({0: inputs["ids"], 1: inputs["mask"]}, targets))


def test_a_label_that_is_no_class_of_a_model_with_its_own_loss_is_refused() -> None:
    inputs, targets = samples()
    with pytest.raises(UserError, match="has the class 3, and the model tells 3 classes apart"):
        trained((inputs, torch.where(torch.arange(SAMPLES) == 20, 3, targets)), model=ReaderWithLoss)


class Late(Reader):
    """Looks up ids of which a view is made, after a layer of its own."""

    def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
        return super().forward(ids[:, :TOKENS], mask, features)


def with_unknown_id(place: int, form: str = "dict") -> tuple[Any, Tensor]:
    """Return the samples, of which the one that the first epoch takes at `place` has an id beyond the table."""
    inputs, targets = samples(form)
    ids = inputs["ids"] if form == "dict" else inputs[0]
    ids[epoch_order(3, 0, SAMPLES)[place], 2] = WORDS
    return inputs, targets


UNKNOWN_ID = r"the model's embedding embedding looks up id 20 of inputs\['ids'\] in a table of 20 rows, 0 to 19; "


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
@pytest.mark.parametrize("place", [4, SAMPLES - 1])  # in the first batch, but for its first samples, and in a later one
def test_an_id_that_no_embedding_has_is_named_in_training(executor: str, place: int) -> None:
    with pytest.raises(UserError, match=f"^{UNKNOWN_ID}") as raised:
        trained(with_unknown_id(place), executor, test_data=samples())
    assert raised.value.exit_code == 2
    assert raised.value.__cause__ is None  # in place of which a search would tell that


@pytest.mark.parametrize(("which", "sample"), [("training", 0), ("test", 0), ("test", SAMPLES - 1)])
def test_an_id_that_no_embedding_has_is_named_with_its_data(which: str, sample: int) -> None:
    inputs, targets = samples()
    inputs["ids"][sample, 2] = WORDS
    data = {"data": samples(), "test_data": samples()}
    data["data" if which == "training" else "test_data"] = inputs, targets
    with pytest.raises(UserError, match=f"^of the {which} data, {UNKNOWN_ID}") as raised:
        trained(**data)
    assert raised.value.exit_code == 2


def test_an_id_of_inputs_in_order_is_named_by_its_place_and_a_lone_tensor_not_at_all() -> None:
    with pytest.raises(UserError, match=r"looks up id 20 of inputs\[0\] in a table"):
        trained(with_unknown_id(4, "tuple"), model=Late)
    with pytest.raises(UserError, match="the model's embedding 0 looks up id -1 in a table of 5 rows"):
        trained(
            (torch.full((SAMPLES, 2), -1), torch.zeros(SAMPLES).long()),
            model=lambda: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, CLASSES)),
        )


def test_an_id_is_named_where_executors_are_measured_without_a_graph() -> None:
    data = Items()
    data.inputs["ids"][3, 0] = WORDS
    with pytest.raises(UserError, match=f"^{UNKNOWN_ID}"):
        trained(Collated(data, padded), "auto", test_data=samples())


def test_an_index_error_of_the_models_own_stays_as_it_is() -> None:
    class Fails(Reader):
        def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Any:
            scores = super().forward(ids, mask, features)
            return scores if self.training else [scores][int(len(ids) > 2)]

    with pytest.raises(IndexError, match="list index out of range"):
        trained(samples(), model=Fails)


class Swallows(ReaderWithLoss):
    """Takes further entries, as models of transformers do."""

    def forward(
        self, ids: Tensor | None = None, mask: Tensor | None = None, features: Tensor | None = None,
        labels: Tensor | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        if ids is None or mask is None or features is None:
            raise ValueError("ids are missing")
        return super().forward(ids, mask, features, labels)


def test_a_misspelt_entry_is_named_where_the_model_takes_any() -> None:
    inputs, targets = samples()
    renamed = {{"mask": "masks"}.get(key, key): own for key, own in inputs.items()}
    says = r"ids are missing\); its forward names no argument masks; did you mean 'mask'\?$"
    with pytest.raises(UserError, match=says):
        trained((renamed, targets), model=Swallows)


@pytest.mark.parametrize("which", ["training", "test"])
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (lambda own: own.index_fill(0, torch.tensor(0), 3), "sample 0 of the {} data has the class 3, and the model"),
        (lambda own: own.int(), r"the labels of the {} data are int32, and .*; give labels.long\(\)\.$"),
        (lambda own: own.float(), r"the labels of the {} data are float32, .*\.long\(\), or, for numbers, a model"),
    ],
)
def test_labels_of_which_a_model_cannot_compute_its_loss_are_named(which: str, labels: Any, says: str) -> None:
    inputs, targets = samples()
    data = {"data": samples(), "test_data": samples()}
    data["data" if which == "training" else "test_data"] = inputs, labels(targets)
    with pytest.raises(UserError, match=f"^{says.format(which)}"):
        trained(**data, model=ReaderWithLoss)


@pytest.mark.parametrize(
    "own",
    [
        {"metrics": {"size": lambda output, _: output.logits.norm()}},  # beside the model's own loss
        {"loss": lambda output, targets: F.cross_entropy(output.logits, targets)},
    ],
)
def test_a_function_that_takes_a_field_of_a_dict_is_told_how(own: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"'logits'\); the output is a dict, so take outputs\['logits'\]; "):
        trained(samples(), model=ReaderWithLoss, **own)
