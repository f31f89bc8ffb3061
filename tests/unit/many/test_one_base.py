"""A base under many adapters is in a process once: while they train, when they have ended, and when they are loaded.

What this alone catches: copies that templates, banks and results would hold beside each other. Memory is counted by
what Python's collector knows of, apart from the package.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import LoRA, Member, Search, UserError, train_many
from crossbow_py.engine.bank.frozen_base import share_frozen

WIDTH, DEPTH = 70, 3  # no other matrix is of this size


def base() -> nn.Module:
    """Layers whose frozen matrices can be told from all else by their shape; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def adapted(rank: int = 2) -> nn.Module:
    return LoRA(base, rank=rank, targets=["0", "2"], trained=[str(2 * DEPTH)])()


def data_of(count: int = 24) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=draws), torch.randint(0, 3, (count,), generator=draws)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Have the collector look at what a test makes alone, which saves most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def num_matrices() -> int:
    """How many memories hold a matrix of the base's form."""
    gc.collect()
    found = [own for own in gc.get_objects() if type(own) in (Tensor, nn.Parameter)]
    return len({own.untyped_storage().data_ptr() for own in found if own.shape == (WIDTH, WIDTH)})


@pytest.mark.parametrize(
    ("count", "ranks", "executor"),
    [
        pytest.param(1, [2], "serial", marks=pytest.mark.slow),
        (4, [1, 2, 3], "fused"),
        pytest.param(4, [2], "fused", marks=pytest.mark.slow),
        pytest.param(16, [2], "fused", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(16, [1, 2, 3], "serial", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_adapters_of_any_number_and_rank_have_one_base(count: int, ranks: list[int], executor: str) -> None:
    members = [
        Member(seed=seed, model=LoRA(base, rank=ranks[seed % len(ranks)], targets=["0", "2"], trained=["6"]))
        for seed in range(count)
    ]
    before, seen = num_matrices(), list[int]()
    found = train_many(
        base, data_of(), data_of(), members=members, validation_data=data_of(), batch_size=8, max_epochs=1,
        executor=executor, max_pack_size=3, precision="fp32", progress=lambda _: seen.append(num_matrices() - before),
    )  # fmt: skip
    assert all(own.status == "finished" for own in found)
    assert set(seen) == {DEPTH}
    found.ensemble()
    assert num_matrices() - before == DEPTH
    one = found[0].model  # it may be merged or trained, so that its base is its own
    assert num_matrices() - before == 2 * DEPTH
    kept = {name: value.clone() for name, value in found[-1].state.items()}
    one.merge_and_unload()
    assert all(torch.equal(value, kept[name]) for name, value in found[-1].state.items())


def test_members_of_other_bases_have_each_its_own_and_those_of_one_share_it() -> None:
    def moved() -> nn.Module:
        model: Any = base()
        with torch.no_grad():
            model[4].weight[3, 5] += 1e-6
        return model

    before = num_matrices()
    members = [Member(seed=n, model=LoRA(own, targets=["0"])) for n, own in enumerate([base, base, moved, moved])]
    found = train_many(base, data_of(), members=members, batch_size=4, max_epochs=1, executor="serial")
    name = "base_model.model.4.weight"
    assert len({own.state[name].data_ptr() for own in found}) == 2
    assert not torch.equal(found[0].state[name], found[2].state[name])
    assert num_matrices() - before == DEPTH + 1


def test_results_of_a_folder_are_loaded_over_one_base_which_no_file_has(tmp_path: Path) -> None:
    call: Any = {"batch_size": 4, "max_epochs": 1, "executor": "serial", "output_dir": tmp_path}
    members = [Member(name=f"r{rank}", model=LoRA(base, rank=rank, targets=["0", "2"])) for rank in (2, 3, 2)[:2]]
    first = train_many(base, data_of(), members=members, **call)
    states = [{name: value.clone() for name, value in own.state.items()} for own in first]
    del first
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < WIDTH * WIDTH * 4
    before = num_matrices()
    again = train_many(base, data_of(), members=members, **call)
    assert num_matrices() - before == DEPTH
    for own, state in zip(again, states, strict=True):
        assert own.state.keys() == state.keys()
        assert all(torch.equal(own.state[name], value) for name, value in state.items())


@pytest.mark.slow
@pytest.mark.long
def test_trials_of_a_search_have_one_base() -> None:
    pytest.importorskip("optuna")
    before, seen = num_matrices(), list[int]()

    class Looks:
        """Counts while trials are trained; one that is described has a model of its own for that moment."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: seen.append(num_matrices() - before) if name == "on_progress" else None

    Search(
        adapted, data_of(90), data_of(), max_epochs=3, executor="serial", precision="fp32", listeners=[Looks()],
        space={"model.rank": [1, 2, 3], "batch_size": [2, 4]},
    ).run()  # fmt: skip
    assert set(seen) == {DEPTH}


class WritesLater(nn.Module):
    """Moves its frozen layer from the seventh pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(WIDTH, 4).requires_grad_(False), nn.Linear(4, 3)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)
        if self.passes > 6:
            with torch.no_grad():
                self.frozen.weight.mul_(0.9)
        found: Tensor = self.head(self.frozen(x))
        return found


@pytest.mark.slow
def test_a_base_that_is_written_later_ends_the_call_and_not_its_own_members_alone() -> None:
    def still() -> nn.Module:
        model = WritesLater()
        model.passes.fill_(-1000)
        return model

    members = [Member(model=own, batch_size=size) for own, size in ((still, 4), (WritesLater, 4), (still, 8))]
    with pytest.raises(UserError, match=r"writes its frozen parameter frozen\.weight, which all learners share"):
        train_many(still, data_of(), members=members, max_epochs=9, executor="serial", precision="fp32")


def test_values_are_shared_bit_by_bit_and_no_two_parameters_of_a_model_have_one_memory() -> None:
    def model() -> nn.Sequential:
        made = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2)).requires_grad_(False)
        made[2].requires_grad_(True)
        return made

    one, other = model(), model()
    with torch.no_grad():
        other[1].bias[0] = -0.0
    share_frozen(other, [one])
    share_frozen(other, [one, model()])
    own = [other[0].weight, other[1].weight, other[0].bias]
    theirs = [value.data_ptr() for value in one.parameters()]
    assert len({value.data_ptr() for value in own}) == 3 and all(value.data_ptr() in theirs for value in own)
    assert other[1].bias.data_ptr() not in theirs and other[2].weight.data_ptr() not in theirs
    copied = copy.deepcopy(other)
    copied[0].weight.data.fill_(7)
    assert float(copied[1].weight.sum()) == float(one[0].weight.sum()) == 4
