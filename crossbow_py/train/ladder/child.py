"""The child process of a rung: trains a small model as it is told, and compares it with `serial`.

    python -m crossbow_py.train.ladder.child TASK RESULT      TASK is a `Task` in JSON, RESULT the file to write

Without arguments it imports what training needs, and waits for them on its stdin, see `ReadyChildren`.
Variants of the kernels that the task names are launched first (`variants.py`). The model has convolutions, BatchNorm
and a linear layer, in one variant also dropout. Three learners take nine rounds: two eager ones, a capture, and
replays; learning rates change, and images are cropped and flipped.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from crossbow_py.averaging import SMA, SynchronousSGD
from crossbow_py.core.errors import one_line
from crossbow_py.core.files import replacing
from crossbow_py.core.switches import KERNELS
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.distributed.launch import end_with_parent
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.device.graphs import CudaStreams, WaitBetween
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.modules.precision import choose_device
from crossbow_py.engine.trust import GRAPHS, why_not
from crossbow_py.engine.update.optimizers import SGD, Muon
from crossbow_py.telemetry.events import EpochRecord, Listener
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.ladder.rungs import Job, Task
from crossbow_py.train.ladder.variants import PRECISIONS, failure_of, variants
from crossbow_py.train.schedules import Constant
from crossbow_py.train.trainer import Trainer

LEARNERS, BATCH, ROUNDS, SAMPLES = 3, 6, 9, 54
_WAITS, _LATE_CYCLES = 4, 10_000_000  # replays of a graph that waits, and for how much of the clock: some 5 ms
_MIDDLE = 5  # a round after the capture, and within an epoch
_FULL_DISK = os.strerror(errno.ENOSPC)
_IMPORTED_LATE = "torch._dynamo", "torch.export", "torch._functorch.aot_autograd", "triton"
_BUSY = 46  # cudaErrorDevicesUnavailable: another process has the device to itself
State = dict[str, Tensor]


class _Messages(Listener):
    """Collects messages and training losses."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.losses: list[float] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)

    def on_epoch(self, record: EpochRecord) -> None:
        self.losses.append(record.train_loss)


@dataclass(frozen=True)
class _Trained:
    """The state of a bank on the host in float64, before and after; training losses by epoch, and messages."""

    start: State
    state: State
    losses: Sequence[float]
    messages: Sequence[str]


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images as a map-style data set, for worker processes."""

    def __init__(self) -> None:
        self._images, self._labels = images()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], int(self._labels[index])


def images() -> tuple[Tensor, Tensor]:
    """Return uint8 images `[N, 3, 5, 5]` of noise, brighter with the class, and the classes `[N]` of five."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % 5
    noise = torch.randint(0, 130, (SAMPLES, 3, 5, 5), generator=generator)
    return (noise + 30 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels


class Model(nn.Module):
    """A convolution, a residual one, both with BatchNorm, and a linear layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv, self.last = nn.Conv2d(10, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(10, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores `[B, 5]` of images `[B, 3, 5, 5]`."""
        own = self.norm(self.stem(inputs)).relu()
        own = (self.last(self.conv(own)) + own).relu()
        scores: Tensor = self.head(self.dropout(own.mean((2, 3))))
        return scores


def trainer(
    executor: str, device: str, precision: str, dropout: float = 0.0, listener: Listener | None = None, **own: Any
) -> Trainer:
    """Return the trainer of a small model; what follows from seeds is the same for every executor and device."""
    return Trainer(
        **{
            "model": partial(Model, dropout), "train_data": images(), "batch_size": BATCH, "num_learners": LEARNERS,
            "optimizer": SGD(learning_rate=0.05, momentum=0.9, weight_decay=1e-3), "averaging": SMA(),
            "schedule": Constant(warmup_epochs=1.0), "augmentation": Augmentation(crop_padding=1, flip=True),
            "executor": executor, "device": device, "precision": precision, "num_workers": 0,
            "callbacks": [listener] if listener else [], **own,
        }
    )  # fmt: skip


def _train(executor: str, device: str, precision: str, dropout: float = 0.0, **own: Any) -> _Trained:
    listener = _Messages()
    built = trainer(executor, device, precision, dropout, listener, **own)
    start = state_of(built)
    built.fit(max_rounds=ROUNDS)
    return _Trained(start, state_of(built), listener.losses, listener.messages)


def _serial(task: Task, precision: str, dropout: float = 0.0, device: str = "", **own: Any) -> _Trained:
    """Return what `serial` gives; without options of its own it is kept for the children of other rungs."""
    device = device or task.device
    path = Path(task.kept) / f"serial_{device}_{precision}_{dropout}.pt"
    if task.kept and not own and path.exists():
        return _Trained(**torch.load(path))
    found = _train("serial", device, precision, dropout, **own)
    if task.kept and not own:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            torch.save(vars(found), partial)
    return found


def state_of(built: Trainer) -> State:
    """Return the weights and buffers of all learners, and z, on the host in float64."""
    bank = built.run.bank
    found = {f"z.{name}": value for name, value in bank.z.shaped().items()}
    for learner in range(bank.num_learners):
        own = {**bank.weights.shaped(learner), **dict(bank.module(learner).named_buffers())}
        found |= {f"{learner}.{name}": value for name, value in own.items() if value.is_floating_point()}
    return {name: value.detach().to("cpu", torch.float64, copy=True) for name, value in found.items()}


def difference(found: State, expected: State, start: State) -> float:
    """Return the norm of the differences, relative to how far `expected` is from `start`; NaN where numbers are."""

    def norm(of: State, minus: State) -> float:
        return float(torch.stack([(of[name] - minus[name]).square().sum() for name in expected]).sum().sqrt())

    return norm(found, expected) / norm(expected, start)


def _compare(found: _Trained, expected: _Trained, precision: str, allowed: float) -> str:
    """Return how the numbers differ, on one line; empty if they agree."""
    own = difference(found.state, expected.state, expected.start)
    if not own <= allowed:
        return f"numbers in {precision} differ by {own:.1e} of how far the weights went ({allowed:.0e} are allowed)"
    for epoch, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(loss - other) <= allowed * abs(other):
            return f"the loss of epoch {epoch} in {precision} is {loss:.6g}, and {other:.6g} by serial"
    return ""


def _fell_back(found: _Trained, expected: _Trained, switched_off: Sequence[str]) -> str:
    """Return a message of a run that `serial` has not given: that it did otherwise than it was told.

    `switched_off` has the reasons that switches give, which it is told to follow.
    """
    new = [message for message in found.messages if message not in expected.messages]
    message = next((each for each in new if not any(reason in each for reason in switched_off)), "")
    return message.partition(", which is slower, because ")[2] or message  # what is told of runs begins in the same way


def tried(task: Task) -> str:
    """Do a task, and return why it failed, on one line; empty if it passed."""
    jobs: dict[Job, Callable[[Task], str]] = {
        "train": _by_executor, "graphs": _by_graphs, "muon": _by_muon, "sum": _sum, "ranks": _by_ranks,
        "streamed": _streamed, "resume": _resumed,
    }  # fmt: skip
    return _by_variants(task) or jobs[task.job](task)


def _by_variants(task: Task) -> str:
    """Launch the variants of the task's kernels, and return why the first that failed did, by its name."""
    device = choose_device("cuda" if task.device == "cuda" else "cpu")
    for kernels, name in itertools.product(task.kernels, task.tolerance):
        for variant in variants(kernels, device, PRECISIONS[name]):
            print(variant.name, flush=True)  # the last one in the log is what hung or ended the process
            if reason := failure_of(variant):
                return reason
    return ""


def _by_executor(task: Task) -> str:
    if task.executor == "serial":
        return next(filter(None, (_by_serial(task, *each) for each in task.tolerance.items())), "")
    variants = [(precision, 0.0) for precision in task.tolerance] + ([("fp32", 0.3)] if task.dropout else [])
    return next(filter(None, (_against_serial(task, *each) for each in variants)), "")


def _by_serial(task: Task, precision: str, allowed: float) -> str:
    """Compare `serial` in float32 with that on the CPU, and in other precisions with that in float32."""
    where = "cpu" if precision == "fp32" else task.device
    expected = _serial(task, "fp32", device=where)
    return _compare(_serial(task, precision), expected, precision, allowed)


def _against_serial(task: Task, precision: str, dropout: float, num_workers: int = 0, **own: Any) -> str:
    """Return how a run differs from that of `serial`, or that it did not do as it was told; empty if all is well."""
    expected = _serial(task, precision, dropout, **own)
    found = _train(task.executor, task.device, precision, dropout, num_workers=num_workers, **own)
    different = _compare(found, expected, precision, task.tolerance[precision])
    if different or task.device != "cuda" or task.job not in ("train", "graphs"):
        return different
    device = choose_device("cuda")
    return _fell_back(found, expected, [reason for each in (*KERNELS, GRAPHS) if (reason := why_not(each, device))])


def _by_graphs(task: Task) -> str:
    return _by_waits(choose_device("cuda")) or _by_executor(task)


def _by_waits(device: torch.device) -> str:
    """Replay a graph that waits midway for another stream, as those of `streams` do for averaging.

    The other stream is late with every value, and waits for the graph that is to see the one before: a graph that did
    not wait would see too early a value, and one that waited for a later record would never end.
    """
    streams = CudaStreams(device)
    own, other = streams.new_stream(), streams.new_stream()
    written, seen = streams.new_event(for_graphs=True), streams.new_event()
    given, copied, started = (torch.zeros((), device=device) for _ in range(3))
    results = torch.zeros(_WAITS, device=device)

    def begin() -> None:
        started.add_(1)

    def copy() -> None:
        copied.copy_(given)

    body = WaitBetween(streams, own, begin, written, copy)
    graph = streams.capture("what waits", body, own, streams.new_pool())
    for number, result in enumerate(results):
        with torch.cuda.stream(other):
            torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
            given.fill_(number + 1)
        streams.record(written, other)
        streams.replay(graph, own)
        streams.run("what it saw", partial(result.copy_, copied), own)
        streams.record(seen, own)
        streams.wait(other, seen)
    streams.synchronize()
    found = results.tolist()
    return "" if found == [*range(1, _WAITS + 1)] else f"graphs that wait for another stream saw {found} of its values"


def _by_muon(task: Task) -> str:
    """Train with Muon: `serial` against that on the CPU, then, with averaged gradients, the executor against it."""
    own: dict[str, Any] = {"optimizer": Muon(normalize_weights=True), "averaging": SynchronousSGD()}
    for precision, allowed in task.tolerance.items():
        found, expected = (_train("serial", device, precision, **own) for device in (task.device, "cpu"))
        reason = _compare(found, expected, precision, allowed) or _against_serial(task, precision, 0.0, **own)
        if reason:
            return reason
    return ""


def _streamed(task: Task) -> str:
    """Train on data from worker processes, which on CUDA a stream of their own copies."""
    own = {"augmentation": Augmentation(flip=True), "train_data": Samples()}
    found = (_against_serial(task, precision, 0.0, num_workers=2, **own) for precision in task.tolerance)
    return next(filter(None, found), "")


def _resumed(task: Task) -> str:
    """Train with a checkpoint in between, from which another trainer goes on."""

    def train(precision: str) -> State:
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"output_dir": folder, "checkpoint": CheckpointSettings(every_epochs=None)}
            trainer(task.executor, task.device, precision, 0.3, None, **options).fit(max_rounds=_MIDDLE)
            built = trainer(task.executor, task.device, precision, 0.3, None, resume="auto", **options)
            built.fit(max_rounds=ROUNDS - _MIDDLE)
            return state_of(built)

    for precision, allowed in task.tolerance.items():
        expected = replace(_serial(task, precision, 0.3), losses=[])
        if reason := _compare(replace(expected, state=train(precision)), expected, precision, allowed):
            return reason
    return ""


def _sum(task: Task) -> str:
    """All-reduce vectors in a group of one rank, on CUDA on a stream of its own, as averaging does."""
    device = choose_device("cuda" if task.device == "cuda" else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):  # which does nothing for None
            for size in (1, 1_000, 1_000_003):
                values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device)
                summed = values.clone()
                torch.distributed.all_reduce(summed)
                if not torch.equal(summed, values):
                    return f"a sum of {size:,} numbers over one rank is not these numbers"
    finally:
        torch.distributed.destroy_process_group()
    return ""


def _by_ranks(task: Task) -> str:
    """Train on all ranks that torchrun has started; the first compares with `serial` of all learners on one device."""
    with joined(device="cuda" if task.device == "cuda" else "cpu") as ranks:
        reason = ""
        for precision, allowed in task.tolerance.items():
            found = _train(task.executor, task.device, precision, ranks=ranks)
            with ranks.together():
                if ranks.is_first:
                    reason = reason or _as_one(task, found, ranks, precision, allowed)
        return reason


def _as_one(task: Task, found: _Trained, ranks: Ranks, precision: str, allowed: float) -> str:
    every = _train("serial", task.device, precision, num_learners=LEARNERS * ranks.num_ranks)
    own = {name: every.state[name] for name in found.state}  # the first rank's learners, and z
    return _compare(found, replace(every, state=own), precision, allowed)


def without_tf32() -> None:
    """Have products and convolutions in float32 be in float32: TF32 rounds to 10 bits, which would hide faults."""
    # By the older names, which set the newer ones as well: torch.export reads them, and cannot once only those are set.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def main(argv: Sequence[str] | None = None) -> int:
    """Do a task, and write its result, on the first of several ranks; returns the exit code."""
    task, result = (sys.argv[1:] if argv is None else argv)[:2]
    without_tf32()
    reason, may_change = "", False
    try:
        reason = tried(Task(**json.loads(task)))
    except Exception as error:  # a fault of whatever kind is what a rung is to find
        traceback.print_exc()  # to the log, and so to the archive
        reason = one_line(error)
        may_change = is_out_of_memory(error) or getattr(error, "error_code", None) == _BUSY or _FULL_DISK in reason
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps({"reason": reason, "may_change": may_change}), encoding="utf-8")
    return int(bool(reason))


def arguments_to_come() -> list[str]:
    """Import what training imports late, and wait for the arguments, the environment and the log on stdin."""
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)  # there is no rung left
    call = json.loads(line)
    os.environ.update(call["environment"])
    log = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    return list(call["arguments"])


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # all stacks to the log, of a child that hangs; see `run_child`
    end_with_parent(signal.SIGKILL)  # a child that hangs would hold the device for ever
    code = main(sys.argv[1:] or arguments_to_come())
    for output in (sys.stdout, sys.stderr):
        output.flush()
    os._exit(code)  # threads of libraries that end together with Python may abort, which says nothing of the device
