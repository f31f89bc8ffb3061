"""Probes under fake tensors, against the engine's own learning tasks with every live storage counted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import UserError
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import BF16, FP32, Precision
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.sizing.memory import Job, Sample, model_sizes
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.models import MODELS

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators returned and that are still referred to, and the most there were."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = weakref.ref(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if entry[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return returned


class FixedFeed(Feed):
    """Gives a new batch of one shape."""

    def __init__(self, sample: Sample, batch_size: int) -> None:
        super().__init__(num_samples=batch_size, batch_size=batch_size)
        self.sample = sample

    def batch(self, start: int) -> Batch:
        return Batch(*(tensor.zero_() for tensor in self.sample.batch(self.batch_size, channels_last=True)))

    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        raise NotImplementedError


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 9, 3),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(50, 400), nn.Tanh(), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 3))


MODELS_HERE = {"convolutions": (convolutions, (3, 10, 10)), "perceptron": (perceptron, (50,))}


def job(precision: Precision = FP32, loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy) -> Job:
    return Job(loss, SGD(weight_decay=1e-4), SMA(), precision)


def counted_peak(make_model: Callable[[], nn.Module], sample: Sample, batch_size: int, precision: Precision) -> int:
    """Of `RoundTasks.learn`, beyond the bank's own."""
    bank = ReplicaBank(make_model(), 1, device=CPU, precision=precision, state_names=("momentum",))
    tasks = RoundTasks(
        bank, update=TorchUpdate(SGD(), SMA()), feed=FixedFeed(sample, batch_size),  # type: ignore[arg-type]
        loss=nn.functional.cross_entropy, seed=0, collective=Collective(),
    )  # fmt: skip
    known = [rows.storage for rows in (bank.weights, bank.gradients, bank.buffers, bank.shadow)] + [bank.counters]
    outcome = RoundOutcome(Round(0, (0,), (0.1,), None))
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(known) as live:
            tasks.learn(0, outcome)
    finally:
        gc.enable()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS_HERE)
def test_activations_are_what_a_learning_task_holds_at_every_batch_size(name: str, precision: Precision) -> None:
    make_model, shape = MODELS_HERE[name]
    sample = Sample(shape, precision.compute)
    found = estimate_learner(make_model, sample, job(precision), most=500).activations
    for batch_size in (3, 24, 160):
        peak = counted_peak(make_model, sample, batch_size, precision)
        floor = sum(p.nbytes for p in make_model().parameters())  # the step of z makes one copy of the weights
        assert max(peak, floor) <= found.at(batch_size) <= 1.001 * max(peak, floor) + 64


def test_update_of_an_optimizer_that_works_on_copies_counts_when_batches_are_small() -> None:
    # AdamW's denominators are P values, and so is the step of z; the pass of two samples holds its P gradients and
    # little else.
    model = nn.Linear(1000, 1000, bias=False)
    adam = Job(nn.functional.cross_entropy, AdamW(), SMA(), BF16)
    found = estimate_learner(model, Sample((1000,), torch.bfloat16), adam, most=4).activations
    assert found.at(1) == 4 * 10**6


def test_update_that_orthogonalises_matrices_counts() -> None:
    # Newton–Schulz holds a matrix, a factor of its shape and its next iterate, beside the momentum to come, and
    # gradients may be autograd's.
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(3)))
    muon = Job(nn.functional.cross_entropy, Muon(), Independent(), BF16)
    found = estimate_learner(model, Sample((1000,), torch.bfloat16), muon, most=4).activations
    assert 28 * 10**6 <= found.at(1) <= 28.1 * 10**6


def test_probe_of_a_job_far_beyond_this_machine_takes_no_memory() -> None:
    sample = Sample((3, 1024, 1024))
    found = estimate_learner(lambda: nn.Conv2d(3, 4096, 3, padding=1), sample, _sums_up(), most=4096)
    assert found.predicted_bytes(4096, 1, 1) > 64 * 2**40
    assert found.predicted_bytes(1, 64, 64) > 2**40


def _sums_up() -> Job:
    return job(loss=lambda output, targets: output.sum())


def test_probe_leaves_the_model_and_the_generators_as_they_were() -> None:
    torch.manual_seed(5)
    model = convolutions()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    estimate_learner(model, Sample((3, 10, 10)), job(), most=64)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(p, torch._subclasses.FakeTensor) for p in model.parameters())


def test_probe_counts_tied_parameters_once_and_no_gradient_of_frozen_ones() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(100, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.second(self.first(x)))

    model = Tied()
    sizes = model_sizes(model, job())
    assert (sizes.num_values, sizes.num_frozen) == (100 * 100, 303)
    # Both parts of the tied weight's gradient, and their sum; of a few samples next to nothing.
    assert 120_000 < estimate_learner(model, Sample((100,)), job(), most=8).activations.at(2) < 122_000


def test_probe_of_a_model_that_reads_values_is_the_users_mistake_with_a_remedy() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * float(x.abs().max().item()))

    with pytest.raises(UserError, match=r"cannot be run by shapes alone.*leave memory away"):
        estimate_learner(Reads, Sample((4,)), job())


def test_model_that_cannot_be_made_is_the_users_mistake() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(UserError, match=r"cannot be made by shapes alone.*no such layer"):
        estimate_learner(broken, Sample((4,)), job())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mlp", (1, 28, 28)), ("lenet", (1, 28, 28)), ("resnet20", (3, 32, 32)), ("vgg16", (3, 32, 32)),
     ("resnet18", (3, 64, 64)), ("alexnet", (3, 224, 224)), ("resnet3d10", (3, 8, 32, 32))],
)  # fmt: skip
def test_probes_of_a_registered_model_run_the_same_operators_at_both_sizes(name: str, shape: tuple[int, ...]) -> None:
    found = estimate_learner(lambda: MODELS[name]().build(shape, 10), Sample(shape), job()).activations
    # Whole bytes a sample: lines of single moments, not chords of peaks that differ.
    assert all(line.per_sample == int(line.per_sample) and line.fixed >= 0 for line in found.lines)


def test_probe_with_a_torch_that_counts_otherwise_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crossbow_py.engine.sizing.tracker", None)  # as where torch has no such module
    job = Job(nn.functional.cross_entropy, SGD(), SMA(), FP32)
    with pytest.raises(UserError, match=r"memory cannot be counted with torch .*; install another version of torch"):
        estimate_learner(lambda: nn.Linear(4, 3), Sample((4,)), job, most=8)
