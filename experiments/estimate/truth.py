"""The bytes that a training run really holds: the engine's own bank and rounds, run without memory and counted.

Nothing here knows how the estimator works. On the "meta" device tensors have shapes and storages and no memory, so a
run can hold 32 GiB on any machine. The bank is a real `ReplicaBank`; a round is what `engine.rounds` does, without the
lines that ask the device for a number. Learners that run at once go through their passes an operator each by turns, and
hold what they need for it while the others have theirs: all are at their peaks at the same moment. That is what one
fused pass holds, and at worst what streams hold.

What is counted is storages: each once, however many tensors and views share it, from the operator that made it until
nothing refers to it any more. So what autograd keeps for the backward pass counts for as long as it keeps it. Tensors
of devices without memory ("meta", or under FakeTensorMode) count like real ones: a model can "use" more than the
machine has. What an operator takes and gives back inside is not seen, nor is an allocator's rounding.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossbow_py.averaging import SMA
from crossbow_py.data.normalisation import IDENTITY
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import Step, TorchUpdate
from crossbow_py.models import MODELS

Body = Callable[[Callable[[], None]], None]
Fits = Callable[[int], bool]
_DEVICE = torch.device("meta")
_PROBES = (128, 256)  # batch sizes whose peaks give the first guess
_IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class Subject:
    """A model and the samples it is measured on; uint8 on the device until they are in use."""

    model: str
    input_shape: tuple[int, ...]
    num_classes: int

    @property
    def sample_bytes(self) -> int:
        return torch.Size(self.input_shape).numel()

    def make_model(self) -> nn.Module:
        return MODELS[self.model]().build(self.input_shape, self.num_classes)


SUBJECTS = {
    subject.model: subject
    for subject in (
        *(Subject(name, _IMAGE, 1000) for name in ("resnet34", "resnet50", "resnet152", "densenet121", "alexnet")),
        Subject("resnet3d18", (3, 16, 112, 112), 400),
        Subject("vgg16", (3, 32, 32), 10),
    )
}


def staged_batches(num_learners: int) -> int:
    """Batches of bytes that a streaming feed has on the device at most, for K learners.

    Those of this round, those of the round before, as a learner may still read its own, and those copied ahead: a
    round's, and at least two.
    """
    return 2 * num_learners + max(2, num_learners)


class TrainingRun:
    """K learners of a model in fp32 with SGD with momentum and SMA; rounds at any batch size.

    Args:
        subject: the model and its samples.
        num_learners: K.
        at_once: learners that run at the same moment.

    Attributes:
        held_bytes: what is there between rounds: the bank and the template.
        peaks: batch size → bytes, of the rounds that were run to their end.
    """

    def __init__(self, subject: Subject, num_learners: int, at_once: int) -> None:
        self.subject, self.num_learners, self.at_once = subject, num_learners, at_once
        self._update = TorchUpdate(SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4), SMA())
        self._ledger = Ledger()
        with LiveBytes(self._ledger):
            with _DEVICE:
                template = subject.make_model()
            self.bank = ReplicaBank(
                template, num_learners, device=_DEVICE, precision=FP32, state_names=SGD().state_names, order="blocks"
            )
        self.held_bytes = self._ledger.live
        self.peaks: dict[int, int] = {}

    def fits(self, limit_bytes: int | None, batch_size: int) -> bool:
        """Run a round at that batch size, and end it once it goes past the limit; return whether it stayed within."""
        ledger = self._ledger
        ledger.limit, ledger.peak = limit_bytes, ledger.live
        try:
            with LiveBytes(ledger):
                self._round(batch_size)
            self.peaks[batch_size], is_whole = ledger.peak, True
        except OverLimitError:
            is_whole = False
        if ledger.live != self.held_bytes:  # what an exception went through may be left in circles
            gc.collect()
        assert ledger.live == self.held_bytes, f"a round leaves nothing behind, got {ledger.live - self.held_bytes}"
        return is_whole

    def peak_bytes(self, batch_size: int) -> int:
        if batch_size not in self.peaks:
            self.fits(None, batch_size)
        return self.peaks[batch_size]

    def largest_batch_size(self, limit_bytes: int) -> int:
        """The largest that fits; 0 when not even one sample does. It was run, and the next larger one too."""
        return largest(partial(self.fits, limit_bytes), self._guess(limit_bytes))

    def _guess(self, limit_bytes: int) -> int:
        """Guess where to begin the search: where a line through the two known peaks nearest to the limit meets it."""
        for batch_size in _PROBES:
            self.peak_bytes(batch_size)
        near = sorted(self.peaks.items(), key=lambda found: abs(found[1] - limit_bytes))[:2]
        (small, below), (large, above) = sorted(near)
        return max(1, small + (limit_bytes - below) * (large - small) // max(above - below, 1))

    def _round(self, batch_size: int) -> None:
        averaging = self._update.rule.linear_round(self.num_learners)
        staged = [self._stage(batch_size) for _ in range(staged_batches(self.num_learners))]
        for first in range(0, self.num_learners, self.at_once):
            together = range(first, first + self.at_once)
            run_in_step([partial(self._learn, learner, *staged[learner]) for learner in together])
        for learner in range(self.num_learners):
            self._update.correct(learner, self.bank.trained_row(learner), averaging, Step(0.1, step_count=1))
        if averaging is not None:
            bank = self.bank
            self._update.sum(bank.total.trained(), [bank.corrections.trained(j) for j in range(bank.num_learners)])
            self._update.move([bank.z.whole()], [bank.z_prev.whole()], [bank.total.whole()], averaging)

    def _stage(self, batch_size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.empty(batch_size, *self.subject.input_shape, dtype=torch.uint8, device=_DEVICE)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, torch.empty(batch_size, dtype=torch.int64, device=_DEVICE)

    def _learn(self, learner: int, staged: Tensor, targets: Tensor, hand_on: Callable[[], None]) -> None:
        """`RoundTasks.learn`, line by line. In a thread of its own, so the mode is put on here."""
        bank = self.bank
        with LiveBytes(self._ledger, hand_on):
            inputs = IDENTITY.apply(staged, bank.precision.compute)
            if inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            output = bank.module(learner)(inputs).to(bank.precision.master)
            loss = nn.functional.cross_entropy(output, targets)
            parameters = bank.trained_parameters(learner)
            bank.store_gradients(learner, torch.autograd.grad(loss, parameters, allow_unused=True))
            (output.detach().argmax(1) == targets).sum()


def largest(fits: Fits, guess: int) -> int:
    """The largest b ≥ 0 that fits, 0 always does; what is larger than one that does not fit, does not fit either.

    Outwards from the guess in steps of 1, 2, 4, ..., then halving what is between. Two questions where the guess is
    right, and however wrong it is, the answer is one that was asked for, as is the next larger one.
    """
    assert guess >= 1, f"a batch has at least one sample, got {guess}"
    step = 1
    if fits(guess):
        low = guess
        while fits(low + step):
            low, step = low + step, 2 * step
        return bisect(fits, low, low + step)
    high = guess
    while high > step and not fits(high - step):
        high, step = high - step, 2 * step
    return bisect(fits, max(high - step, 0), high)


def doubling_search(fits: Fits) -> int:
    """The largest b ≥ 0 that fits, as batch size finders do: 1, 2, 4, ... until one does not, then halving."""
    high = 1
    while fits(high):
        high *= 2
    return bisect(fits, high // 2, high)


def bisect(fits: Fits, low: int, high: int) -> int:
    """The largest that fits of [low, high), where `low` is known to fit and `high` not to."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class StoppedError(Exception):
    """Another runner has failed."""


class Relay:
    """One runner at a time runs; it keeps what it holds while the others have their turns."""

    def __init__(self, num_runners: int) -> None:
        self._signals = [threading.Semaphore(0) for _ in range(num_runners)]
        self._order = deque(range(num_runners))  # the first has the turn
        self.failure: Exception | None = None

    def hand_on(self) -> None:
        """Let each of the others run until it calls this, then go on. Raises StoppedError when one has failed."""
        own = self._order[0]
        self._order.rotate(-1)
        self._signals[self._order[0]].release()
        self._signals[own].acquire()
        if self.failure is not None:
            raise StoppedError

    def run(self, runner: int, body: Body) -> None:
        """All of a runner's turns; the body of its thread."""
        self._signals[runner].acquire()
        try:
            if self.failure is None:
                body(self.hand_on)
        except StoppedError:
            pass
        except Exception as error:
            # Frames hold tensors, which are to be gone.
            self.failure = error.with_traceback(None)
        finally:
            self._order.popleft()
            if self._order:
                self._signals[self._order[0]].release()

    def start(self) -> None:
        """Give the first its first turn."""
        self._signals[0].release()


def run_in_step(bodies: Sequence[Body]) -> None:
    """Run bodies, a thread each; each is given what it is to call after every operator. Raises what one has raised."""
    relay = Relay(len(bodies))
    threads = [
        threading.Thread(target=relay.run, args=(runner, body), name=f"learner {runner}", daemon=True)
        for runner, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    relay.start()
    for thread in threads:
        thread.join()
    failure, relay.failure = relay.failure, None  # no circle of frames and exceptions is to keep tensors
    if failure is not None:
        try:
            raise failure
        finally:
            del failure


class OverLimitError(Exception):
    """The bytes that are alive went past the limit."""


class Ledger:
    """The storages that are alive, and what they take. Not thread-safe; threads may use it in turns.

    Args:
        limit: bytes; None for none. May be changed between operators.

    Attributes:
        live: bytes alive now.
        peak: the most that were alive since the start, or since it was set.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.live, self.peak = limit, 0, 0
        # Both by the storage's address: what tells of its end, and its bytes, unless it was left out.
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        """Storages that are alive and known, those left out among them."""
        return len(self._ends)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new or has another size than before.

        Raises:
            OverLimitError: this goes past the limit. The storage stays counted for as long as it lives.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ends:
            self._watch(storage)
            self._sizes[key] = 0
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.live)
        if self.limit is not None and self.live > self.limit:
            raise OverLimitError(f"{self.live} bytes are alive, and the limit is {self.limit}")

    def leave_out(self, tensor: Tensor) -> None:
        """A storage that nothing counted made was there before: it is none of the ledger's."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ends:
            self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        # torch keeps a storage's Python object for as long as the storage lives, so this tells of the storage's end.
        key = storage._cdata
        self._ends[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        del self._ends[key]
        self.live -= self._sizes.pop(key, 0)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every operator of this thread enters what it makes into a ledger.

    Args:
        ledger: may be shared with modes of other threads.
        after_operator: called after every operator, while what went in and what came out is alive.
    """

    def __init__(self, ledger: Ledger, after_operator: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self._after_operator = ledger, after_operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for given in _tensors((args, kwargs)):
            self.ledger.leave_out(given)
        result = func(*args, **(kwargs or {}))
        for made in _tensors(result):
            self.ledger.add(made)
        if self._after_operator is not None:
            self._after_operator()
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
