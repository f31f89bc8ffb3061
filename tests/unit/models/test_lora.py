"""Adapters over a frozen base: in packs they learn what PEFT's own model learns in a plain loop, and PEFT loads them.

What this alone catches: a scale or a rank that is another row's, and files that PEFT does not read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.helpers import rescale_adapter_scale
from safetensors.torch import load_file
from torch import Tensor, nn

from crossbow_py import SGD, LoRA, Member, Muon, Trainer, UserError, train_many
from crossbow_py.core.settings import to_mapping
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.models import MLP
from crossbow_py.models.lora import names_in_base
from crossbow_py.train import run_settings
from tests.thinned import thinned

TARGETS, HEAD = ("0", "2"), ("4",)


def base() -> nn.Module:
    """A small network that is the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data_of(count: int = 16) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=draws), torch.randint(0, 3, (count,), generator=draws)


def adapted(**options: Any) -> LoRA:
    return LoRA(base, **{"targets": TARGETS, "trained": HEAD, **options})


def with_new_head() -> nn.Module:
    """The same network, and a head that is drawn by the seed at hand."""
    return nn.Sequential(*base()[:4], nn.Linear(8, 3))


def by_peft(
    seed: int, rounds: int, rate: float, rank: int, alpha: int, make: Callable[[], nn.Module] = base
) -> dict[str, Tensor]:  # fmt: skip
    """What a plain loop over PEFT's model gives in float64, with all samples in each batch."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=[*TARGETS], modules_to_save=[*HEAD])
    model = peft.get_peft_model(make(), config).double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    inputs, labels = data_of()
    for _ in range(rounds):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("executor", thinned(["serial", "fused"], quick=[1], slow=[0]))
def test_adapters_of_other_ranks_and_scales_learn_in_one_pack_what_each_learns_by_peft(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    every = [(4, 8, 0.1), (4, 1, 0.1), (2, 8, 0.03), (3, 3, 0.1)]
    members = [
        Member(seed=seed, model=adapted(rank=rank, alpha=alpha), optimizer=SGD(learning_rate=rate))
        for seed, (rank, alpha, rate) in enumerate(every)
    ]  # fmt: skip
    results = train_many(base, data_of(), members=members, batch_size=16, max_epochs=50, executor=executor)
    assert sum("padded with zeros" in note for note in results.notes) == 1
    assert sum(note.startswith("Members of this model") for note in results.notes) == 1
    for seed, (rank, alpha, rate) in enumerate(every):
        expected, found = by_peft(seed, 50, rate, rank, alpha), results[seed].model.state_dict()
        assert found.keys() == expected.keys()
        assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-10
    one, other = results[0].state, results[1].state  # both have the memory of one base
    name = "base_model.model.0.base_layer.weight"
    assert one[name].data_ptr() == other[name].data_ptr()


def test_members_whose_new_heads_begin_apart_share_one_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT keeps the layer in whose place it trains a head: nothing reads that, so it is no base of its own."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    members = [
        Member(seed=n, model=LoRA(with_new_head, rank=r, alpha=4, targets=TARGETS, trained=HEAD), optimizer=SGD(0.1))
        for n, r in enumerate((2, 4, 2))
    ]
    results = train_many(with_new_head, data_of(), members=members, batch_size=16, max_epochs=20, executor="fused")
    assert sum("padded with zeros" in note for note in results.notes) == 1
    name = "base_model.model.0.base_layer.weight"
    assert len({own.state[name].data_ptr() for own in results}) == 1
    heads = set()
    for seed, rank in enumerate((2, 4, 2)):
        expected, found = by_peft(seed, 20, 0.1, rank, 4, with_new_head), results[seed].model.state_dict()
        trained = [name for name in expected if "original_module" not in name]
        assert max(float((found[name] - expected[name]).abs().max()) for name in trained) <= 1e-10
        heads.add(float(found["base_model.model.4.modules_to_save.default.weight"].sum()))
    assert len(heads) == 3


def test_bases_that_differ_from_seed_to_seed_are_said_to_be_held_by_each() -> None:
    drawn = LoRA(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), rank=2, targets=["0"])
    notes = train_many(drawn, data_of(), members=2, batch_size=4, max_epochs=1, executor="serial").notes
    assert sum(note.startswith("83 frozen values differ from trial to trial, and each holds its own") for note in notes)
    same = train_many(adapted(rank=2), data_of(), members=2, batch_size=4, max_epochs=1, executor="serial").notes
    assert not any("differ" in note for note in same)


def muon_by_hand(seed: int, rounds: int, rate: float, rank: int) -> dict[str, Tensor]:
    """Muon's equations over PEFT's model in float64, the orthogonalisation by singular values in NumPy."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base(), peft.LoraConfig(r=rank, lora_alpha=16, target_modules=[*TARGETS])).double()
    pairs = {name: own for name, own in model.named_parameters() if own.requires_grad}
    inputs, labels = data_of()
    momenta = {name: torch.zeros_like(own) for name, own in pairs.items()}
    for _ in range(rounds):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        for name, own in pairs.items():
            assert own.grad is not None
            momenta[name] = 0.95 * momenta[name] + own.grad
            u, s, vt = np.linalg.svd((own.grad + 0.95 * momenta[name]).numpy(), full_matrices=False)
            s = s / max(np.sqrt((s**2).sum()), 1e-7)  # B begins at zero, and so does the gradient of A
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            scale = max(1.0, own.shape[0] / own.shape[1]) ** 0.5
            own.data -= rate * scale * torch.from_numpy((u * s) @ vt)
    return {name: own.detach() for name, own in pairs.items()}


@pytest.mark.slow
def test_muon_steps_adapters_of_each_rank_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of its steps depends on the rank, so that of padded ones would be wrong: packs of their own."""
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP64)
    ranks = [1, 2, 1]
    members = [Member(seed=seed, model=adapted(rank=rank, trained=())) for seed, rank in enumerate(ranks)]
    found = train_many(
        base, data_of(), members=members, batch_size=16, max_epochs=20, executor="fused",
        optimizer=Muon(learning_rate=0.01),
    )  # fmt: skip
    assert not any("padded" in note for note in found.notes)
    for seed, rank in enumerate(ranks):
        expected, own = muon_by_hand(seed, 20, 0.01, rank), found[seed].model.state_dict()
        assert len(expected) == 4
        assert max(float((own[name] - expected[name]).abs().max()) for name in expected) <= 1e-10


@pytest.mark.parametrize("trained", [(), HEAD])
def test_muon_takes_both_matrices_of_every_adapter_and_no_head(trained: tuple[str, ...]) -> None:
    """In the model's order the first and the last weights are often those of adapters, which are no ends."""
    model = adapted(rank=2, targets=[own for own in ("0", "2", "4") if own not in trained], trained=trained)()
    layers = ("0", "2") if trained else ("0", "2", "4")
    assert Muon().matrices(model) == tuple(
        f"base_model.model.{layer}.lora_{matrix}.default.weight" for layer in layers for matrix in "AB"
    )


def test_member_is_saved_as_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    member = Member(seed=1, model=adapted(rank=3, alpha=7))
    model = train_many(base, data_of(), members=[member], batch_size=4, max_epochs=2, executor="serial")[0].model
    assert isinstance(model, peft.PeftModel)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert (loaded.peft_config["default"].r, loaded.peft_config["default"].lora_alpha) == (3, 7)
    inputs, _ = data_of()
    assert torch.equal(loaded.eval()(inputs), model(inputs))
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(merged(inputs), model(inputs))


def test_scale_is_its_buffer_in_copies_and_other_formats() -> None:
    model = adapted(rank=2, alpha=8, trained=())()
    with torch.no_grad():  # what begins at zero adds nothing
        next(own for name, own in model.named_parameters() if "0.lora_B" in name).fill_(0.1)
    inputs = data_of()[0].double()
    before = model.double()(inputs)
    again = copy.deepcopy(model).to(torch.float64)
    layer = next(own for name, own in again.named_modules() if name.endswith("model.0"))
    layer.adapter_scale.mul_(2)
    assert layer.scaling["default"] == 8 and torch.equal(model(inputs), before)
    moved = again(inputs)
    assert not torch.allclose(moved, before)
    layer.set_scale("default", 1.0)  # PEFT's own
    assert layer.adapter_scale == 4
    assert torch.equal(again(inputs), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "query"}, r"PEFT cannot put adapters into 'query' \(.*\); choose targets among .*: 0, 2, 4\.$"),
        ({"targets": ["0", "query"]}, r"targets has 'query', and the model no such layer; choose .*: 0, 2, 4\.$"),
        ({"trained": ["head"]}, r"trained has 'head', and the model no such layer; choose .*: 0, 2, 4\.$"),
        ({"rank": 9}, r"rank=9 is more than the matrix of 0 has, 8 by 6; take at most 6, or other targets\.$"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0.0}, "alpha must be"),
        ({"targets": []}, r"LoRA has no targets; name layers"),
    ],
)
def test_what_cannot_be_adapted_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        adapted(**options)()
    assert "\n" not in str(refused.value)


def test_rank_of_a_filter_is_bounded_by_all_values_of_an_output() -> None:
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 16, 3), nn.Flatten(), nn.Linear(16, 2))

    assert LoRA(images, rank=9, targets=["0"])()(torch.zeros(1, 1, 3, 3)).shape == (1, 2)
    with pytest.raises(UserError, match=r"the matrix of 0 has, 16 by 9; take at most 9"):
        LoRA(images, rank=10, targets=["0"])()


def test_other_adapters_beside_it_have_scales_of_their_own() -> None:
    model: Any = adapted(rank=2, alpha=8, trained=())()
    with torch.no_grad():
        next(own for name, own in model.named_parameters() if "0.lora_B" in name).fill_(0.1)
    inputs, _ = data_of()
    before = model(inputs)
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, target_modules=[*TARGETS]))
    layer = next(own for name, own in model.named_modules() if name.endswith("model.0"))
    assert dict(layer.scaling.items()) == {"default": 4, "other": 1} and [*layer.scaling.values()] == [4, 1]
    assert layer.scaling.get("none", 7) == 7
    assert torch.equal(copy.deepcopy(model)(inputs), before)
    with rescale_adapter_scale(model, 0.5):
        assert not torch.allclose(model(inputs), before)
    assert torch.equal(model(inputs), before)


def test_members_of_other_functions_of_one_form_are_not_taken_for_each_other() -> None:
    @dataclass(frozen=True)
    class Relu:
        width: int = 8

        def __call__(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, self.width), nn.ReLU(), nn.Linear(self.width, 3))

    class Tanh(Relu):
        def __call__(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    members = [Member(seed=1, model=Relu()), Member(seed=1, model=Tanh())]
    found = train_many(Relu(), data_of(), members=members, batch_size=4, max_epochs=1, executor="serial")
    assert [type(own.model.get_submodule("1")) for own in found] == [nn.ReLU, nn.Tanh]


def test_targets_are_standardized_only_where_it_is_asked_for_as_adapters_are_saved_without() -> None:
    inputs, _ = data_of()
    data = inputs, inputs.sum(1, keepdim=True) + 50
    call = {"batch_size": 4, "max_epochs": 1, "loss": nn.functional.mse_loss, "executor": "serial"}

    def one() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    lora = LoRA(one, rank=2, targets=["0"])
    found = train_many(lora, data, members=1, **call)[0].model
    assert not hasattr(found, "target_std")
    torch.testing.assert_close(copy.deepcopy(found).merge_and_unload()(inputs), found(inputs))
    assert hasattr(train_many(lora, data, members=1, standardize_targets=True, **call)[0].model, "target_std")


def test_running_statistics_of_the_base_stay_as_adapters_are_saved_without() -> None:
    def norms() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8)))

    model = LoRA(norms, rank=2, targets=["0"], trained=["3"])().train()
    assert [own.training for own in model.modules() if isinstance(own, nn.BatchNorm1d)] == [False, True, True]


def test_resume_with_another_scale_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_learners": 1, "executor": "serial", "tensorboard": False}
    Trainer(adapted(rank=2, alpha=16), data_of(), output_dir=tmp_path, **options).fit(max_epochs=1)
    with pytest.raises(UserError, match="is of another run"):
        Trainer(adapted(rank=2, alpha=2), data_of(), output_dir=tmp_path, resume="auto", **options)
    again = Trainer(adapted(rank=2, alpha=16), data_of(), output_dir=tmp_path, resume="auto", **options)
    assert again.state.samples_seen == 16


@pytest.mark.slow
def test_members_of_other_scales_are_other_members(tmp_path: Path) -> None:
    for alpha in (16, 2):
        found = train_many(
            adapted(rank=2, alpha=alpha), data_of(), members=1, batch_size=4, max_epochs=1, output_dir=tmp_path
        )
        assert found[0].state["base_model.model.0.adapter_scale"] == alpha / 2


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r'pip install "crossbow_py\[lora\]"'):
        adapted()()


def test_first_weights_are_those_of_a_file_of_the_base(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_learners": 1, "executor": "serial", "tensorboard": False}
    Trainer(base, data_of(), output_dir=tmp_path / "base", **options).fit(max_epochs=3)
    file = tmp_path / "base" / "model.safetensors"
    trainer = Trainer(adapted(rank=2), data_of(), init_from=file, output_dir=tmp_path / "adapters", **options)
    learned = load_file(file)
    state = trainer.run.bank.learner_state(0)
    for name, own in names_in_base(state).items():
        assert torch.equal(state[name], learned[own]), name
    trainer.fit(max_epochs=1)
    again = Trainer(adapted(rank=2), data_of(), init_from=tmp_path / "adapters" / "model.safetensors", **options)
    one, other = (each.run.bank.learner_state(0) for each in (trainer, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_settings_of_a_model_put_adapters_in_and_are_written_as_they_are_read() -> None:
    settings = MLP(hidden=(8,), lora={"rank": 2, "targets": "all-linear"})
    model = settings.make((1, 2, 2), 3)
    assert isinstance(model, peft.PeftModel) and model.peft_config["default"].r == 2
    assert to_mapping(settings)["lora"] == {"rank": 2, "targets": "all-linear"}
    assert not isinstance(MLP(hidden=(8,)).make((1, 2, 2), 3), peft.PeftModel)
    with pytest.raises(UserError, match=r"unknown key model\.lora\.rnk; did you mean 'model\.lora\.rank'"):
        MLP(lora={"rnk": 2})


def logits_of(folder: Path, inputs: Tensor, over: Any = base) -> Tensor:
    """What PEFT computes with a saved adapter over the base."""
    with torch.no_grad():
        found: Tensor = peft.PeftModel.from_pretrained(over(), folder).eval()(inputs)
    return found


def test_members_are_saved_in_folders_of_their_names_that_peft_loads(tmp_path: Path) -> None:
    members = [
        Member(name=f"rate/{rank}, {alpha}", model=adapted(rank=rank, alpha=alpha, save_merged=rank == 3))
        for rank, alpha in ((2, 4), (2, 9), (3, 7))
    ] + [Member(name="plain")]
    call: Any = {"batch_size": 4, "max_epochs": 3, "executor": "serial", "output_dir": tmp_path}
    inputs, _ = data_of()
    for _ in range(2):  # the second call trains nothing
        results = train_many(base, data_of(), members=members, **call)
        assert f"Adapters, as PEFT loads them, are in {tmp_path / 'adapters'}." in results.notes
        names = ["rate-2,-4", "rate-2,-9", "rate-3,-7"]
        assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == names
        with torch.no_grad():
            for name, result in zip(names, results, strict=False):
                assert torch.equal(logits_of(tmp_path / "adapters" / name, inputs), result.model(inputs))
        plain = base()
        plain.load_state_dict(load_file(tmp_path / "adapters" / names[2] / "merged.safetensors"))
        torch.testing.assert_close(plain(inputs), results[2].model(inputs))
        assert not (tmp_path / "adapters" / names[0] / "merged.safetensors").exists()
    modes = {path.stat().st_mode for path in (tmp_path / "adapters" / names[0]).iterdir()}
    assert len(modes) == 1  # others may read them


@pytest.mark.parametrize("averaging", ["sma", "independent"])
def test_a_run_saves_its_adapter_beside_its_weights(tmp_path: Path, averaging: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_learners": 2, "executor": "serial", "tensorboard": False}
    options |= {"averaging": averaging, "output_dir": tmp_path}
    inputs, _ = data_of()
    for epochs, resume in ((1, None), (2, "auto")):
        trainer = Trainer(adapted(rank=3, alpha=7, save_merged=True), data_of(), resume=resume, **options)
        result = trainer.fit(max_epochs=epochs)
        ends = [""] if averaging == "sma" else ["_0", "_1"]
        with torch.no_grad():
            for end, model in zip(ends, result.models or [result.model], strict=True):
                assert torch.equal(logits_of(tmp_path / f"adapter{end}", inputs), model(inputs))
                plain = base()
                plain.load_state_dict(load_file(tmp_path / f"adapter{end}" / "merged.safetensors"))
                torch.testing.assert_close(plain(inputs), model(inputs))
        assert not list(tmp_path.glob(".*partial"))


def test_what_an_adapter_would_lack_is_not_saved_as_one(tmp_path: Path) -> None:
    inputs, _ = data_of()
    data = inputs, inputs.sum(1, keepdim=True) + 50

    def one() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    train_many(
        LoRA(one, rank=2, targets=["0"]), data, members=1, batch_size=4, max_epochs=1, loss=nn.functional.mse_loss,
        standardize_targets=True, executor="serial", output_dir=tmp_path,
    )  # fmt: skip
    assert not (tmp_path / "adapters").exists()
    state = load_file(next(tmp_path.glob("members/*.safetensors")))
    assert {"target_std", "base_model.model.0.base_layer.weight"} <= state.keys()
