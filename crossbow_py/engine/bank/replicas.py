"""The bank of replicas: K models of one architecture, their gradients and optimizer state, and the average model z.

Learner j's stream writes row j of every buffer; the averaging stream writes z, z_prev and `total`. The bank itself
does not synchronise: executors order the accesses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.errors import BaseWrittenError, UserError
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.binding import bind, bindings_of, find_rebound, find_written_base, find_written_copy
from crossbow_py.engine.bank.frozen_base import FrozenBase, base_of
from crossbow_py.engine.bank.layout import (
    Block,
    Order,
    Rows,
    TrainedRow,
    add_present,
    buffer_layout,
    clone_all,
    copy_present,
    norm,
    parameter_layout,
)
from crossbow_py.engine.bank.row_optimizer import RowOptimizer
from crossbow_py.engine.bank.saved import Add, mean_buffers, num_saved, saved_base
from crossbow_py.engine.modules.dropout import replace_dropout
from crossbow_py.engine.modules.precision import Precision

MakeRowOptimizer = Callable[[Sequence[Block], Mapping[str, Tensor], Mapping[str, Tensor]], RowOptimizer | None]
CENTRAL = ("z", "z_prev", "velocity")  # keys of `state_dict()` that belong to no learner; not all rules have the last
_COUNTER = "num_batches_tracked"


class ReplicaBank:
    """K replicas of one architecture in one allocation.

    Args:
        template: the architecture, and the initial weights of z and of every replica; copied, never changed.
        num_learners: K.
        device: where the rows are.
        precision: its master dtype is that of the rows, its compute dtype that of the modules.
        state_names: the optimizer state to keep (`Optimizer.state_names`).
        capacity: the number of rows allocated, at least K; K by default.
        channels_last: whether 4-D weights are stored channels-last.
        order: of rows in memory, see `engine/bank/layout.py`; `rows` by default on CPU, and `blocks` elsewhere.
        num_devices: the number of devices that share one z, each with a bank of K learners.
        device_index: the index of this bank's device among them.
        training: whether to allocate what training needs. Without it the bank has only weights and buffers, and z,
            z_prev and `total` are one row.
        has_velocity: whether the averaging rule keeps a velocity of z.
        has_corrections: whether it has corrections; without them `corrections` has shapes, but no memory.
        gradient_mean: the averaging rule's groups of learners that share a gradient.
        matrices: the names of the parameters that the optimizer takes as matrices.
        groups: the optimizer's groups of parameters, for those in one.
        row_optimizer: makes what steps a row from its blocks, weights and gradients, if that keeps its own state.
        one_row: whether learners have one row of weights, gradients and state, as is right where all step by the same
            gradients.
        shares_base: whether frozen parameters are the same for all learners, and held once.
        base: those of another bank, to share with it.

    Attributes:
        base: frozen parameters, which are in none of the `Rows`.
        one_row: as given; rows of gradients are then one that each learner may write, and their sum is in `total`.
        weights, gradients, corrections, state: `Rows [capacity, P]`; the optimizer's state by name.
        buffers: floating-point buffers, `Rows [capacity, buffer values]`.
        z, z_prev, total: `Rows [1, P]`: the average model, the one before it, and the sum of the last corrections.
        velocity: the velocity of z, `Rows [1, P]`, or None.
        total_squares: the sum of squares of each piece of `total`, where an update computes these and does not write
            `total`; else None.
        optimizers: what steps each row, see `RowOptimizer`; empty where states are rows.
        step_counts: the number of optimizer steps each learner has taken.
        has_dropout: whether the modules draw random numbers from the learners' generators.
        dropout_rates: a dropout rate for each learner, or None for what its layers say.
        counters: BatchNorm's counters of batches, int64 `[capacity, len(counter_names)]`.
    """

    def __init__(
        self,
        template: nn.Module,
        num_learners: int,
        *,
        device: torch.device,
        precision: Precision,
        state_names: tuple[str, ...],
        capacity: int | None = None,
        channels_last: bool = True,
        order: Order | None = None,
        num_devices: int = 1,
        device_index: int = 0,
        training: bool = True,
        has_velocity: bool = False,
        has_corrections: bool = True,
        gradient_mean: GradientMean | None = None,
        matrices: Collection[str] = (),
        groups: Mapping[str, int] | None = None,
        row_optimizer: MakeRowOptimizer | None = None,
        one_row: bool = False,
        shares_base: bool = True,
        base: FrozenBase | None = None,
    ) -> None:
        self.one_row, self._has_corrections = one_row, has_corrections
        self.device, self.precision, self.state_names = device, precision, state_names
        self._row_optimizer = row_optimizer
        self.num_devices, self.device_index = num_devices, device_index
        self.template = template
        self.layout = parameter_layout(template, channels_last, matrices, groups)
        self.buffer_layout = buffer_layout(template)
        self.order: Order = order or ("rows" if device.type == "cpu" else "blocks")
        rows = None if shares_base else max(capacity or num_learners, num_learners)
        self.base = base or base_of(template, rows, precision, device, channels_last)
        self.num_learners, self._training, self._gradient_mean = num_learners, training, gradient_mean
        self.z, self.z_prev, self.total = (self._rows(1) for _ in range(3)) if training else [self._rows(1)] * 3
        self._summed_gradients: list[Tensor] = []
        self.velocity = self._rows(1) if has_velocity else None
        self.total_squares: Tensor | None = None
        self._allocate(max(capacity or num_learners, num_learners))
        self.z.load(0, dict(self.template.named_parameters()))
        self.z_prev.copy_row(0, self.z)
        for learner in range(num_learners):
            self.reset_learner(learner)
            self.buffers.load(learner, dict(self.template.named_buffers()))

    @property
    def is_single(self) -> bool:
        """Return whether there is one learner on one device: plain SGD, where z is w."""
        return self.num_learners * self.num_devices == 1

    @property
    def num_values(self) -> int:
        """The number of values of one replica, trained or frozen."""
        return self.layout.num_values + self.base.num_values

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of parameters and floating-point buffers, by name."""
        blocks = [*self.layout.blocks, *self.buffer_layout.blocks]
        frozen = {name: list(own.shape) for name, own in self.base.master(0).items()}
        return {**{block.name: list(block.shape) for block in blocks}, **frozen}

    @property
    def replicas_identical(self) -> bool:
        """Return whether all replicas are equal: there is one, or all step by the same gradients."""
        mean = self._gradient_mean
        return self.is_single or (mean is not None and mean.num_groups(self.num_learners, self.num_devices) == 1)

    @property
    def z_is_learner(self) -> bool:
        """Return whether z is any of the learners: all are equal, and no velocity moves it away from them."""
        return self.replicas_identical and self.velocity is None

    @property
    def gradient_groups(self) -> list[range]:
        """This bank's learners in groups that share a gradient; a group each where none is shared."""
        return (self._gradient_mean or GradientMean(1)).groups(self.num_learners)

    @property
    def total_learners(self) -> int:
        """The number of learners on all devices."""
        return self.num_learners * self.num_devices

    @property
    def first_learner(self) -> int:
        """The index of this bank's first learner among those of all devices."""
        return self.num_learners * self.device_index

    def new_flat(self) -> Rows:
        """Return a row of zeros with the layout of z."""
        return self._rows(1)

    def _rows(self, rows: int, device: torch.device | None = None) -> Rows:
        return Rows(self.layout, rows, self.precision.master, device or self.device, self.order, self.one_row)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self.weights, trained = self._rows(capacity), capacity if self._training else 0
        self.gradients = self._rows(trained)
        self.corrections = self._rows(trained, None if self._has_corrections else torch.device("meta"))
        self.state = {name: self._rows(trained) for name in self.state_names}
        self.buffers = Rows(self.buffer_layout, capacity, self.precision.master, self.device)
        if not self.base.is_shared:
            self.base = FrozenBase(self.template, capacity, self.precision, self.device, self.layout.channels_last)
        self.shadow = self.weights
        if self.precision.has_shadow:
            self.shadow = Rows(self.layout, capacity, self.precision.compute, self.device, self.order, self.one_row)
        self.step_counts = [0] * capacity
        # Shapes without memory, on "meta", have no generator of their own.
        drawn_on = "cpu" if self.device.type == "meta" else self.device
        self.generators = [torch.Generator(drawn_on) for _ in range(capacity)]
        self.dropout_rates: list[float | None] = [None] * capacity
        self.counter_names = [name for name, _ in self.template.named_buffers() if name.endswith(_COUNTER)]
        self.counters = torch.zeros(capacity, len(self.counter_names), dtype=torch.int64, device=self.device)
        self._modules = [self._bind(learner) for learner in range(capacity)]
        self._bound = [bindings_of(module) for module in self._modules]
        # What autograd differentiates, in layout order: `torch.autograd.grad` needs the very Parameter objects.
        named = [dict(module.named_parameters()) for module in self._modules]
        self._trained = [[own[name] for name in self.layout.names] for own in named]
        self._gradient_views = [list(self.gradients.shaped(j).values()) for j in range(trained)]
        blocks = self.layout.blocks
        make, views = self._row_optimizer, [(self.weights.shaped(j), self.gradients.shaped(j)) for j in range(trained)]
        self.optimizers = [own for pair in views if make is not None and (own := make(blocks, *pair)) is not None]
        self._trained_rows = [
            TrainedRow(
                weights=self.weights.trained(learner),
                gradients=self.gradients.trained(learner),
                corrections=self.corrections.trained(learner),
                state={name: rows.trained(learner) for name, rows in self.state.items()},
                z=self.z.trained(),
                shadow=self.shadow.trained(learner) if self.precision.has_shadow else None,
                num_decayed=self.weights.num_decayed,
                num_matrices=self.weights.num_matrices,
                matrices=self.weights.matrices(),
                groups=self.weights.groups,
                step=self.optimizers[learner].step if self.optimizers else None,
            )
            for learner in range(trained)
        ]
        self._stacked_gradients: dict[range, list[Tensor]] = {}

    def _bind(self, learner: int) -> nn.Module:
        """Return a copy of the template whose parameters and buffers are views of row `learner`."""
        # New parameters in the copy's memo save a copy of their values, which `bind` replaces.
        parameters = [own for own in self.template.parameters() if type(own) is nn.Parameter]
        bound = {id(own): nn.Parameter(own.data, own.requires_grad) for own in parameters}
        module = copy.deepcopy(self.template, dict(bound))
        self.has_dropout = replace_dropout(module, self.generators[learner])
        counters = {name: self.counters[learner, index] for index, name in enumerate(self.counter_names)}
        base = self.base.row(learner)
        master, shadow = {**self.weights.shaped(learner), **base}, {**self.shadow.shaped(learner), **base}
        bind(module, master, shadow, {**self.buffers.shaped(learner), **counters})
        return module.train(self._training)

    def check_bindings(self, averages: bool) -> None:
        """Check that modules are still views of their rows; `averages` says that learners follow an average model.

        Raises UserError if a forward replaced a parameter or buffer, or wrote where it is lost: a copy in compute
        precision; BaseWrittenError if it wrote frozen parameters while learners follow an average model or share them.
        """
        follows = averages or (self.base.is_shared and self.num_learners > 1)
        for learner in range(self.num_learners):
            module, bound = self._modules[learner], self._bound[learner]
            found = find_rebound(module, bound)
            if found is None and self.precision.has_shadow:
                found = find_written_copy(module, bound)
            if found is not None:
                raise UserError(found)
            if follows and (found := find_written_base(module, bound)) is not None:
                raise BaseWrittenError(found)

    def module(self, learner: int) -> nn.Module:
        """Return a learner's module, in training mode, or in evaluation mode where the bank is not for training."""
        return self._modules[learner]

    def trained_parameters(self, learner: int) -> list[nn.Parameter]:
        """Return the parameters that autograd differentiates, in layout order."""
        return self._trained[learner]

    def store_gradients(self, learner: int, gradients: Sequence[Tensor | None]) -> None:
        """Write gradients, in layout order, to a row of G in master precision; a missing gradient is zero."""
        copy_present(self._gradient_views[learner], gradients)

    def add_gradients(self, learner: int, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, as of `store_gradients`, to a row of G in master precision."""
        add_present(self._gradient_views[learner], gradients)

    def store_stacked_gradients(self, gradients: Sequence[Tensor | None], learners: range | None = None) -> None:
        """Write gradients `[K, *shape]`, in layout order, to the rows of `learners` as `store_gradients` does."""
        copy_present(self.stacked_gradients(learners), gradients)

    def stacked_gradients(self, learners: range | None = None) -> list[Tensor]:
        """Return views `[K, *shape]` of the rows of G, in layout order. `learners` defaults to all."""
        learners = range(self.num_learners) if learners is None else learners
        if learners not in self._stacked_gradients:
            views = list(self.gradients.stacked(len(learners), learners.start).values())
            self._stacked_gradients[learners] = views
        return self._stacked_gradients[learners]

    @property
    def summed_gradients(self) -> list[Tensor]:
        """Views `[*shape]` of `total`, in layout order, where gradients of all learners are summed."""
        self._summed_gradients = self._summed_gradients or list(self.total.shaped().values())
        return self._summed_gradients

    def trained_row(self, learner: int) -> TrainedRow:
        """Return the vectors that a correction task works on."""
        return self._trained_rows[learner]

    def replica_tensors(self, learner: int, has_state: bool = True) -> list[Tensor]:
        """Return a learner's trained weights and optimizer state; without `has_state` torch's own begins anew."""
        row = self._trained_rows[learner]
        found = [*row.weights, *(part for parts in row.state.values() for part in parts)]
        if self.optimizers and not has_state:
            self.optimizers[learner].reset()
        return found + (self.optimizers[learner].tensors() if self.optimizers else [])

    def refresh_shadow(self, learner: int) -> None:
        """Update the compute-precision copy of a row, where there is one, after its weights have changed."""
        if self.precision.has_shadow:
            self.shadow.copy_row(learner, self.weights, learner)

    def stacked(self) -> dict[str, Tensor]:
        """Return the active weights `{name: [K, *shape]}`, contiguous along K."""
        return self.weights.stacked(self.num_learners)

    def load_learner(self, learner: int, module: nn.Module) -> None:
        """Copy the weights and buffers of a module to a learner."""
        self.load_values(learner, {**dict(module.named_parameters()), **dict(module.named_buffers())})

    @torch.no_grad()
    def load_values(self, learner: int, values: Mapping[str, Tensor]) -> None:
        """Copy weights and floating-point buffers by name to a learner; raises ValueError, see `FrozenBase.load`."""
        self.weights.load(learner, values)
        self.buffers.load(learner, values)
        self.base.load(learner, values)
        self.refresh_shadow(learner)

    def reset_learner(self, learner: int) -> None:
        """Set w_j ← z with zero optimizer state, as a new learner starts."""
        self.weights.copy_row(learner, self.z)
        self._zero_state(learner)
        self.refresh_shadow(learner)

    def resize(self, num_learners: int) -> None:
        """Grow or shrink to K = `num_learners`, between rounds. Within capacity no live row moves.

        A new learner is a copy of z with zero state and the mean BatchNorm statistics. Where replicas were equal, as
        one learner is, z = z_prev = w first; where they become equal, w = z. Learners that share a gradient are equal
        afterwards.
        """
        before, were_alike, groups = self.num_learners, self.replicas_identical, self.gradient_groups
        if self.z_is_learner and num_learners > before:
            self.adopt_learner()
        buffers = self.central_buffers()
        if num_learners > self.capacity:
            self._reallocate(num_learners)
        self.num_learners = num_learners
        for learner in range(before, num_learners):
            self.reset_learner(learner)
            self.buffers.load(learner, buffers)
        for learner in range(num_learners) if self.replicas_identical and not were_alike else ():
            self.weights.copy_row(learner, self.z)
            self.refresh_shadow(learner)
            self.buffers.load(learner, buffers)
        self.align_groups(groups)

    def trim(self) -> None:
        """Free the rows of learners that are gone. They stay if there is no memory to move the others."""
        if self.capacity > self.num_learners:
            with suppress(RuntimeError, MemoryError):
                self._reallocate(self.num_learners)

    def _reallocate(self, capacity: int) -> None:
        """Move the active rows to new memory. If memory runs out, the bank is left unchanged."""
        before, rows = dict(self.__dict__), self._active_rows()
        try:
            self._allocate(capacity)
        except (RuntimeError, MemoryError):
            self.__dict__.update(before)
            raise
        self._load_rows(rows)

    def reseed(self, nonfinite: Collection[int], buffers: Mapping[str, Tensor]) -> None:
        """Give non-finite learners these BatchNorm statistics, and z with zero state where their weights are lost."""
        for learner in self._lost(nonfinite):
            self.reset_learner(learner)
        for learner in nonfinite:
            self.buffers.load(learner, buffers)

    def _lost(self, nonfinite: Collection[int]) -> list[int]:
        """Return the non-finite learners whose weights are lost, because no finite one shares their gradients."""
        groups = [] if self.replicas_identical else self.gradient_groups
        return [learner for group in groups if all(other in nonfinite for other in group) for learner in group]

    def restart(self, momentum: str, add: Add | None = None, nonfinite: Collection[int] = ()) -> None:
        """Set w_j ← z and z at rest. Optimizer state changes as `momentum` says, see `settle_state`."""
        if self.is_single and self.velocity is None:
            return
        self.settle_state(momentum, add, nonfinite)
        for learner in range(self.num_learners):
            self.weights.copy_row(learner, self.z)
            self.refresh_shadow(learner)
        self._rest()

    def settle_state(self, momentum: str, add: Add | None = None, nonfinite: Collection[int] = ()) -> None:
        """Change the learners' optimizer state: "reset" to zero, "keep" it, or "average" it over learners.

        In the average, the state of non-finite learners whose weights are lost counts as zero. `add` sums a vector
        over devices in place.
        """
        for rows in self.state.values() if momentum == "average" and not self.one_row else ():
            for learner in self._lost(nonfinite):
                rows.zero_row(learner)
            for stacked in rows.stacked(self.num_learners).values():
                mean = stacked.mean(0, keepdim=True)
                if add is not None:
                    on_host = mean.to("cpu", copy=True) / self.num_devices
                    add(on_host)
                    mean = on_host.to(mean)
                stacked.copy_(mean.expand_as(stacked))
        for learner in range(self.num_learners) if momentum == "reset" else ():
            self._zero_state(learner)

    def _zero_state(self, learner: int) -> None:
        # A new learner has the state of the others where all have one row.
        writes = self._training and not (self.one_row and learner > 0)
        for rows in (self.corrections, *self.state.values()) if writes else ():
            rows.zero_row(learner)
        if self.optimizers:
            self.optimizers[learner].reset()
        self.step_counts[learner] = 0

    def adopt_learner(self) -> None:
        """Set z ← w of the first learner, at rest, where it is any of them."""
        if self.z_is_learner:
            self.z.copy_row(0, self.weights, 0)
            self._rest()

    def _rest(self) -> None:
        """Bring z to rest: z_prev ← z, and no velocity."""
        self.z_prev.copy_row(0, self.z)
        if self.velocity is not None:
            self.velocity.zero_row(0)

    def central_buffers(self, learners: Sequence[int] | None = None, add: Add | None = None) -> dict[str, Tensor]:
        """Return the floating-point buffers of z: means over these learners of the bank, by default all.

        A mean of BatchNorm's variances includes the variance of the learners' means. `add` sums a vector over devices
        in place; with it the means are over all devices' learners.
        """
        chosen = list(range(self.num_learners) if learners is None else learners)
        stacked = {name: rows[chosen] for name, rows in self.buffers.stacked(self.num_learners).items()}
        return mean_buffers(stacked, add)

    def central_state(self, excluded: Sequence[int] = (), add: Add | None = None) -> dict[str, Tensor]:
        """Return the average model as a module's state dict, with tied parameters once; with K = 1, the learner.

        The buffers of `excluded` learners are left out of the means. For `add` see `central_buffers`.
        """
        if self.is_single:
            return self.learner_state(0)
        counted = [learner for learner in range(self.num_learners) if learner not in excluded]
        weights = {**self.z.shaped(), **self.base.master(0)}
        return {**self.integer_buffers(0), **weights, **self.central_buffers(counted, add)}

    def learner_state(self, learner: int) -> dict[str, Tensor]:
        """Return a learner's model as a module's state dict of views of its row."""
        weights = {**self.weights.shaped(learner), **self.base.master(learner)}
        return {**self.integer_buffers(learner), **weights, **self.buffers.shaped(learner)}

    def integer_buffers(self, learner: int) -> dict[str, Tensor]:
        """Return a learner's buffers that are not floating-point, by name."""
        named = self._modules[learner].named_buffers()
        return {name: buffer for name, buffer in named if not buffer.is_floating_point()}

    def state_dict(self) -> dict[str, Any]:
        """Return the active rows, `[K, *shape]` by name: independent of capacity and alignment.

        Frozen parameters that all learners share are one row.
        """
        rows = self._active_rows()
        return {
            "num_learners": self.num_learners,
            "weights": clone_all(rows["weights"]),
            "frozen": clone_all(rows["frozen"]),
            "state": {name: clone_all(stacked) for name, stacked in rows["state"].items()},
            "buffers": clone_all(rows["buffers"]),
            "integer_buffers": [clone_all(buffers) for buffers in rows["integer_buffers"]],
            "step_counts": rows["step_counts"],
            **({"optimizers": rows["optimizers"]} if self.optimizers else {}),
            "z": clone_all(self.z.shaped()),
            "z_prev": clone_all(self.z_prev.shaped()),
            **({} if self.velocity is None else {"velocity": clone_all(self.velocity.shaped())}),
        }

    def _active_rows(self) -> dict[str, Any]:
        """Return views `[K, *shape]` of the active rows, for `_load_rows`."""
        k = self.num_learners
        return {
            "weights": self.weights.stacked(k),
            "frozen": self.base.masters(k),
            "state": {name: rows.stacked(k) for name, rows in self.state.items()},
            "buffers": self.buffers.stacked(k),
            "integer_buffers": [self.integer_buffers(j) for j in range(k)],
            "step_counts": self.step_counts[:k],
            "optimizers": [own.state() for own in self.optimizers[:k]],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the `state_dict()` of a bank with the same architecture and optimizer; K becomes the saved one."""
        if num_saved(saved) != self.num_learners:
            self.resize(num_saved(saved))
        self.load_central(saved)
        self._load_rows(saved)

    def load_central(self, saved: Mapping[str, Any]) -> None:
        """Restore only z, z_prev and the velocity of a `state_dict()`, and what all learners share."""
        self.z.load(0, saved["z"])
        self.z_prev.load(0, saved["z_prev"])
        if self.velocity is not None:
            self.velocity.load(0, saved["velocity"])
        if self.base.is_shared:
            self.base.replace(saved_base(saved, 0))

    def _load_rows(self, saved: Mapping[str, Any]) -> None:
        for row in range(self.num_learners):
            self.load_row(row, saved, row)

    def load_row(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        """Restore a learner from any row of a `state_dict()`."""
        states = [(rows, saved["state"][name]) for name, rows in self.state.items()]
        for rows, values in [(self.weights, saved["weights"]), (self.buffers, saved["buffers"]), *states]:
            rows.load(row, {name: value[saved_row] for name, value in values.items()})
        self.base.load(row, saved_base(saved, saved_row))
        self._load_counters(row, saved, saved_row)
        if self.optimizers:
            self.optimizers[row].load(saved["optimizers"][saved_row])
        self.step_counts[row] = saved["step_counts"][saved_row]
        self.refresh_shadow(row)

    def clone_learner(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        """Make a new learner: w_j ← z with zero state, and the buffers of a row of a `state_dict()`."""
        self.reset_learner(row)
        self.buffers.load(row, {name: value[saved_row] for name, value in saved["buffers"].items()})
        self._load_counters(row, saved, saved_row)

    def _load_counters(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        for name, buffer in self.integer_buffers(row).items():
            buffer.copy_(saved["integer_buffers"][saved_row][name])

    @torch.no_grad()
    def average_gradients(self, mean: GradientMean, collective: Collective) -> None:
        """Set G_j ← Σ_i G_i / n over the n learners i of j's group.

        Gradients are summed in learner order, and the rows of a group are equal bit for bit. Enqueued on the current
        stream; the host waits only if the collective makes it. With several devices, `total` is scratch space.
        """
        for group in mean.groups(self.num_learners):
            first, *others = (self.gradients.trained(learner) for learner in group)
            for own in others:
                torch._foreach_add_(first, own)
            count = len(group)
            if mean.group_size is None and collective.num_devices > 1:
                count *= collective.num_devices
                total = self.total.trained()
                torch._foreach_copy_(total, first)
                collective.all_reduce_sum(self.total.storage)
                torch._foreach_copy_(first, total)
            torch._foreach_div_(first, float(count))
            for own in others:
                torch._foreach_copy_(own, first)

    def align_groups(self, before: Sequence[range] = ()) -> None:
        """Give all learners of a group the weights, optimizer state and step count of one of them.

        They differ where groups have new borders because learners came or went, and where memory ran out and only some
        stepped. Given the groups there were `before`, as many of these as possible go on.
        """
        known = sum(map(len, before))
        for number, group in enumerate(self.gradient_groups):
            own = before[number] if number < len(before) else range(known, self.num_learners)
            chosen = next((learner for learner in group if learner in own), group[0])
            for learner in group:
                if learner != chosen:
                    for rows in (self.weights, *self.state.values()):
                        rows.copy_row(learner, rows, chosen)
                    if self.optimizers:
                        self.optimizers[learner].load(self.optimizers[chosen].state())
                    self.step_counts[learner] = self.step_counts[chosen]
                    self.refresh_shadow(learner)

    def squared_distances(self, center: Rows | None = None, excluded: Collection[int] = ()) -> list[float]:
        """Return |w_j − c|² / |c|² of this bank's learners but the excluded over trained values; [] if c is zero.

        c is a row, z by default. Host–device synchronisation.
        """
        values = (center or self.z).trained()
        length = norm(values)
        learners = [learner for learner in range(self.num_learners) if learner not in excluded]
        distances = [norm(torch._foreach_sub(self.weights.trained(j), values)) for j in learners if length]
        return [(distance / length) ** 2 for distance in distances]

    def correction_norm(self) -> float | None:
        """Return |share · Σ_j c_j| of the last round that averaged, or None where replicas are equal.

        Host–device synchronisation.
        """
        if self.replicas_identical:
            return None
        return norm(self.total.trained()) if self.total_squares is None else math.sqrt(float(self.total_squares.sum()))
