"""A model on every executor, compared with `serial`: weights, buffers and z after some rounds in float64."""

from __future__ import annotations

import copy
import gc
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.averaging import SMA, Stage
from crossbow_py.core.errors import one_line
from crossbow_py.data.build import make_feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.update_choice import choose_update
from experiments.zoo.models import Entry

EXECUTOR_NAMES = ("threads", "fused", "fused_threads")
NUM_LEARNERS, BATCH_SIZE, NUM_ROUNDS, LEARNING_RATE = 2, 2, 2, 0.01
# A difference is one of the last digit, grown, up to TOLERANCE, or up to MULTIPLE times what becomes of a change of the
# initial weights by CHANGE, relatively, in the same rounds of `serial`.
TOLERANCE, MULTIPLE, CHANGE = 1e-7, 10.0, 1e-12

State = list[dict[str, Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
Data = tuple[Any, Tensor]


def compared(entry: Entry, executors: Sequence[str] = EXECUTOR_NAMES) -> dict[str, Any]:
    """Compare by each executor: `outcome` ok, refused, DIFFERENT or crash, with `difference` or `reason`.

    `serial` comes first; where it crashes there is nothing to compare with.
    """
    try:
        torch.manual_seed(0)
        template, data = entry.build(), entry.data(NUM_LEARNERS * BATCH_SIZE * NUM_ROUNDS)
        rounds = partial(after_rounds, template, data, entry.loss)
        initial, serial = rounds("serial", num_rounds=0)[0], rounds("serial")[0]
    except Exception as error:
        return {"serial": {"outcome": "crash", "reason": one_line(error)[:300]}}
    found: dict[str, Any] = {"serial": {"outcome": "ok"}}
    control: float | None = None
    for executor in executors:
        row = found[executor] = _against(serial, initial, partial(rounds, executor))
        if row.get("difference", 0.0) > TOLERANCE:
            if control is None:
                moved = after_rounds(_changed(template), data, entry.loss, "serial")[0]
                control = relative_difference(moved, serial, initial)
            row |= {"control": control, "outcome": "ok" if row["difference"] <= MULTIPLE * control else "DIFFERENT"}
    return found


def _changed(template: nn.Module) -> nn.Module:
    found = copy.deepcopy(template)
    with torch.no_grad():
        for parameter in found.double().parameters():
            parameter.mul_(1 + CHANGE * torch.randn_like(parameter))
    return found


def _against(serial: State, initial: State, rounds: Callable[[], tuple[State, list[str]]]) -> dict[str, Any]:
    try:
        state, looped = rounds()
    except FusionError as error:
        return {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        return {"outcome": "crash", "reason": one_line(error)[:300]}
    return {"outcome": "ok", "difference": relative_difference(state, serial, initial), "looped": looped}


def after_rounds(
    template: nn.Module, data: Data, loss: Loss, executor: str, num_rounds: int = NUM_ROUNDS
) -> tuple[State, list[str]]:
    """The state of every learner and of z after some rounds, and the operators that were run learner by learner."""
    # Of several groups of learners each has a thread; elsewhere one is fastest beside other models.
    torch.set_num_threads(NUM_LEARNERS if executor == "fused_threads" else 1)
    tasks = _tasks(template, data, loss, executor)
    runner = EXECUTORS[executor](tasks)
    try:
        for index in range(num_rounds):
            runner.submit(_plan(tasks, index))
        runner.drain()
    finally:
        runner.close()
    bank = tasks.bank
    states = [bank.learner_state(learner) for learner in range(NUM_LEARNERS)]
    states.append(bank.z.shaped())
    found = [{name: value.clone() for name, value in state.items()} for state in states]
    looped = sorted(set(getattr(runner, "looped", [])))
    gc.collect()
    return found, looped


def relative_difference(state: State, reference: State, initial: State) -> float:
    """‖a − b‖ of a parameter or buffer against how far the reference moved it, the largest over all of them.

    What moved less than a millionth of everything counts as if it had moved as much. Infinite where values are not
    finite or integers differ.
    """
    return max(_distance(*states) for states in zip(state, reference, initial, strict=True))


def _distance(own: dict[str, Tensor], other: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    exact = [name for name, value in other.items() if not value.is_floating_point()]
    if any(not torch.equal(own[name], other[name]) for name in exact):
        return math.inf
    # A mask's infinities are nobody's business: they stay where they are.
    names = [name for name, value in other.items() if name not in exact and bool(value.isfinite().all())]
    moved = {name: float((other[name] - initial[name]).norm()) for name in names}
    least = max(1e-6 * math.hypot(*moved.values()), sys.float_info.min)  # z stays where it is in a first round
    distances = [float((own[name] - other[name]).norm()) / max(moved[name], least) for name in names]
    return max(distance if math.isfinite(distance) else math.inf for distance in distances)


def _tasks(template: nn.Module, data: Data, loss: Loss, executor: str) -> RoundTasks:
    optimizer, rule = SGD(), SMA()
    bank = ReplicaBank(
        template, NUM_LEARNERS, device=torch.device("cpu"), precision=FP64, state_names=optimizer.state_names,
        order=EXECUTORS[executor].ORDER, has_velocity=rule.has_velocity, gradient_mean=rule.gradient_mean,
    )  # fmt: skip
    return RoundTasks(
        bank,
        update=choose_update(optimizer, rule, bank.device, FP64.master)[0],
        feed=make_feed(data, BATCH_SIZE, 0, channels_last=True, dtype=FP64.compute),
        loss=loss,
        seed=0,
        collective=Collective(),
    )


def _plan(tasks: RoundTasks, index: int) -> Round:
    rate = LEARNING_RATE
    return Round(
        index=index,
        starts=tuple((index * NUM_LEARNERS + learner) * BATCH_SIZE for learner in range(NUM_LEARNERS)),
        learning_rates=(rate,) * NUM_LEARNERS,
        together=tasks.update.rule.round(Stage(index, NUM_LEARNERS, rate, 1.0)),
    )
