"""Measures the statistics of learning at the end of an epoch, on copies of the models, without changing training.

All models run in evaluation mode and master precision, so BatchNorm normalises by statistics that stay as they are,
dropout drops nothing, and losses and predictions are functions of the weights alone. The states of torch's generators
are restored, and batches are loaded apart from those that training has announced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from crossbow_py.core.errors import CrossbowError, one_line
from crossbow_py.core.host_randomness import kept_torch_state
from crossbow_py.core.trees import call, in_format, joined
from crossbow_py.data.feed import Batch, Feed
from crossbow_py.engine.device.cudnn import cudnn_set
from crossbow_py.engine.device.host import faster_threads, intra_op_threads
from crossbow_py.engine.device.memory import free_memory, raise_if_lost
from crossbow_py.engine.modules.losses import (
    Loss,
    TokenLoss,
    compared,
    is_classification,
    scores_of,
    smoothed_cross_entropy,
)
from crossbow_py.engine.rounds import smoothing_rows, take_all
from crossbow_py.telemetry.events import LearningStatistics
from crossbow_py.train.evaluation.current_models import final_states
from crossbow_py.train.evaluation.evaluator import State
from crossbow_py.train.evaluation.learning_statistics import (
    GradientNoise,
    agreement,
    gradient_noise,
    largest_eigenvalue,
)
from crossbow_py.train.run import Run

T = TypeVar("T")

_MOST_BATCHES = 64  # for the gradient noise
_MOST_SAMPLES = 1024  # for the agreement of predictions, whose standard error is then at most 0.016
_SEED = 0  # of the vector that the search for the largest eigenvalue starts from
_NO_CLASS = -1.0


class LearningMeasurement:
    """Measures a run's statistics of learning. The executor is drained; called from the training loop's thread.

    The first rank measures the gradient noise and the sharpness, while the others wait: of the average model itself,
    not its EMA, or of the first learner if learners are independent. For the agreement, each rank predicts with its own
    learners, and the predictions of all learners are compared.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._refused: set[str] = set()
        self._notes: list[str] = []
        self._num_threads: dict[str, int] = {}

    def measure(self, which: str) -> LearningStatistics:
        """Measure the current models. All ranks call it together; what only the first one measures is None elsewhere.

        Args:
            which: the data to compare predictions on, `test` or `validation`; the training data if there is none.

        Raises DataError, and RankError if another rank failed.
        """
        begun_s, run = time.monotonic(), self._run
        with kept_torch_state(run.choices.device):
            state = final_states(run, ema=False)[0]
            noise, sharpness = None, None
            with run.ranks.together():
                if run.ranks.is_first:
                    noise = self._attempt("gradient noise scale", lambda: self._noise(state))
                    sharpness = self._attempt("sharpness", lambda: self._sharpness(state))
            agreeing = self._agreement(which)
        return LearningStatistics(
            gradient_noise_scale_samples=noise.scale_samples if noise else None,
            gradient_variance=noise.variance if noise else None,
            squared_gradient_norm=noise.squared_norm if noise else None,
            agreement=agreeing,
            sharpness=sharpness,
            measuring_s=time.monotonic() - begun_s,
        )

    def take_notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        return take_all(self._notes)

    def _attempt(self, what: str, measure: Callable[[], T | None]) -> T | None:
        """Return what `measure` returns. If it fails, note why, and return None from then on: the run must not stop.

        For example, some operators have no second derivative. Raises CrossbowError.
        """
        if what in self._refused:
            return None
        device = self._run.choices.device
        try:
            return measure()
        except CrossbowError:
            raise
        except Exception as error:
            raise_if_lost(error, device)
            self._refused.add(what)
            self._notes.append(f"The {what} of this model is not measured ({one_line(error)[:200]}).")
        free_memory(device)
        return None

    def _threads(self, what: str, work: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """Set the number of threads to that with which `work`, a small part of the measurement, was faster.

        It is chosen the first time only, as the last bits of results may depend on it.
        """
        if self._run.choices.device.type != "cpu":
            return contextlib.nullcontext()
        if what not in self._num_threads:
            self._num_threads[what] = faster_threads(work)
        return intra_op_threads(self._num_threads[what])

    def _noise(self, state: State) -> GradientNoise | None:
        """Measure the gradient noise on the next epoch's first batches; None if an epoch has only one."""
        run, num_samples = self._run, self._run.num_samples
        b, n, step = run.settings.batch_size, run.settings.accumulate, run.settings.samples_per_step
        begin = -(-self._run.state.samples_seen // num_samples) * num_samples
        starts = range(begin, begin + min(_MOST_BATCHES // n or 1, num_samples // step) * step, step)
        if len(starts) * n < 2:
            return None
        module, loss = run.evaluator.module(state), _training_loss(run)
        with contextlib.closing(run.train_feed.aside(starts)) as steps, _differentiable(module):
            batches = (part for batch in steps for part in batch.parts(n))
            first = next(batches)
            with self._threads("noise", lambda: gradient_norms(module, loss, [first])):
                squared_norms, squared_norm = gradient_norms(module, loss, itertools.chain([first], batches))
        return gradient_noise(squared_norms, squared_norm, b, num_samples)

    def _sharpness(self, state: State) -> float:
        """Measure the sharpness on the run's first samples: as many as are evaluated at once, but at least a batch."""
        run = self._run
        b, n, step = run.settings.batch_size, run.settings.accumulate, run.settings.samples_per_step
        num_batches = max(1, min(run.evaluator.batch_size, self._run.num_samples) // b)
        with contextlib.closing(run.train_feed.aside(range(0, -(-num_batches // n) * step, step))) as steps:
            batches = itertools.islice((part for batch in steps for part in batch.parts(n)), num_batches)
            inputs, targets = joined(list(batches)) if run.train_feed.one_shape else next(batches)
        module, loss, batch = run.evaluator.module(state), _training_loss(run), Batch(inputs, targets)
        with _differentiable(module), self._threads("sharpness", lambda: gradient_norms(module, loss, [batch])):
            return hessian_eigenvalue(module, loss, batch)

    def _agreement(self, which: str) -> float | None:
        """Return the agreement of the learners of all ranks, without non-finite ones. All ranks together."""
        run, ranks = self._run, self._run.ranks
        if run.bank.total_learners < 2:
            return None
        feed = (run.validation_feed if which == "validation" else run.test_feed) or run.train_feed
        with ranks.together():
            own = self._attempt("agreement of learners", lambda: self._predictions(feed))
        own = torch.empty(run.bank.num_learners, 0) if own is None else own
        own[list(self._run.state.non_finite_learners)] = _NO_CLASS
        counts = {num_values for (num_values,) in ranks.gather([own.numel()])}
        if len(counts) > 1 or 0 in counts:
            return None  # nothing to compare, or some rank could not predict
        every = torch.tensor(ranks.gather(own.flatten().tolist())).view(-1, own.shape[1])
        return agreement(every[(every != _NO_CLASS).all(1)])

    @torch.no_grad()
    def _predictions(self, feed: Feed) -> Tensor | None:
        """Return predicted classes [K, N] of evenly spaced samples; None if the task is not classification."""
        run, bank = self._run, self._run.bank
        every = -(-feed.num_samples // _MOST_SAMPLES)
        found: list[list[Tensor]] = [[] for _ in range(bank.num_learners)]
        samples = feed.evaluation_batches(1, 0, every)
        size = run.evaluator.batch_size if feed.one_shape else 1
        while batch := list(itertools.islice(samples, size)):
            inputs, targets = joined(batch)
            for j, own in enumerate(found):
                module = run.evaluator.module(bank.learner_state(j))
                output = scores_of(call(module, in_format(inputs, _trained(module)[0].dtype)))
                if not is_classification(output, targets):
                    return None
                largest, predicted = output.max(1)
                # Host–device synchronisation on CUDA.
                own.append(predicted.masked_fill_(~largest.isfinite(), _NO_CLASS).cpu())
        return torch.stack([torch.cat(own) for own in found]).double()


def gradient_norms(module: nn.Module, loss: Loss, batches: Iterable[Batch]) -> tuple[list[float], float]:
    """Return |G|² of each batch's gradient, and of the mean of these gradients.

    Every batch ends in a host–device synchronisation on CUDA.
    """
    squares, total = list[float](), torch.zeros(())
    for batch in batches:
        value = _loss(module, loss, batch)
        gradient = _flat(torch.autograd.grad(value, _trained(module), materialize_grads=True, allow_unused=True))
        squares.append(_squared(gradient))
        total = gradient if len(squares) == 1 else total.add_(gradient)
    return squares, _squared(total / len(squares))


def hessian_eigenvalue(module: nn.Module, loss: Loss, batch: Batch) -> float:
    """Return the largest eigenvalue of the Hessian of a batch's loss with respect to the trained parameters.

    Their `grad` is overwritten. Raises RuntimeError if an operator has no second derivative.
    """
    parameters = _trained(module)
    value = _loss(module, loss, batch)
    found = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True, allow_unused=True)
    gradient = _flat(found)

    def product(vector: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        if gradient.requires_grad:  # else it does not depend on the weights
            # Not `grad`, which follows only the paths to its inputs: through a function that is differentiable once
            # there is none, so it would give zeros instead of an error.
            torch.autograd.backward(gradient, vector, retain_graph=True)
        return _flat([torch.zeros_like(each) if each.grad is None else each.grad for each in parameters])

    start = torch.randn(len(gradient), generator=torch.Generator().manual_seed(_SEED)).to(gradient)
    return largest_eigenvalue(product, start)


def _loss(module: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    output = call(module, in_format(batch.inputs, _trained(module)[0].dtype))
    return loss(*compared(loss, output, batch.targets))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.to_dense().reshape(-1) for tensor in tensors])


def _squared(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2


def _training_loss(run: Run) -> Loss:
    """Return the loss that learners are trained on, label smoothing included and weight decay excluded."""
    rows = smoothing_rows(run.settings.label_smoothing, run.bank)
    if rows is None:
        return run.loss
    smoothed = partial(smoothed_cross_entropy, smoothing=rows[0])
    return TokenLoss(smoothed) if isinstance(run.loss, TokenLoss) else smoothed


@contextlib.contextmanager
def _differentiable(module: nn.Module) -> Iterator[None]:
    """Make attention use its implementation with a second derivative, and recurrent layers one that is not cuDNN's.

    cuDNN has no derivative of recurrent layers in evaluation mode.
    """
    recurs = any(isinstance(each, nn.RNNBase) for each in module.modules())
    without_cudnn = cudnn_set("enabled", False) if recurs else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), without_cudnn:
        yield
