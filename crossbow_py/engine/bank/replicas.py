"""The bank of replicas: K models of one architecture, their gradients and optimizer state, and the average model z.

Ownership: learner j's stream writes row j of every buffer; the averaging stream writes z, z_prev and `total`.
Nothing here synchronises; executors order the accesses.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.binding import bind, bindings_of, find_rebound, find_written
from crossbow_py.engine.bank.central import Add, checksum, level, mean_buffers
from crossbow_py.engine.bank.gradient_mean import align_groups, lost
from crossbow_py.engine.bank.layout import (
    Order,
    Rows,
    TrainedRow,
    buffer_layout,
    clone_all,
    copy_present,
    parameter_layout,
)
from crossbow_py.engine.bank.saved_bank import num_saved
from crossbow_py.engine.modules.dropout import replace_dropout
from crossbow_py.engine.modules.precision import Precision

_COUNTER = "num_batches_tracked"


class ReplicaBank:
    """K replicas of one architecture in one allocation.

    Args:
        template: the architecture and the initial weights of z and of every replica; copied, never changed.
        num_learners: K.
        device, precision: where rows live; master dtype of rows, and compute dtype of the modules.
        state_names: optimizer state rows to keep (`Optimizer.STATE`).
        capacity: rows allocated, at least K (default K).
        channels_last: store 4-D weights channels-last.
        order: of the rows in memory, see `engine.layout`; default `rows` on CPU and `blocks` elsewhere.
        num_devices: that have a bank each around one z, with as many learners.
        device_index: of this one among them.
        training: whether there is room for what training takes; without it a bank has weights and buffers alone, and no
            z of its own.
        has_velocity, gradient_mean: as the averaging rule says.

    Attributes:
        weights, gradients, corrections: `Rows [capacity, P]`; state: name → Rows; buffers: float buffers likewise.
        z, z_prev, total: `Rows` of one row, P values: average model, the one before, sum of the last corrections.
        velocity: of z, likewise; None without.
        total_squares: sums of squares of that sum, piece by piece, from an update that leaves `total` alone; else None.
        step_counts: optimizer steps taken, per learner.
        has_dropout: whether modules draw from the learners' generators.
        dropout_rates: of each learner, in place of what its dropout layers say; None leaves it to these.
        counters: `[capacity, n]`, the learners' own BatchNorm counters of batches, of `counter_names`.
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
        gradient_mean: GradientMean | None = None,
    ) -> None:
        self.device, self.precision, self.state_names = device, precision, state_names
        self.num_devices, self.device_index = num_devices, device_index
        self.template = template
        self.layout = parameter_layout(self.template, channels_last)
        self.buffer_layout = buffer_layout(self.template)
        self.order: Order = order or ("rows" if device.type == "cpu" else "blocks")
        self.num_trained = self.layout.count("decayed", "undecayed")
        self.num_learners, self._training, self._gradient_mean = num_learners, training, gradient_mean
        self.z, self.z_prev, self.total = (self._rows(1) for _ in range(3)) if training else [self._rows(1)] * 3
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
        """Whether there is one learner in all, on one device: plain SGD, where z is w."""
        return self.num_learners * self.num_devices == 1

    @property
    def replicas_alike(self) -> bool:
        """Whether z is any of the learners: there is one, or all step by the same gradients."""
        mean = self._gradient_mean
        return self.is_single or (mean is not None and mean.num_groups(self.num_learners, self.num_devices) == 1)

    @property
    def gradient_groups(self) -> list[range]:
        """The learners here by who shares a gradient: each by itself, where none do."""
        return (self._gradient_mean or GradientMean(1)).groups(self.num_learners)

    @property
    def total_learners(self) -> int:
        """K over all devices."""
        return self.num_learners * self.num_devices

    @property
    def first_learner(self) -> int:
        """Which learner of all devices' is this bank's first."""
        return self.num_learners * self.device_index

    def new_flat(self) -> Rows:
        """Zeros like z: one row."""
        return self._rows(1)

    def _rows(self, rows: int) -> Rows:
        return Rows(self.layout, rows, self.precision.master, self.device, self.order)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self.weights, trained = self._rows(capacity), capacity if self._training else 0
        self.gradients, self.corrections = self._rows(trained), self._rows(trained)
        self.state = {name: self._rows(trained) for name in self.state_names}
        self.buffers = Rows(self.buffer_layout, capacity, self.precision.master, self.device)
        self.shadow = self.weights
        if self.precision.has_shadow:
            self.shadow = Rows(self.layout, capacity, self.precision.compute, self.device, self.order)
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
        self._trained = [[own[name] for name in self.layout.names[: self.num_trained]] for own in named]
        self._gradient_views = [list(self.gradients.shaped(j).values())[: self.num_trained] for j in range(trained)]
        self._trained_rows = [self._trained_row(learner) for learner in range(trained)]
        self._stacked_gradients: dict[range, list[Tensor]] = {}

    def _trained_row(self, learner: int) -> TrainedRow:
        return TrainedRow(
            weights=self.weights.trained(learner),
            gradients=self.gradients.trained(learner),
            corrections=self.corrections.trained(learner),
            state={name: rows.trained(learner) for name, rows in self.state.items()},
            z=self.z.trained(),
            shadow=self.shadow.trained(learner) if self.precision.has_shadow else None,
            num_decayed=self.weights.num_decayed,
        )

    def _bind(self, learner: int) -> nn.Module:
        """The learner's module on row `learner`, as it trains, or for evaluation where the bank is not for training."""
        # Parameters of its own, which are bound to the row: their values need not be copied first.
        parameters = [own for own in self.template.parameters() if type(own) is nn.Parameter]
        bound = {id(own): nn.Parameter(own.data, own.requires_grad) for own in parameters}
        module = copy.deepcopy(self.template, dict(bound))
        self.has_dropout = replace_dropout(module, self.generators[learner])
        counters = {name: self.counters[learner, place] for place, name in enumerate(self.counter_names)}
        master, shadow = self.weights.shaped(learner), self.shadow.shaped(learner)
        bind(module, master, shadow, {**self.buffers.shaped(learner), **counters})
        return module.train(self._training)

    def check_bindings(self, averages: bool) -> None:
        """Raise UserError where a module has left its row, or was written where that is lost; see `find_written`."""
        for learner in range(self.num_learners):
            module, bound = self._modules[learner], self._bound[learner]
            found = find_rebound(module, bound) or find_written(module, bound, self.precision.has_shadow, averages)
            if found is not None:
                raise UserError(found)

    def module(self, learner: int) -> nn.Module:
        """Learner's model on its row, in training mode, or in evaluation mode where the bank is not for training."""
        return self._modules[learner]

    def trained_parameters(self, learner: int) -> list[nn.Parameter]:
        """The parameters autograd differentiates, in layout order."""
        return self._trained[learner]

    def store_gradients(self, learner: int, gradients: Sequence[Tensor | None]) -> None:
        """G row ← gradients, cast to master precision; a missing gradient is zero."""
        copy_present(self._gradient_views[learner], gradients)

    def store_stacked_gradients(self, gradients: Sequence[Tensor | None], learners: range | None = None) -> None:
        """G ← gradients `[K, *shape]` of learners, in layout order; as `store_gradients` does for one."""
        copy_present(self.stacked_gradients(learners), gradients)

    def stacked_gradients(self, learners: range | None = None) -> list[Tensor]:
        """Views `[K, *shape]` of G, in layout order; of neighbouring learners, by default of all."""
        learners = range(self.num_learners) if learners is None else learners
        if learners not in self._stacked_gradients:
            views = list(self.gradients.stacked(len(learners), learners.start).values())
            self._stacked_gradients[learners] = views[: self.num_trained]
        return self._stacked_gradients[learners]

    def trained_row(self, learner: int) -> TrainedRow:
        """What a correction task works on."""
        return self._trained_rows[learner]

    def refresh_shadow(self, learner: int) -> None:
        """Write the compute-precision copy of a row after its weights moved. Nothing to do in one precision."""
        if self.precision.has_shadow:
            self.shadow.copy_row(learner, self.weights, learner)

    def stacked(self) -> dict[str, Tensor]:
        """Active weights `{name: [K, *shape]}`, contiguous along K."""
        return self.weights.stacked(self.num_learners)

    def load_learner(self, learner: int, module: nn.Module) -> None:
        """Start a learner from another module's weights and buffers than z's."""
        self.weights.load(learner, dict(module.named_parameters()))
        self.buffers.load(learner, dict(module.named_buffers()))
        self.refresh_shadow(learner)

    def reset_learner(self, learner: int) -> None:
        """w_j ← z with zero optimizer state: what a new learner starts from."""
        self.weights.copy_row(learner, self.z)
        self._zero_state(learner)
        self.refresh_shadow(learner)

    def resize(self, num_learners: int) -> None:
        """Grow or shrink to K = `num_learners`, between rounds. Within capacity no live row moves.

        A new learner is a copy of z with zero state and the mean BatchNorm statistics. From replicas alike on, as from
        1, z = z_prev = w first; where they become it, w = z. Learners that share a gradient are then made alike.
        """
        before, were_alike, groups = self.num_learners, self.replicas_alike, self.gradient_groups
        if were_alike and num_learners > before:
            self.adopt_learner()
        buffers = self.central_buffers()
        if num_learners > self.capacity:
            self._reallocate(num_learners)
        self.num_learners = num_learners
        for learner in range(before, num_learners):
            self.reset_learner(learner)
            self.buffers.load(learner, buffers)
        for learner in range(num_learners) if self.replicas_alike and not were_alike else ():
            self.weights.copy_row(learner, self.z)
            self.refresh_shadow(learner)
            self.buffers.load(learner, buffers)
        align_groups(self, groups)

    def trim(self) -> None:
        """Give back the rows of learners that are gone; where there is no room to do so, they stay."""
        if self.capacity > self.num_learners:
            with suppress(RuntimeError, MemoryError):
                self._reallocate(self.num_learners)

    def _reallocate(self, capacity: int) -> None:
        """Move the active rows to new memory. When memory does not hold it, the bank is as it was."""
        before, rows = dict(self.__dict__), self._active_rows()
        try:
            self._allocate(capacity)
        except (RuntimeError, MemoryError):
            self.__dict__.update(before)
            raise
        self._load_rows(rows, self.num_learners)

    def reseed(self, sick: Collection[int], buffers: Mapping[str, Tensor]) -> None:
        """BatchNorm statistics as given, and w_j ← z with zero state for those that are lost."""
        for learner in lost(self, sick):
            self.reset_learner(learner)
        for learner in sick:
            self.buffers.load(learner, buffers)

    def restart(self, momentum: str, add: Add | None = None, sick: Collection[int] = ()) -> None:
        """Restart: w_j ← z, and z at rest. Optimizer state per `momentum`, see `settle_state`."""
        if self.is_single:
            return
        self.settle_state(momentum, add, sick)
        for learner in range(self.num_learners):
            self.weights.copy_row(learner, self.z)
            self.refresh_shadow(learner)
        self._rest()

    def settle_state(self, momentum: str, add: Add | None = None, sick: Collection[int] = ()) -> None:
        """Learners' optimizer state: reset to zero, keep as it is, or average over learners.

        That of the `sick` whose gradients nobody shares is zero in the mean. For `add` see `central_buffers`.
        """
        for rows in self.state.values() if momentum == "average" else ():
            for learner in lost(self, sick):
                rows.zero_row(learner)
            for stacked in rows.stacked(self.num_learners).values():
                level(stacked, add, self.num_devices)
        for learner in range(self.num_learners) if momentum == "reset" else ():
            self._zero_state(learner)

    def _zero_state(self, learner: int) -> None:
        for rows in (self.corrections, *self.state.values()) if self._training else ():
            rows.zero_row(learner)
        self.step_counts[learner] = 0

    def adopt_learner(self) -> None:
        """z ← w of the first learner, at rest: the only one (K = 1 is plain SGD: z is w), or one of replicas alike."""
        self.z.copy_row(0, self.weights, 0)
        self._rest()

    def _rest(self) -> None:
        """z stands still: z_prev ← z, and no velocity."""
        self.z_prev.copy_row(0, self.z)
        if self.velocity is not None:
            self.velocity.zero_row(0)

    def central_buffers(self, learners: Sequence[int] | None = None, add: Add | None = None) -> dict[str, Tensor]:
        """Float buffers of z: the mean of the learners' (default all), variances with the between-learner term.

        With `add`, which sums a vector over devices in place, of all devices' learners.
        """
        chosen = list(range(self.num_learners) if learners is None else learners)
        return mean_buffers({name: rows[chosen] for name, rows in self.buffers.stacked(self.num_learners).items()}, add)

    def central_state(self, excluded: Sequence[int] = (), add: Add | None = None) -> dict[str, Tensor]:
        """The average model as a module state dict (tied parameters once); with K = 1 it is the learner.

        The buffers of `excluded` learners do not count. For `add` see `central_buffers`.
        """
        if self.is_single:
            return self.learner_state(0)
        counted = [learner for learner in range(self.num_learners) if learner not in excluded]
        return {**self._integer_buffers(0), **self.z.shaped(), **self.central_buffers(counted, add)}

    def learner_state(self, learner: int) -> dict[str, Tensor]:
        """One learner's model as a module state dict (views of its row)."""
        return {**self._integer_buffers(learner), **self.weights.shaped(learner), **self.buffers.shaped(learner)}

    def _integer_buffers(self, learner: int) -> dict[str, Tensor]:
        named = self._modules[learner].named_buffers()
        return {name: buffer for name, buffer in named if not buffer.is_floating_point()}

    def state_dict(self) -> dict[str, Any]:
        """Everything of the active rows, by name and stacked `[K, *shape]`: independent of capacity and alignment."""
        rows = self._active_rows()
        return {
            "num_learners": self.num_learners,
            "weights": clone_all(rows["weights"]),
            "state": {name: clone_all(stacked) for name, stacked in rows["state"].items()},
            "buffers": clone_all(rows["buffers"]),
            "integer_buffers": [clone_all(buffers) for buffers in rows["integer_buffers"]],
            "step_counts": rows["step_counts"],
            "z": clone_all(self.z.shaped()),
            "z_prev": clone_all(self.z_prev.shaped()),
            **({} if self.velocity is None else {"velocity": clone_all(self.velocity.shaped())}),
        }

    def _active_rows(self) -> dict[str, Any]:
        """What `_load_rows` takes: views of the learners' own values, stacked `[K, *shape]`."""
        k = self.num_learners
        return {
            "weights": self.weights.stacked(k),
            "state": {name: rows.stacked(k) for name, rows in self.state.items()},
            "buffers": self.buffers.stacked(k),
            "integer_buffers": [self._integer_buffers(j) for j in range(k)],
            "step_counts": self.step_counts[:k],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `state_dict()` of a bank with the same architecture and optimizer; K follows the saved one."""
        if num_saved(saved) != self.num_learners:
            self.resize(num_saved(saved))
        self.load_central(saved)
        self._load_rows(saved, self.num_learners)

    def load_central(self, saved: Mapping[str, Any]) -> None:
        """z, z_prev and the velocity alone, of `state_dict()`."""
        self.z.load(0, saved["z"])
        self.z_prev.load(0, saved["z_prev"])
        if self.velocity is not None:
            self.velocity.load(0, saved["velocity"])

    def _load_rows(self, saved: Mapping[str, Any], num_rows: int) -> None:
        for row in range(num_rows):
            self.load_row(row, saved, row)

    def load_row(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        """One learner from a row of `state_dict()`, maybe another one's."""
        states = [(rows, saved["state"][name]) for name, rows in self.state.items()]
        for rows, values in [(self.weights, saved["weights"]), (self.buffers, saved["buffers"]), *states]:
            rows.load(row, {name: value[saved_row] for name, value in values.items()})
        self._load_counters(row, saved, saved_row)
        self.step_counts[row] = saved["step_counts"][saved_row]
        self.refresh_shadow(row)

    def clone_learner(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        """A new learner: w_j ← z with zero state, and the buffers of a row of `state_dict()`."""
        self.reset_learner(row)
        self.buffers.load(row, {name: value[saved_row] for name, value in saved["buffers"].items()})
        self._load_counters(row, saved, saved_row)

    def _load_counters(self, row: int, saved: Mapping[str, Any], saved_row: int) -> None:
        for name, buffer in self._integer_buffers(row).items():
            buffer.copy_(saved["integer_buffers"][saved_row][name])

    def z_checksum(self) -> int:
        """52 bits that are others, in all likelihood, when a bit of z is. Host–device synchronisation."""
        return checksum(self.z.storage)
