"""Optimizers over rows of the bank, with per-learner hyper-parameters.

Each class is the settings of its rule (frozen) and the pure update of one learner's row, in place. The learner's
correction c_j is applied by the caller, from the weights before the step.

To add one: a class here, and its entry in `OPTIMIZERS`. It then runs on CPUs by torch's operators. The C code
(engine/native/update.c) and `device_update.py` know those below alone, `kernel_update.py` SGD and AdamW.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import Settings, check, setting
from crossbow_py.engine.bank.layout import Block, Matrix, TrainedRow, norm
from crossbow_py.engine.bank.row_optimizer import RowOptimizer
from crossbow_py.engine.update.groups import ParameterGroup, as_groups, freeze, group_numbers
from crossbow_py.engine.update.newton_schulz import orthogonalize
from crossbow_py.engine.update.torch_target import Facts, facts, made, path_of
from crossbow_py.models.lora import is_part_of_adapter


@dataclass(frozen=True)
class NativeStep:
    """The arguments of the C function of this index for some vectors: its numbers, in its order, and λ."""

    function: int
    values: tuple[float, ...]
    decay: float = 0.0


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LEAST_NORM = 1e-7  # of weights that are all zero, which stay so
Place = tuple[Matrix, Sequence[Tensor], Sequence[Tensor]]
PerLearner = float | tuple[float, ...]


def for_learner(value: PerLearner, learner: int) -> float:
    """Return a learner's value of a hyper-parameter, which is one for all or a list with one for each learner."""
    return value[learner] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Optimizer(Settings, ABC):
    """The base of all optimizers: settings, the names of the state rows, and the update of one learner.

    `NATIVE_STEP` is the index, in native/update.c, of the C function that does what `step` does from `native_steps`,
    or of one of them; or None. With such functions there are at most two state rows, and eight values each.
    """

    GROUP: ClassVar[str] = "optimizer"
    NAME: ClassVar[str]
    noise_power: ClassVar[float | None] = 0.5  # of the batch, that a rate of equally noisy steps is in proportion to
    STATE: ClassVar[tuple[str, ...]]
    NATIVE_STEP: ClassVar[int | None] = None
    KEEPS_OWN_STATE: ClassVar[bool] = False  # whether `row_optimizer` has the state, and not rows of the bank
    TAKES_MATRICES: ClassVar[bool] = False  # whether there are `matrices`, which are prepared before a step

    learning_rate: PerLearner
    weight_decay: PerLearner
    clip_norm: float | None = setting(None, "largest gradient norm of a learner; null does not clip", above=0)
    decay_norm_and_bias: bool = setting(False, "apply weight decay to normalisation parameters and biases too")
    groups: tuple[ParameterGroup, ...] = setting(
        (), "groups of parameters, each with names and, of its own, rate, weight_decay, clip_norm or frozen"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", as_groups(self.groups))
        check(self)

    def check_learners(self, num_learners: int | str) -> None:
        """Raise UserError if a list of a setting has not exactly one value for each learner."""
        for name, value in self.lists().items():
            lists, remedy = f"optimizer.{name} lists {len(value)} values", "give one value for all, or"
            if isinstance(num_learners, str):
                raise UserError(f"{lists}, and num_learners is {num_learners}; {remedy} set num_learners={len(value)}.")
            if len(value) != num_learners:
                raise UserError(f"{lists} for {num_learners} learners; {remedy} one for each learner.")

    def per_learner(self) -> list[str]:
        """Return the names of the settings that may differ between learners."""
        return [field.name for field in fields(self) if field.type == "PerLearner"]

    def lists(self) -> dict[str, tuple[float, ...]]:
        """Return the settings that list a value for each learner, by name."""
        given = {name: getattr(self, name) for name in self.per_learner()}
        return {name: value for name, value in given.items() if isinstance(value, tuple)}

    def shared(self) -> dict[str, Any]:
        """Return the settings that are the same for all learners of a bank, and the optimizer's name."""
        own = self.per_learner()
        return {"name": self.NAME, **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}}

    def prepare(self, learners: Sequence[int], rows: Sequence[TrainedRow]) -> None:
        """Put the steps of these learners' matrices in place of their gradients, and move their state."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state rows."""
        return self.STATE

    @property
    def prepares_weights(self) -> bool:
        """Return whether `prepare` changes the weights of matrices too."""
        return False

    @abstractmethod
    def step(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        """Apply step number `step_count`, from 1, to a learner's weights and state in place; gradients are scratch.

        Matrices have been prepared.
        """

    def native_steps(self, learner: int, learning_rate: float, step_count: int) -> tuple[NativeStep, ...]:
        """Return what the C function takes: for all vectors, or for those of matrices and for the others."""
        raise NotImplementedError(f"{self.NAME} has no native step")

    @property
    def has_groups(self) -> bool:
        """Return whether some groups of parameters take other steps."""
        return any(group.acts for group in self.groups)

    @property
    def clips_groups(self) -> bool:
        """Return whether some groups of parameters are clipped by themselves."""
        return any(group.clip_norm is not None for group in self.groups)

    def prepared(self, module: nn.Module) -> nn.Module:
        """Freeze the parameters of frozen groups, and return the model. Raises UserError for what cannot train it."""
        if self.groups:
            freeze(self.groups, module)
        return module

    def row_optimizer(
        self, blocks: Sequence[Block], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> RowOptimizer | None:
        """Return what steps a row and keeps its state, where that is no state in rows; see `RowOptimizer`."""
        return None

    @property
    def num_states(self) -> int:
        """The number of values that a step keeps for each weight."""
        return len(self.state_names)

    @property
    def sized_as(self) -> Optimizer:
        """The optimizer whose step takes as much memory besides state, and can be probed by shapes alone."""
        return self

    def group_numbers(self, module: nn.Module) -> dict[str, int]:
        """Return the groups, from 1 on, of the parameters that take other steps, by name."""
        found = group_numbers(self.groups, module)
        return {name: number for name, number in found.items() if number and self.groups[number - 1].acts}

    def of_group(self, number: int) -> Optimizer:
        """Return the optimizer of a group's parameters, but for its learning rate."""
        return self._of_groups[number]

    def rate_of(self, number: int) -> float:
        """Return the factor of a group's learning rate."""
        return self.groups[number - 1].rate if number else 1.0

    @cached_property
    def _of_groups(self) -> tuple[Optimizer, ...]:
        decays = [None, *(group.weight_decay for group in self.groups)]
        plain = replace(self, groups=())
        return tuple(plain if decay is None else plain.with_weight_decay(decay) for decay in decays)

    def with_weight_decay(self, decay: float) -> Optimizer:
        """Return the optimizer with another λ for all parameters and learners."""
        return replace(self, weight_decay=decay)

    def step_by_group(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        """Apply `step` to each group of a learner's parameters."""
        numbers = sorted(set(row.groups))
        if numbers in ([], [0]):
            self.step(learner, row, learning_rate, step_count)
            return
        for number in numbers:
            rate = learning_rate * self.rate_of(number)
            self.of_group(number).step(learner, row.of_group(number), rate, step_count)

    def group_scales(self, row: TrainedRow) -> tuple[float, ...]:
        """Return the factors that clip the gradients of every group, where some are clipped by themselves.

        Those that are not are clipped together, by the norm of all of them. Host–device synchronisation on CUDA.
        """
        limits = [None, *(group.clip_norm for group in self.groups)]
        alone = [number if limit is not None else 0 for number, limit in enumerate(limits)]
        scales = dict[int, float]()
        for number in set(alone):
            own = [each for each, of in zip(row.gradients, row.groups, strict=True) if alone[of] == number]
            limit = limits[number] if number else self.clip_norm
            scales[number] = clip_scale(norm(own), limit) if own else 1.0
        return tuple(scales[number] for number in alone)

    def matrices(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters to take as matrices. Raises UserError if there must be some."""
        return ()

    def remarks(self, module: nn.Module) -> list[str]:
        """Return what a user should know of how the model's parameters are taken, a line each."""
        return []

    def decay(self, learner: int) -> float:
        """Return the learner's λ."""
        return for_learner(self.weight_decay, learner)

    def num_decayed(self, row: TrainedRow) -> int:
        """Return how many of the row's vectors, from the first, take weight decay."""
        return len(row.weights) if self.decay_norm_and_bias else row.num_decayed

    def gradient_scale(self, norm: float) -> float:
        """Return the factor that clips a gradient of this norm."""
        return clip_scale(norm, self.clip_norm)


def clip_scale(norm: float, limit: float | None) -> float:
    """Return the factor that clips a gradient of a norm to a limit, if there is one, as torch does."""
    return limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, in torch.optim.SGD's form (dampening 0)::

        u ← m·u + (g + λ·w);    w ← w − γ·u          or, with Nesterov,  w ← w − γ·(g + λ·w + m·u)
    """

    NAME: ClassVar[str] = "sgd"
    noise_power: ClassVar[float | None] = 1.0
    STATE: ClassVar[tuple[str, ...]] = ("momentum",)
    NATIVE_STEP: ClassVar[int | None] = 0

    learning_rate: PerLearner = setting(0.1, "γ before the schedule; a list gives each learner its own", minimum=0)
    momentum: PerLearner = setting(0.9, "m, the learner's own momentum", minimum=0, below=1)
    weight_decay: PerLearner = setting(0.0, "λ, L2 term added to the gradient", minimum=0)
    nesterov: bool = setting(False, "Nesterov's form of momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise UserError("optimizer.nesterov=true needs momentum, got optimizer.momentum=0; set momentum above 0.")

    def step(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        momentum, decay = for_learner(self.momentum, learner), self.decay(learner)
        count, gradients = self.num_decayed(row), row.gradients
        if decay and count:
            torch._foreach_add_(gradients[:count], row.weights[:count], alpha=decay)
        if momentum:
            velocity = row.state["momentum"]  # u
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, gradients)
            if self.nesterov:
                torch._foreach_add_(gradients, velocity, alpha=momentum)
            else:
                gradients = velocity
        torch._foreach_add_(row.weights, gradients, alpha=-learning_rate)

    def native_steps(self, learner: int, learning_rate: float, step_count: int) -> tuple[NativeStep, ...]:
        values = for_learner(self.momentum, learner), learning_rate, float(self.nesterov)
        return (NativeStep(0, values, self.decay(learner)),)


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), in torch.optim.AdamW's form; t is per learner::

        a ← β1·a + (1−β1)·g;   v ← β2·v + (1−β2)·g²
        w ← (1 − γ·λ)·w − γ · (a / (1−β1^t)) / (√(v / (1−β2^t)) + ε)
    """

    NAME: ClassVar[str] = "adamw"
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    NATIVE_STEP: ClassVar[int | None] = 1

    learning_rate: PerLearner = setting(0.001, "γ before the schedule; a list gives each learner its own", minimum=0)
    beta1: PerLearner = setting(0.9, "decay of the gradient average", minimum=0, below=1)
    beta2: PerLearner = setting(0.999, "decay of the squared gradient average", minimum=0, below=1)
    epsilon: float = setting(1e-8, "added to the denominator", above=0)
    weight_decay: PerLearner = setting(0.01, "λ, decoupled weight decay", minimum=0)

    def step(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        beta1, beta2 = for_learner(self.beta1, learner), for_learner(self.beta2, learner)
        decay, count = self.decay(learner), self.num_decayed(row)
        if decay and count:
            torch._foreach_mul_(row.weights[:count], 1 - learning_rate * decay)
        first, second = row.state["exp_avg"], row.state["exp_avg_sq"]  # a and v
        torch._foreach_lerp_(first, row.gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, row.gradients, row.gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**step_count))
        torch._foreach_add_(denominators, self.epsilon)
        torch._foreach_addcdiv_(row.weights, first, denominators, -learning_rate / (1 - beta1**step_count))

    def native_steps(self, learner: int, learning_rate: float, step_count: int) -> tuple[NativeStep, ...]:
        beta1, beta2 = for_learner(self.beta1, learner), for_learner(self.beta2, learner)
        values = (
            1 - learning_rate * self.decay(learner),
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step_count),
            self.epsilon,
            -learning_rate / (1 - beta1**step_count),
        )
        return (NativeStep(1, values, self.decay(learner)),)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (Jordan et al., 2024): orthogonalised momentum for matrices, SGD or AdamW for the rest.

    Matrices are weights of layers between the first and the last. Layers are linear, convolutional, attention's and
    embeddings, in the order in which the model lists them, so that of a transformer its embedding is the first. A
    weight is a matrix of its outputs by the rest of its sizes, one for queries, keys and values is three. Both matrices
    of a LoRA adapter are taken, wherever it is. NS is Newton–Schulz, see `newton_schulz.py`; with G = U·S·Vᵀ, NS(G) is
    about U·Vᵀ::

        u ← m·u + g
        o ← s · NS(g + m·u)  or, without Nesterov's form,  s · NS(u)
        w ← (1 − γ·λ)·w − γ·o

    s is √max(1, outputs / rest), or with adjust_lr_fn=match_rms_adamw 0.2·√max(outputs, rest), by which rates are those
    of AdamW (Liu et al. 2025). With `normalize_weights` each matrix is brought to the norm √outputs before its step, so
    that a rate means the same throughout training (Jordan's airbench94); to a norm layer after it that makes no
    difference. Other parameters, as of norms, biases, embeddings, grouped and transposed convolutions, of the first and
    last layer, and those that are no layer's weight, take steps of SGD in Nesterov's form, or of AdamW, with settings
    of their own and the same schedule.
    """

    NAME: ClassVar[str] = "muon"
    STATE: ClassVar[tuple[str, ...]] = ("momentum",)
    NATIVE_STEP: ClassVar[int | None] = SGD.NATIVE_STEP
    TAKES_MATRICES: ClassVar[bool] = True

    learning_rate: PerLearner = setting(0.02, "γ before the schedule; a list gives each learner its own", above=0)
    momentum: PerLearner = setting(0.95, "m, the learner's own momentum", minimum=0, below=1)
    weight_decay: PerLearner = setting(0.0, "λ, decoupled weight decay", minimum=0)
    nesterov: bool = setting(True, "Nesterov's form of momentum")
    ns_steps: int = setting(
        5, "Newton–Schulz iterations; each more magnifies float32's rounding 3.4 times", minimum=1, maximum=8
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = setting(
        "original", "how steps follow from the shape of a matrix, as in torch.optim.Muon"
    )
    normalize_weights: bool = setting(False, "bring each matrix to the norm √outputs before its step")
    other_optimizer: Literal["sgd", "adamw"] = setting("sgd", "whose steps other parameters take")
    other_learning_rate: PerLearner = setting(
        0.1, "γ of other parameters, before the schedule; about 0.001 with adamw", minimum=0
    )
    other_momentum: PerLearner = setting(0.9, "m of other parameters, or β1 of adamw", minimum=0, below=1)
    other_beta2: PerLearner = setting(0.999, "β2 of other parameters, with adamw", minimum=0, below=1)
    other_weight_decay: PerLearner = setting(
        0.0, "λ of other parameters, added to the gradient, or decoupled with adamw", minimum=0
    )

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.STATE if self.other_optimizer == "sgd" else (*self.STATE, "exp_avg_sq")

    def matrices(self, module: nn.Module) -> tuple[str, ...]:
        layers = [(name, own) for name, each in module.named_modules() for own in _weights_of(each)]
        of_model = [own for name, own in layers if not is_part_of_adapter(name)]
        left_out = {id(own) for own in (*of_model[:1], *of_model[-1:])}
        for each in module.modules():
            if isinstance(each, nn.Embedding | nn.EmbeddingBag) or getattr(each, "groups", 1) != 1:
                left_out |= {id(own) for own in each.parameters(recurse=False)}
        taken = {id(own) for _, own in layers if own.requires_grad} - left_out
        found = tuple(name for name, own in module.named_parameters() if id(own) in taken)
        if not found:
            rule = "optimizer=muon needs linear or convolutional layers between the model's first and last one"
            raise UserError(f"{rule}, and there are none to train; set optimizer=sgd or optimizer=adamw.")
        return found

    def remarks(self, module: nn.Module) -> list[str]:
        found = self.matrices(module)
        others = sum(own.requires_grad for own in module.parameters()) - len(found)
        which = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
        weights = "1 weight" if len(found) == 1 else f"{len(found)} weights"
        left = f"{others} other parameters are left to {self.other_optimizer}"
        return [f"Muon orthogonalises {weights} ({which}); {left}."]

    def step(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        count = row.num_matrices
        matrices, others = row.part(0, count), row.part(count, len(row.weights))
        if matrices.weights:  # not every group of parameters has some
            self.plain.step(learner, matrices, learning_rate, step_count)
        if others.weights:
            self.others.step(learner, self.row_of_others(others), self._other_rate(learner, learning_rate), step_count)

    def native_steps(self, learner: int, learning_rate: float, step_count: int) -> tuple[NativeStep, ...]:
        others = self._other_rate(learner, learning_rate)
        return (
            *self.plain.native_steps(learner, learning_rate, step_count),
            *self.others.native_steps(learner, others, step_count),
        )

    def _other_rate(self, learner: int, learning_rate: float) -> float:
        scheduled = learning_rate / for_learner(self.learning_rate, learner)
        return for_learner(self.other_learning_rate, learner) * scheduled

    def prepare(self, learners: Sequence[int], rows: Sequence[TrainedRow]) -> None:
        """Move the momentum of matrices, and write their steps o in place of their gradients; normalise their weights.

        Raises an error for lack of memory, if at all, before it changes state or weights.
        """
        places: list[Place] = []
        moved: list[tuple[list[Tensor], list[Tensor]]] = []
        for learner, row in zip(learners, rows, strict=True):
            momentum, count = for_learner(self.momentum, learner), row.num_matrices
            before, gradients = row.state["momentum"][:count], row.gradients[:count]
            velocity = list(torch._foreach_mul(before, momentum))  # u
            torch._foreach_add_(velocity, gradients)
            if self.nesterov:
                torch._foreach_add_(gradients, velocity, alpha=momentum)
            given = gradients if self.nesterov else velocity
            places += [(matrix, given, gradients) for matrix in row.matrices]
            moved.append((before, velocity))
        self.orthogonalize(places)
        for before, velocity in moved:
            torch._foreach_copy_(before, velocity)
        if self.prepares_weights:
            self.normalize([matrix.of(row.weights) for row in rows for matrix in row.matrices])

    def with_weight_decay(self, decay: float) -> Optimizer:
        return replace(self, weight_decay=decay, other_weight_decay=decay)

    @property
    def prepares_weights(self) -> bool:
        return self.normalize_weights

    def normalize(self, weights: list[Tensor], opened: Tensor | None = None) -> None:
        """Bring matrices to the norm √outputs, in place, or only those for which `opened`, one bool each, is true."""
        factors = list(torch._foreach_norm(weights))
        torch._foreach_clamp_min_(factors, _LEAST_NORM)
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, [math.sqrt(each.shape[0]) for each in weights])
        if opened is not None:
            factors = list(torch.where(opened, torch.stack(factors), 1.0).unbind())  # times 1 is the same bits
        torch._foreach_mul_(weights, factors)

    def orthogonalize(self, places: Sequence[Place]) -> None:
        """Write s · NS of matrices: where they are in vectors, those to read, and those to write."""
        found = orthogonalize([matrix.of(given) for matrix, given, _ in places], self.ns_steps)
        scales = [self._scale(matrix) for matrix, _, _ in places]
        if scaled := [index for index, scale in enumerate(scales) if scale != 1]:
            torch._foreach_mul_([found[index] for index in scaled], [scales[index] for index in scaled])
        torch._foreach_copy_([matrix.of(out) for matrix, _, out in places], found)

    def _scale(self, matrix: Matrix) -> float:
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, matrix.rows / matrix.columns))
        return 0.2 * math.sqrt(max(matrix.rows, matrix.columns))

    @cached_property
    def plain(self) -> SGD:
        """The step along what was orthogonalised. Without momentum, λ is decoupled."""
        return SGD(momentum=0.0, weight_decay=self.weight_decay)

    @cached_property
    def others(self) -> SGD | AdamW:
        """The step of other parameters, but for its learning rate."""
        if self.other_optimizer == "adamw":
            return AdamW(
                beta1=self.other_momentum, beta2=self.other_beta2, weight_decay=self.other_weight_decay,
                decay_norm_and_bias=self.decay_norm_and_bias,
            )  # fmt: skip
        return SGD(
            momentum=self.other_momentum, weight_decay=self.other_weight_decay, nesterov=self.other_momentum != 0,
            decay_norm_and_bias=self.decay_norm_and_bias,
        )  # fmt: skip

    def row_of_others(self, row: TrainedRow) -> TrainedRow:
        """Return a row of other parameters with its state under the names that their optimizer has for it."""
        state = zip(self.others.STATE, row.state.values(), strict=True)
        return replace(row, state=dict(state))


@dataclass(frozen=True)
class TorchOptimizer(Optimizer):
    """Any optimizer of torch, or of your own, by its dotted path: optimizer.target=torch.optim.RMSprop.

    Each learner has an object of its own. It is slower than those above, as it steps parameter by parameter. `target`
    is the class, derived from `torch.optim.Optimizer`, or its dotted path, which is called with `args`. Learning rate
    and weight decay are set before each step, the latter to 0 for biases and norms, as for the other optimizers; what
    the class has as its default does not count.
    """

    NAME: ClassVar[str] = "torch"
    noise_power: ClassVar[float | None] = None  # it may be any
    STATE: ClassVar[tuple[str, ...]] = ()
    KEEPS_OWN_STATE: ClassVar[bool] = True

    learning_rate: PerLearner = setting(0.01, "γ before the schedule; a list gives each learner its own", minimum=0)
    weight_decay: PerLearner = setting(0.0, "λ, whatever the target makes of it", minimum=0)
    target: str | type[torch.optim.Optimizer] = setting("", "class of an optimizer, such as torch.optim.RMSprop")
    args: dict[str, Any] = setting({}, "keyword arguments of the target")

    @cached_property
    def _facts(self) -> Facts:
        return facts(self.target, for_learner(self.learning_rate, 0), self.args)

    @property
    def num_states(self) -> int:
        return self._facts.num_states

    @property
    def sized_as(self) -> Optimizer:
        return SGD()

    def prepared(self, module: nn.Module) -> nn.Module:
        decays = [self.weight_decay, *(group.weight_decay for group in self.groups)]
        if not self._facts.decays and any(decays):
            target = f"optimizer.target={path_of(self.target)}"
            raise UserError(f"{target} has no weight_decay, got one; set it to 0, and its own in optimizer.args.")
        return super().prepared(module)

    def row_optimizer(
        self, blocks: Sequence[Block], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> RowOptimizer:
        rate = for_learner(self.learning_rate, 0)
        return RowOptimizer(lambda groups: made(self.target, groups, rate, self.args), blocks, weights, gradients)

    def step_by_group(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        self.step(learner, row, learning_rate, step_count)

    def step(self, learner: int, row: TrainedRow, learning_rate: float, step_count: int) -> None:
        assert row.step is not None, "the bank has a RowOptimizer for each row"

        def settings(number: int, decays: bool) -> dict[str, float]:
            decay = self.of_group(number).decay(learner) if decays or self.decay_norm_and_bias else 0.0
            rate = {"lr": learning_rate * self.rate_of(number)}
            return {**rate, "weight_decay": decay} if self._facts.decays else rate

        row.step(settings)


def _weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weights of a layer, outputs first, that Muon may take as matrices if it is not the first or last."""
    if isinstance(module, (*_LAYERS, nn.Embedding, nn.EmbeddingBag)):
        return [module.weight]
    if isinstance(module, nn.MultiheadAttention):  # one of three, or three
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [own for name in names if (own := getattr(module, name)) is not None]
    return []


def side_by_side(each: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer for several learners, each with its own; their shared settings must be equal."""
    first = each[0]
    assert all(own.shared() == first.shared() for own in each), "learners of a bank have one update rule"
    values: dict[str, Any] = {name: tuple(getattr(own, name) for own in each) for name in first.per_learner()}
    return replace(first, **{name: own for name, own in values.items() if len(set(own)) > 1})


def with_first_settings(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with the first learner's settings for all learners."""
    settings = {name: getattr(optimizer, name) for name in optimizer.per_learner()}
    return replace(optimizer, **{name: value[0] for name, value in settings.items() if isinstance(value, tuple)})


OPTIMIZERS: dict[str, type[Optimizer]] = {each.NAME: each for each in (SGD, AdamW, Muon, TorchOptimizer)}
