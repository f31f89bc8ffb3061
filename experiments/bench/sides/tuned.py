"""The sides of one plain model: `default_loop` and `tuned_single`.

`default_loop` is what a tutorial teaches: float32, NCHW, every core on one model, a `DataLoader` over tensors. It is
spared the augmentation that the other sides pay for.

`tuned_single` is one model, as fast as a good engineer gets it without a compiler. Channels last, the data resident and
augmented as for `Trainer.fit`, gradients set to None, no `.item()` in the loop, freed memory kept by the allocator. The
rest is found by measuring: how many intra-op threads, torch's foreach or fused SGD, and where bfloat16 is fast which of
its two usual forms, autocast or bfloat16 weights with float32 masters and float32 BatchNorm.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Feed
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.modules.precision import cast_module, choose_precision
from experiments.bench.gate import Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Effort, Workload

Update = Callable[[], None]
_WARM_STEPS = 3
_ALL_COUNTS_UP_TO = 8
_SEED = 0
Step = Callable[[], None]


class Form(NamedTuple):
    """The form of a step. `arithmetic` is fp32, autocast or bf16 weights; `sgd` is foreach or fused."""

    arithmetic: str
    sgd: str


def forms(precision: str) -> list[Form]:
    arithmetics = ("fp32",) if precision == "fp32" else ("autocast", "bf16 weights")
    return [Form(*parts) for parts in itertools.product(arithmetics, ("foreach", "fused"))]


def default_loop(workload: Workload, gate: Gate) -> None:
    device = torch.device(workload.device)
    torch.set_num_threads(usable_cores())
    loader = DataLoader(TensorDataset(*workload.tensors()), workload.batch_size, shuffle=True, drop_last=True)
    model = workload.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    gate.ready(Ready(torch.get_num_threads()))
    running_loss = 0.0
    while True:
        for images, labels in loader:
            inputs = (images.to(device).float() / 255 - mean) / std
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            running_loss += loss.item()
            gate.tick(workload.batch_size)


def tuned_single(precision: str, workload: Workload, gate: Gate, effort: Effort) -> None:
    """Find the fastest form and thread count, then train with them for ever."""
    keep_freed_memory()
    torch.backends.cudnn.benchmark = True
    steps = {form: make_step(form, workload) for form in forms(precision)}
    counts = thread_counts(usable_cores()) if workload.device == "cpu" else [torch.get_num_threads()]
    form, threads = fastest(steps, counts, effort)
    torch.set_num_threads(threads)
    step = steps[form]
    del steps
    gate.ready(Ready(threads, " ".join(form)))
    while True:
        step()
        gate.tick(workload.batch_size)


def thread_counts(cores: int) -> list[int]:
    """Intra-op thread counts worth a try: every one of the first few, then powers of two, and all cores."""
    powers = (2**exponent for exponent in range(4, cores.bit_length()))
    return sorted({*range(1, min(cores, _ALL_COUNTS_UP_TO) + 1), *(power for power in powers if power <= cores), cores})


def fastest(steps: dict[Form, Step], counts: list[int], effort: Effort) -> tuple[Form, int]:
    """The (form, threads) with the highest rate in any of a few interleaved short windows.

    The best window counts and not the median, because load from elsewhere only ever makes one slower.
    """
    begun_s = time.perf_counter()
    rates = dict.fromkeys(itertools.product(steps, counts), 0.0)
    for trial in range(effort.trials):
        if trial and time.perf_counter() - begun_s > effort.trials_limit_s:
            break
        for form, threads in rates:
            torch.set_num_threads(threads)
            rates[form, threads] = max(rates[form, threads], _steps_per_s(steps[form], effort.trial_s))
    return max(rates, key=lambda choice: rates[choice])


def _steps_per_s(step: Step, seconds: float) -> float:
    """Rate over at least `seconds`, after a few steps to warm up; where steps are that long, after one."""
    warm, begun_s = 0, time.perf_counter()
    while warm == 0 or (warm < _WARM_STEPS and time.perf_counter() - begun_s < seconds):
        step()
        warm += 1
    _synchronize()
    count, begun_s = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begun_s < seconds:
        step()
        count += 1
    _synchronize()
    return count / (time.perf_counter() - begun_s)


def make_step(form: Form, workload: Workload) -> Step:
    device = torch.device(workload.device)
    model = workload.make_model().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    feed = make_feed(
        workload.tensors(), workload.batch_size, _SEED, device, workload.augmentation, workload.mean, workload.std,
        channels_last=True, dtype=torch.float32 if form.arithmetic == "fp32" else torch.bfloat16,
    )  # fmt: skip
    bf16_weights = form.arithmetic == "bf16 weights"
    update = bf16_update(model, form.sgd) if bf16_weights else plain_update(list(model.parameters()), form.sgd)
    batches = _Batches(feed)

    def step() -> None:
        inputs, labels = batches.next()
        with torch.autocast(device.type, torch.bfloat16, enabled=form.arithmetic == "autocast"):
            output = model(inputs)
        nn.functional.cross_entropy(output.float(), labels).backward()  # type: ignore[no-untyped-call]
        update()

    return step


class _Batches:
    """The feed's batches one after another, epoch after epoch."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._start = feed, 0

    def next(self) -> tuple[Tensor, Tensor]:
        batch = self._feed.batch(self._start)
        self._start += self._feed.batch_size
        return batch.inputs, batch.targets


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def plain_update(parameters: Sequence[Tensor], sgd: str) -> Update:
    """Steps the parameters by their `.grad`, and forgets it."""
    optimizer = _optimizer(parameters, sgd)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def bf16_update(model: nn.Module, sgd: str) -> Update:
    """Casts the model to bfloat16 (BatchNorm stays), and steps float32 masters of it, which are then copied back."""
    parameters: list[Tensor] = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    cast_module(model, choose_precision("bf16", masters[0].device))
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = _optimizer(masters, sgd)

    @torch.no_grad()
    def update() -> None:
        torch._foreach_copy_(gradients, [_gradient(parameter) for parameter in parameters])
        optimizer.step()
        torch._foreach_copy_(parameters, masters)
        for parameter in parameters:
            parameter.grad = None

    return update


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in the loss"
    return parameter.grad


def _optimizer(parameters: Sequence[Tensor], sgd: str) -> torch.optim.SGD:
    return torch.optim.SGD(
        list(parameters),
        LEARNING_RATE,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        foreach=sgd == "foreach",
        fused=sgd == "fused",
    )
