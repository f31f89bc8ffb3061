"""The memory model: how much K learners with batches of b need, and so what fits. Values in, values out.

At every moment t of a forward and a backward pass a learner holds F_t + b · S_t bytes beside its rows: tensors either
have the batch in their shape or not. Two probes, at two batch sizes, give every F_t and S_t, and

    activations(b) = max_t (F_t + b · S_t)

which is convex: with a small batch the peak is among the gradients, with a large one among the activations. It is exact
for tensors that are constant or linear in b. For tensors that grow faster, such as b × b similarities, the lines are
chords, above the truth between the two probes; so the larger probe lies above every batch size asked for.

    bytes(b, K) = fixed + bank(K) + staged_batches(K) · b · staged + max(at_once · activations(b), evaluated)

`evaluated` is what evaluations hold while no learner runs: copies of the model. What they run on it is not counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from crossbow_py.engine.bank.layout import ALIGNMENT_VALUES, Order

MIB, GIB = 2**20, 2**30
LARGEST_BATCH = 65_536  # no batch size beyond is looked at
# K of a table: few enough to be read, and each a count that executors keep a graph for.
TABLE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Line:
    """`fixed + per_sample · b` bytes."""

    fixed: float
    per_sample: float

    def at(self, batch_size: int) -> float:
        """Bytes with a batch of that size."""
        return self.fixed + self.per_sample * batch_size


@dataclass(frozen=True)
class Trace:
    """A probe: the bytes held after every operator of a pass over `batch_size` samples, beyond those before it."""

    batch_size: int
    held: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return max(self.held, default=0)


@dataclass(frozen=True)
class Activations:
    """What a pass holds at most: the upper envelope of `lines`, by rising slope. `probes` are (batch size, peak)."""

    lines: tuple[Line, ...]
    probes: tuple[tuple[int, int], ...] = ()

    def at(self, batch_size: int) -> int:
        """Bytes with a batch of that size, rounded up."""
        return -int(-max(line.at(batch_size) for line in self.lines) // 1)

    @property
    def per_sample(self) -> float:
        """Bytes for one sample more, once batches are large."""
        return self.lines[-1].per_sample


def activations(small: Trace, large: Trace, also: int = 0, unseen: int = 0) -> Activations:
    """The model from two probes; see the module's first lines.

    `also` are bytes that some other moment holds, `unseen` those that every moment holds beside what was probed. Where
    the two ran different operators, one chord between their peaks stands for all moments.
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
    """Those of the lines that are the highest somewhere at b ≥ 1, by rising slope."""
    hull: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.per_sample, line.fixed)):
        while hull and (_begins(hull[-1], line) <= 1 or _is_hidden(hull, line)):
            hull.pop()
        hull.append(line)
    return tuple(hull)


def _begins(flat: Line, steep: Line) -> float:
    """The batch size from which the steeper of two lines is the higher one."""
    if steep.per_sample == flat.per_sample:
        return 0.0
    return (flat.fixed - steep.fixed) / (steep.per_sample - flat.per_sample)


def _is_hidden(hull: Sequence[Line], line: Line) -> bool:
    return len(hull) > 1 and _begins(hull[-1], line) <= _begins(hull[-2], hull[-1])


@dataclass(frozen=True)
class ModelSizes:
    """What follows from a model's shapes alone.

    Attributes:
        parameters, buffers: number of values of each parameter, and of each floating-point buffer.
        counter_bytes: of its other buffers.
        num_states: rows of optimizer state.
        master_bytes, compute_bytes: of a value, in rows and in a pass.
        order: of the bank's rows in memory.
        has_velocity, has_ema: whether there is a velocity of z, and an EMA of z and its buffers.
        shows_mean: whether it is a mean of the learners that is evaluated, and not z.
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
    shows_mean: bool = False

    @property
    def num_values(self) -> int:
        """P."""
        return sum(self.parameters)

    def learner(self, activation_bytes: int) -> LearnerBytes:
        """One learner's needs without padding."""
        return learner_bytes(
            self.num_values,
            sum(self.buffers),
            self.num_states,
            master_bytes=self.master_bytes,
            compute_bytes=self.compute_bytes,
            activations=activation_bytes,
        )

    def bank_bytes(self, num_learners: int) -> int:
        """What `ReplicaBank` allocates for K learners, and for z; with the EMA, if any; padding included."""
        k, master = num_learners, self.master_bytes
        rows = (3 + self.num_states) * _rows_bytes(self.parameters, k, master, self.order)
        if self._has_shadow:
            rows += _rows_bytes(self.parameters, k, self.compute_bytes, self.order)
        buffers = _rows_bytes(self.buffers, k, master, "blocks")
        if self.has_ema:
            buffers += _rows_bytes(self.buffers, 1, master, "blocks")
        central = (3 + self.has_velocity + self.has_ema) * _rows_bytes(self.parameters, 1, master, self.order)
        return rows + buffers + central + k * self.counter_bytes

    @property
    def template_bytes(self) -> int:
        """The model as it was made, which evaluation copies from."""
        return (self.num_values + sum(self.buffers)) * self.master_bytes + self.counter_bytes

    @property
    def ema_bytes(self) -> int:
        """What the EMA of z and its buffers are, if any; padding is not counted."""
        return (self.num_values + sum(self.buffers)) * self.master_bytes if self.has_ema else 0

    @property
    def evaluation_bytes(self) -> int:
        """What an evaluation holds beside the bank and the template: the model it runs, and what that is filled from.

        This is z or the learners' mean, with means of the learners' buffers, or the EMA as it stands then besides.
        """
        mean = _rows_bytes(self.parameters, 1, self.master_bytes, self.order) if self.shows_mean else 0
        return self.template_bytes + mean + (self.ema_bytes or sum(self.buffers) * self.master_bytes)

    @property
    def _has_shadow(self) -> bool:
        return self.compute_bytes != self.master_bytes


def staged_batches(num_learners: int) -> int:
    """Batches that `StreamingFeed` has on the device at most, for K learners.

    Those of a round, those of the round before, which may still be read, and those ahead: a round's, and at least two.
    """
    return 2 * num_learners + max(2, num_learners)


def _rows_bytes(blocks: Sequence[int], rows: int, itemsize: int, order: Order) -> int:
    """Of `engine.layout.Rows`: every block padded, once for all rows or in each, and room to align the first."""
    repeat = rows if order == "blocks" else 1
    length = sum(-(-repeat * numel // ALIGNMENT_VALUES) * ALIGNMENT_VALUES for numel in blocks)
    return (length * (rows if order == "rows" else 1) + ALIGNMENT_VALUES) * itemsize


@dataclass(frozen=True)
class LearnerModel:
    """All that is known of one learner's memory.

    Attributes:
        sizes: of the model.
        activations: of a pass over a batch, the batch included.
        staged_sample_bytes: of a sample and its target in the batches that a streaming feed keeps on the device; 0 for
            data that lives there.
        fixed_bytes: what else lies on the device, such as a resident data set.
        most: no batch size beyond is looked at: that of the larger probe, or the number of samples.
    """

    sizes: ModelSizes
    activations: Activations
    staged_sample_bytes: int = 0
    fixed_bytes: int = 0
    most: int = LARGEST_BATCH

    def learner(self, batch_size: int) -> LearnerBytes:
        """What one learner needs, by what it is for."""
        return self.sizes.learner(self.activations.at(batch_size))

    def predicted_bytes(self, batch_size: int, num_learners: int, at_once: int) -> int:
        """Peak of K learners of which `at_once` run at the same moment; see the module's first lines."""
        own = self.learner(batch_size)
        padding = self.sizes.bank_bytes(num_learners) - 3 * own.weights - num_learners * own.row
        fixed = self.fixed_bytes + self.sizes.template_bytes + padding + self.staged_bytes(batch_size, num_learners)
        fixed += self.evaluation_beyond(batch_size, at_once)
        return predicted_bytes(own, num_learners, at_once=at_once, fixed=fixed)

    def evaluation_beyond(self, batch_size: int, at_once: int) -> int:
        """By how much an evaluation holds more than the passes of learners, if it does."""
        return max(0, self.sizes.evaluation_bytes - at_once * self.activations.at(batch_size))

    def staged_bytes(self, batch_size: int, num_learners: int) -> int:
        """Batches that a streaming feed keeps on the device."""
        return staged_batches(num_learners) * batch_size * self.staged_sample_bytes

    def largest_batch_size(self, limit_bytes: float, num_learners: int, at_once: int) -> int:
        """The largest b, up to `most`, with which K learners stay within the limit; 0 when there is none."""
        sizes = range(1, self.most + 1)
        return bisect.bisect_right(sizes, limit_bytes, key=lambda b: self.predicted_bytes(b, num_learners, at_once))

    def most_learners(self, limit_bytes: float, batch_size: int, max_learners: int, in_turn: bool) -> int:
        """The largest K, up to `max_learners`, that stays within the limit; 0 when not even one does.

        `in_turn` says that one runs at a time, as under `serial`.
        """

        def needed(k: int) -> int:
            return self.predicted_bytes(batch_size, k, 1 if in_turn else k)

        return bisect.bisect_right(range(1, max_learners + 1), limit_bytes, key=needed)

    def table(self, limit_bytes: float, max_learners: int, in_turn: bool) -> dict[int, int]:
        """K → the largest batch size, for the K of `TABLE` up to `max_learners` that fit, and `max_learners` itself."""
        counts = sorted({k for k in TABLE if k <= max_learners} | {max_learners})
        found = {k: self.largest_batch_size(limit_bytes, k, 1 if in_turn else k) for k in counts}
        return {k: batch_size for k, batch_size in found.items() if batch_size}


@dataclass(frozen=True)
class HeldBack:
    """Memory that predictions leave alone, and why."""

    fixed_bytes: int
    fraction: float
    why: str

    def limit(self, memory_bytes: float) -> float:
        """What is left of it; 0 where all is to be left alone."""
        return max(0.0, memory_bytes - self.fixed_bytes - self.fraction * memory_bytes)


# Where every tensor is counted, what is left to chance is what no operator shows as a tensor.
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
    """`predicted_bytes` by what it is for. The values add up to it."""
    own = model.learner(batch_size)
    parts = {
        "weights": num_learners * own.weights,
        "gradients": num_learners * own.gradients,
        "corrections": num_learners * own.corrections,
        "optimizer state": num_learners * own.state,
        "copies in the compute format": num_learners * own.shadow,
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
    """What one learner needs on its device, in bytes.

    Attributes:
        weights, gradients, corrections: P master values each.
        state: the optimizer's P master values, as often as it has state rows.
        shadow: P values in the compute format, where that is another.
        buffers: floating-point buffers.
        activations: the most that a forward and a backward pass over a batch hold beside all of this: the batch,
            activations, the gradients as autograd makes them, and workspaces inside operators. Probed, not computed.
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
        """What stays from round to round."""
        return self.weights + self.gradients + self.corrections + self.state + self.shadow + self.buffers

    @property
    def whole(self) -> int:
        """All of it."""
        return self.row + self.activations


def learner_bytes(
    num_values: int,
    num_buffer_values: int,
    num_states: int,
    *,
    master_bytes: int,
    compute_bytes: int,
    activations: int,
) -> LearnerBytes:
    """What a learner of a model with P = `num_values` needs; padding to 128 bytes a block is not counted.

    `master_bytes` and `compute_bytes` are those of a value, in rows and in a pass.
    """
    values = num_values * master_bytes
    return LearnerBytes(
        weights=values,
        gradients=values,
        corrections=values,
        state=num_states * values,
        shadow=num_values * compute_bytes if compute_bytes != master_bytes else 0,
        buffers=num_buffer_values * master_bytes,
        activations=activations,
    )


def predicted_bytes(own: LearnerBytes, num_learners: int, *, at_once: int, fixed: int = 0) -> int:
    """Peak of K learners on a device, of which `at_once` run at the same moment::

        fixed + (z, z_prev and the sum of corrections: 3 P values) + K · row + at_once · activations

    `fused`, `threads` and `streams` have all K at once; `serial` has one, as learners in turn use the same memory.
    `fixed` is what else is there: the data set, the template, the context of the device.
    """
    assert 1 <= at_once <= num_learners, f"{at_once} of {num_learners} learners cannot run at once"
    return fixed + 3 * own.weights + num_learners * own.row + at_once * own.activations
