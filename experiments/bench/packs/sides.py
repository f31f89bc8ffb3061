"""The sides of a comparison of packs. Each works for ever, in a process of its own, and passes the gate at every tick.

One model at a time: `default_loop`, PyTorch's tutorial loop; `tuned_single` (see experiments/bench/sides/tuned.py);
`captured`, on CUDA one model with a graph a step; `serial`, a pack of one by this project. Their images/s are those of
any number of models trained one after another. The others are packs: models that share one feed and never meet
(`averaging=independent`), by the executor the side is named after; an image counts once for every model that took it.
"""

from __future__ import annotations

from typing import cast

from crossbow_py.core.errors import CrossbowError
from experiments.bench.gate import Gate
from experiments.bench.packs.inference import predict
from experiments.bench.packs.layers import run_layers
from experiments.bench.packs.mixed import train_mixed
from experiments.bench.packs.side import CAPTURED, DEFAULT, TUNED, PackSide
from experiments.bench.packs.training import train_captured, train_pack
from experiments.bench.packs.workloads import PackWorkload
from experiments.bench.sides.side import Side
from experiments.bench.sides.tuned import default_loop, tuned_single
from experiments.bench.workloads import Effort, Workload


def run_pack_side(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """Work until the gate raises FinishedError. Raises CrossbowError when a side cannot be had."""
    own, of_pack = cast(PackSide, side), cast(PackWorkload, workload)
    try:
        if own.work == "layers":
            run_layers(own, of_pack, gate, effort)
        elif own.work == "inference":
            predict(own, of_pack, gate, effort)
        else:
            _train(own, of_pack, gate, effort)
    except RuntimeError as error:  # of a capture, or memory
        words = str(error).splitlines() or ["no more was said"]
        raise CrossbowError(f"{type(error).__name__}: {words[0]}") from error


def _train(side: PackSide, workload: PackWorkload, gate: Gate, effort: Effort) -> None:
    if side.side == DEFAULT:
        default_loop(workload, gate)
    elif side.side == TUNED:
        tuned_single(side.precision, workload, gate, effort)
    elif side.side == CAPTURED:
        train_captured(side, workload, gate)
    elif side.mixed:
        train_mixed(side, workload, gate)
    else:
        train_pack(side, workload, gate)
