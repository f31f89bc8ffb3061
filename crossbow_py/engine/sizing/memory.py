"""The memory model: the bytes that K learners with batches of b need, and so what fits.

At every moment t of a forward and a backward pass a learner holds F_t + b · S_t bytes besides its rows: tensors either
have the batch in their shape or not. Two probes, at two batch sizes, give every F_t and S_t, and

    activations(b) = max_t (F_t + b · S_t)

which is convex: with a small batch the peak is among the gradients, with a large one among the activations. It is exact
for tensors that are constant or linear in b. For tensors that grow faster, such as b × b similarities, the lines are
chords, above the true values between the two probes, so the larger probe has the largest batch size of interest.

    bytes(b, K) = fixed + bank(K) + staged_batches(K) · b · staged + max(at_once · activations(b), evaluated)

`evaluated` is what evaluations hold while no learner runs: copies of the model. Their activations are not counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import AveragingRule
from crossbow_py.core.trees import Tree, leaves, map_tree
from crossbow_py.engine.bank.frozen_base import frozen_parameters, stays_in_its_format
from crossbow_py.engine.bank.layout import ALIGNMENT_VALUES, Order, buffer_layout, parameter_layout
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.modules.precision import Precision, full_precision_parameters
from crossbow_py.engine.update.optimizers import Optimizer

MIB, GIB = 2**20, 2**30
LARGEST_BATCH = 65_536  # the largest batch size of interest
# The numbers of learners in a table: few enough to read, and among those that the auto-tuner chooses from.
TABLE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Line:
    """`fixed + per_sample · b` bytes."""

    fixed: float
    per_sample: float

    def at(self, batch_size: int) -> float:
        """Return the bytes with a batch of this size."""
        return self.fixed + self.per_sample * batch_size


@dataclass(frozen=True)
class Trace:
    """A probe: the bytes held after every operator of a pass over `batch_size` samples, beyond those at its start."""

    batch_size: int
    held: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes held at any moment."""
        return max(self.held, default=0)


@dataclass(frozen=True)
class Activations:
    """The peak of a pass: the upper envelope of `lines`, by rising slope. `probes` are (batch size, peak)."""

    lines: tuple[Line, ...]
    probes: tuple[tuple[int, int], ...] = ()

    def at(self, batch_size: int) -> int:
        """Return the bytes with a batch of this size, rounded up."""
        return -int(-max(line.at(batch_size) for line in self.lines) // 1)

    def in_batches_of(self, count: int, sample_bytes: int) -> Activations:
        """Return the peak of passes over one after another of `count` micro-batches, which are there all the time."""
        beyond = (count - 1) * sample_bytes
        return Activations(tuple(Line(each.fixed, each.per_sample + beyond) for each in self.lines), self.probes)

    @property
    def per_sample(self) -> float:
        """The bytes of one more sample in a large batch."""
        return self.lines[-1].per_sample


def activations(small: Trace, large: Trace, also: int = 0, unseen: int = 0) -> Activations:
    """Return the model from two probes, see the module's docstring.

    If the probes ran different operators, one chord between their peaks replaces the lines. `also` are the bytes held
    at another moment, outside the probed pass; `unseen` are held at every moment, and the probes do not see them.
    """
    step = large.batch_size - small.batch_size
    assert step > 0, f"the larger probe must be larger, got {large.batch_size} after {small.batch_size}"
    pairs = [(small.peak, large.peak)]
    if len(small.held) == len(large.held):
        pairs = list(set(zip(small.held, large.held, strict=True)))
    slopes = [((above - below) / step, below) for below, above in pairs]
    lines = [Line(below - slope * small.batch_size + unseen, slope) for slope, below in slopes]
    probes = (small.batch_size, small.peak), (large.batch_size, large.peak)
    return Activations(upper_envelope([*lines, Line(also, 0)]), probes)


def upper_envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest for some b ≥ 1, by rising slope."""
    hull: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.per_sample, line.fixed)):
        # The last is hidden if the line is the higher one before the last itself is.
        while hull and _begins(hull[-1], line) <= (1 if len(hull) == 1 else max(1, _begins(*hull[-2:]))):
            hull.pop()
        hull.append(line)
    return tuple(hull)


def _begins(flat: Line, steep: Line) -> float:
    """Return the batch size from which the steeper of two lines is higher."""
    if steep.per_sample == flat.per_sample:
        return 0.0
    return (flat.fixed - steep.fixed) / (steep.per_sample - flat.per_sample)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that follow from a model's shapes.

    Attributes:
        parameters, buffers: the number of values of each trained parameter, and of each floating-point buffer.
        counter_bytes: the bytes of other buffers.
        num_states: the number of rows of optimizer state.
        master_bytes, compute_bytes: the bytes of a value in rows and in a pass.
        order: the order of the bank's rows in memory.
        has_velocity, has_ema: whether there is a velocity of z, and an EMA of z and its buffers.
        has_corrections: whether learners have corrections.
        shows_mean: whether the learners' mean is evaluated instead of z.
        matrices: rows and columns of the parameters that the optimizer takes as matrices.
        num_frozen: the number of values of frozen parameters.
        frozen_bytes: their bytes, in the formats that they are held in.
        frozen_copy_bytes: the bytes of their copies in compute precision.
        shares_base: whether all learners share these.
        one_row: whether all learners have one row of weights, gradients and state.
        has_own_rows: whether each may then have weights and gradients of its own in kernels, as on CUDA.
    """

    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    counter_bytes: int
    num_states: int
    master_bytes: int
    compute_bytes: int
    order: Order = "blocks"
    has_velocity: bool = False
    has_ema: bool = False
    has_corrections: bool = True
    shows_mean: bool = False
    matrices: tuple[tuple[int, int], ...] = ()
    num_frozen: int = 0
    frozen_bytes: int = 0
    frozen_copy_bytes: int = 0
    shares_base: bool = True
    one_row: bool = False
    has_own_rows: bool = False

    def rows(self, num_learners: int) -> int:
        """Return the number of rows that K learners have in the bank, besides buffers."""
        return 1 if self.one_row else num_learners

    @property
    def num_values(self) -> int:
        """P, the number of values of all trained parameters."""
        return sum(self.parameters)

    def base_bytes(self, num_learners: int) -> int:
        """Return the bytes of frozen parameters and of their copies for passes."""
        one = self.frozen_bytes + self.frozen_copy_bytes
        return one if self.shares_base else num_learners * one

    def bank_bytes(self, num_learners: int) -> int:
        """Return the bytes that `ReplicaBank` allocates for K learners, what they share and z, and those of the EMA.

        With padding.
        """
        k, own, master = num_learners, self.rows(num_learners), self.master_bytes
        rows = (2 + self.has_corrections + self.num_states) * _rows_bytes(self.parameters, own, master, self.order)
        if self.compute_bytes != master:
            rows += _rows_bytes(self.parameters, own, self.compute_bytes, self.order)
        if self.one_row and self.has_own_rows:
            rows += k * self.num_values * (self.compute_bytes + master)
        buffers = _rows_bytes(self.buffers, k, master, "blocks")
        if self.has_ema:
            buffers += _rows_bytes(self.buffers, 1, master, "blocks")
        central = (3 + self.has_velocity + self.has_ema) * _rows_bytes(self.parameters, 1, master, self.order)
        return rows + buffers + central + k * self.counter_bytes + self.base_bytes(k)

    @property
    def template_bytes(self) -> int:
        """The bytes of the template, which evaluation copies, without frozen parameters, which it shares."""
        return (self.num_values + sum(self.buffers)) * self.master_bytes + self.counter_bytes

    @property
    def ema_bytes(self) -> int:
        """The bytes of the EMA of z and its buffers, if any, without padding."""
        return (self.num_values + sum(self.buffers)) * self.master_bytes if self.has_ema else 0

    @property
    def evaluation_bytes(self) -> int:
        """The bytes of an evaluation besides the bank and the template: the model it runs, and the values for it.

        These are the learners' mean if it is shown, and means of the learners' buffers or a copy of the EMA.
        """
        mean = _rows_bytes(self.parameters, 1, self.master_bytes, self.order) if self.shows_mean else 0
        buffers = self.ema_bytes or sum(self.buffers) * self.master_bytes
        return self.template_bytes + self.frozen_copy_bytes + mean + buffers


def staged_batches(num_learners: int) -> int:
    """Return the most batches that `StreamingFeed` has on the device for K learners."""
    # A round's, those of the round before, which may still be read, and those of the next, at least two.
    return 2 * num_learners + max(2, num_learners)


def _rows_bytes(blocks: Sequence[int], rows: int, itemsize: int, order: Order) -> int:
    """Return the bytes of `Rows`, with every block padded, once for all rows or in each, and the first aligned."""
    repeat = rows if order == "blocks" else 1
    length = sum(-(-repeat * numel // ALIGNMENT_VALUES) * ALIGNMENT_VALUES for numel in blocks)
    return (length * (rows if order == "rows" else 1) + ALIGNMENT_VALUES) * itemsize


@dataclass(frozen=True)
class LearnerModel:
    """The model of one learner's memory.

    Attributes:
        sizes: the sizes of the model.
        activations: those of a pass over a batch, including the batch.
        staged_sample_bytes: the bytes of a sample and its target in the batches that a streaming feed keeps on the
            device; 0 for resident data.
        fixed_bytes: other bytes on the device, such as a resident data set.
        most: the largest batch size of interest: that of the larger probe, or the number of samples.
    """

    sizes: ModelSizes
    activations: Activations
    staged_sample_bytes: int = 0
    fixed_bytes: int = 0
    most: int = LARGEST_BATCH

    def learner(self, batch_size: int) -> LearnerBytes:
        """Return what one learner needs, by purpose, without padding."""
        sizes = self.sizes
        return learner_bytes(
            sizes.num_values,
            sum(sizes.buffers),
            sizes.num_states,
            master_bytes=sizes.master_bytes,
            compute_bytes=sizes.compute_bytes,
            activations=self.activations.at(batch_size),
            has_corrections=sizes.has_corrections,
        )

    def predicted_bytes(self, batch_size: int, num_learners: int, at_once: int) -> int:
        """Return the peak of K learners of which `at_once` run at the same time; see the module's docstring."""
        own = self.learner(batch_size)
        padding = self.sizes.bank_bytes(num_learners) - 3 * own.weights - num_learners * own.row
        fixed = self.fixed_bytes + self.sizes.template_bytes + padding + self.staged_bytes(batch_size, num_learners)
        fixed += self.evaluation_beyond(batch_size, at_once)
        return predicted_bytes(own, num_learners, at_once=at_once, fixed=fixed)

    def evaluation_beyond(self, batch_size: int, at_once: int) -> int:
        """Return the bytes that an evaluation holds beyond the passes of learners, at least 0."""
        return max(0, self.sizes.evaluation_bytes - at_once * self.activations.at(batch_size))

    def staged_bytes(self, batch_size: int, num_learners: int) -> int:
        """Return the bytes of the batches that a streaming feed keeps on the device."""
        return staged_batches(num_learners) * batch_size * self.staged_sample_bytes

    def largest_batch_size(self, limit_bytes: float, num_learners: int, at_once: int) -> int:
        """Return the largest b, up to `most`, with which K learners stay within the limit; 0 if there is none."""
        sizes = range(1, self.most + 1)
        return bisect.bisect_right(sizes, limit_bytes, key=lambda b: self.predicted_bytes(b, num_learners, at_once))

    def most_learners(self, limit_bytes: float, batch_size: int, max_learners: int, in_turn: bool) -> int:
        """Return the largest K, up to `max_learners`, that stays within the limit; 0 if not even one does.

        `in_turn` says that one learner runs at a time, as under `serial`.
        """

        def needed(k: int) -> int:
            return self.predicted_bytes(batch_size, k, 1 if in_turn else k)

        return bisect.bisect_right(range(1, max_learners + 1), limit_bytes, key=needed)

    def table(self, limit_bytes: float, max_learners: int, in_turn: bool) -> dict[int, int]:
        """Return the largest batch size by K, for `max_learners` and the K of `TABLE` below, as far as they fit."""
        counts = sorted({k for k in TABLE if k <= max_learners} | {max_learners})
        found = {k: self.largest_batch_size(limit_bytes, k, 1 if in_turn else k) for k in counts}
        return {k: batch_size for k, batch_size in found.items() if batch_size}


@dataclass(frozen=True)
class HeldBack:
    """Memory that predictions do not use, and why."""

    fixed_bytes: int
    fraction: float
    why: str

    def limit(self, memory_bytes: float) -> float:
        """Return the bytes left for use, at least 0."""
        return max(0.0, memory_bytes - self.fixed_bytes - self.fraction * memory_bytes)


# Every tensor is counted, so these are for what operators do not return as tensors.
ELSEWHERE = HeldBack(
    512 * MIB,
    0.05,
    "512 MiB for the device's context and its libraries' workspaces, 5 % for rounding and fragmentation in the "
    "allocator; tensors are counted, and nothing of this was measured",
)
ON_HOST = HeldBack(
    256 * MIB,
    0.1,
    "256 MiB for compiled code and the interpreter, 10 % for workspaces inside operators, which are not tensors, and "
    "for freed memory that is kept",
)


def breakdown(model: LearnerModel, batch_size: int, num_learners: int, at_once: int) -> Mapping[str, int]:
    """Return `predicted_bytes` by purpose; the values add up to it."""
    own, rows = model.learner(batch_size), model.sizes.rows(num_learners)
    parts = {
        "weights": rows * own.weights,
        "frozen weights": model.sizes.base_bytes(num_learners),
        "gradients": rows * own.gradients,
        "corrections": rows * own.corrections,
        "optimizer state": rows * own.state,
        "copies in the compute format": rows * own.shadow,
        "buffers": num_learners * own.buffers,
        "average model (z, z_prev, sum of corrections)": 3 * own.weights,
        "velocity of z": own.weights if model.sizes.has_velocity else 0,
        "EMA of z and its buffers": model.sizes.ema_bytes,
        "template": model.sizes.template_bytes,
        "data set": model.fixed_bytes,
        "batches of the feed": model.staged_bytes(batch_size, num_learners),
        "forward and backward passes": at_once * own.activations,
        "copies of the model in evaluations, beyond the passes": model.evaluation_beyond(batch_size, at_once),
    }
    rest = model.predicted_bytes(batch_size, num_learners, at_once) - sum(parts.values())
    return {name: size for name, size in {**parts, "padding": rest}.items() if size}


@dataclass(frozen=True)
class LearnerBytes:
    """The bytes that one learner needs on its device.

    Attributes:
        weights, gradients, corrections: P master values each.
        state: P master values for each state row of the optimizer.
        shadow: P values in compute precision, if that is another.
        buffers: floating-point buffers.
        activations: the most that a forward and a backward pass over a batch hold besides all this: the batch,
            activations, the gradients that autograd makes, and workspaces inside operators. Probed, not computed.
    """

    weights: int
    gradients: int
    corrections: int
    state: int
    shadow: int
    buffers: int
    activations: int

    @property
    def row(self) -> int:
        """The bytes that stay from round to round."""
        return self.weights + self.gradients + self.corrections + self.state + self.shadow + self.buffers

    @property
    def whole(self) -> int:
        """The bytes of all."""
        return self.row + self.activations


def learner_bytes(
    num_values: int, num_buffer_values: int, num_states: int, *, master_bytes: int, compute_bytes: int,
    activations: int, has_corrections: bool = True,
) -> LearnerBytes:  # fmt: skip
    """Return what a learner of a model with P = `num_values` needs, without padding; see `ModelSizes`."""
    values = num_values * master_bytes
    return LearnerBytes(
        weights=values,
        gradients=values,
        corrections=values if has_corrections else 0,
        state=num_states * values,
        shadow=num_values * compute_bytes if compute_bytes != master_bytes else 0,
        buffers=num_buffer_values * master_bytes,
        activations=activations,
    )


def predicted_bytes(own: LearnerBytes, num_learners: int, *, at_once: int, fixed: int = 0) -> int:
    """Return the peak of K learners on a device, of which `at_once` run at the same time::

        fixed + (z, z_prev and the sum of corrections: 3 P values) + K · row + at_once · activations

    With `fused`, `threads` and `streams` all K run at once; with `serial` one does, and learners in turn use the same
    memory. `fixed` is everything else: the data set, the template, the context of the device.
    """
    assert 1 <= at_once <= num_learners, f"{at_once} of {num_learners} learners cannot run at once"
    return fixed + 3 * own.weights + num_learners * own.row + at_once * own.activations


@dataclass(frozen=True)
class Sample:
    """One sample as it enters the model, and its target: by default a class."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype = torch.float32
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64
    several: Tree = None  # tensors without values, in place of one input

    @classmethod
    def of(cls, inputs: Tree, targets: Tensor) -> Sample:
        """Return the form of a batch's samples."""
        like = map_tree(lambda own: own.new_empty(own.shape[1:], device="meta"), inputs)
        first = leaves(like)[0]
        several = None if isinstance(inputs, Tensor) else like
        return cls(tuple(first.shape), first.dtype, tuple(targets.shape[1:]), targets.dtype, several)

    @property
    def nbytes(self) -> int:
        """The bytes of a sample and its target on the device."""
        inputs, targets = self.batch(1, channels_last=False)
        return targets.nbytes + sum(own.nbytes for own in leaves(inputs))

    def batch(self, size: int, channels_last: bool) -> tuple[Tree, Tensor]:
        """Return uninitialised inputs `[B, ...]` and targets `[B, ...]`, as a feed returns them."""

        def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            values = torch.empty(size, *shape, dtype=dtype)
            last = channels_last and values.ndim == 4
            return torch.empty_like(values, memory_format=torch.channels_last) if last else values

        if self.several is None:
            inputs = filled(self.input_shape, self.input_dtype)
        else:
            inputs = map_tree(lambda own: filled(own.shape, own.dtype), self.several)
        return inputs, torch.empty(size, *self.target_shape, dtype=self.target_dtype)


@dataclass(frozen=True)
class Job:
    """The settings of training that memory depends on.

    `order` is that of the bank's rows, and `accumulate` the number of micro-batches of a learner's step. Frozen
    parameters are there once if learners share their base, and everything trained if they have `one_row`, but for
    what kernels need of each.
    """

    loss: Loss
    optimizer: Optimizer
    rule: AveragingRule
    precision: Precision
    channels_last: bool = True
    order: Order = "blocks"
    accumulate: int = 1
    shares_base: bool = True
    one_row: bool = False
    has_own_rows: bool = False


def model_sizes(model: nn.Module, job: Job) -> ModelSizes:
    """Return the sizes that follow from the shapes of a model."""
    others = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    optimizer = job.optimizer
    layout = parameter_layout(model, job.channels_last, optimizer.matrices(model), optimizer.group_numbers(model))
    matrices, full = layout.blocks[: layout.count("matrix")], full_precision_parameters(model)
    frozen, precision = frozen_parameters(model), job.precision
    kept = {name for name, own in frozen.items() if stays_in_its_format(own, precision, name in full)}
    master, compute = precision.master.itemsize, precision.compute.itemsize
    copied = frozen.keys() - kept - full if precision.has_shadow else ()
    return ModelSizes(
        parameters=tuple(block.numel for block in layout.blocks),
        buffers=tuple(block.numel for block in buffer_layout(model).blocks),
        counter_bytes=sum(buffer.numel() * buffer.itemsize for buffer in others),
        num_states=job.optimizer.num_states,
        master_bytes=master,
        compute_bytes=compute,
        order=job.order,
        has_velocity=job.rule.has_velocity,
        has_ema=job.rule.average_ema is not None,
        has_corrections=job.rule.has_central_model,
        shows_mean=job.rule.shows_mean,
        matrices=tuple(block.matrix_shape for block in matrices for _ in range(block.num_matrices)),
        num_frozen=sum(own.numel() for own in frozen.values()),
        frozen_bytes=sum(own.numel() * (own.itemsize if name in kept else master) for name, own in frozen.items()),
        frozen_copy_bytes=sum(frozen[name].numel() for name in copied) * compute,
        shares_base=job.shares_base,
        one_row=job.one_row,
        has_own_rows=job.has_own_rows,
    )
