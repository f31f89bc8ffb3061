"""How much of a round does Muon take?

    python experiments/muon_cost/run.py [--executor fused_threads --num-learners 4 --batch-size 16] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py import SGD, Muon
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.engine.update.optimizers import Optimizer
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.rounds import trained_window, trainer_on_noise
from experiments.bench.windows import Window, Windows, by_turns, spread
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]
MOST = 0.05
PLAIN, MUON = "SGD", "Muon"
SIDES: dict[str, Optimizer] = {
    PLAIN: SGD(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    MUON: Muon(learning_rate=0.05),
    "Muon, normalised weights": Muon(learning_rate=0.05, normalize_weights=True),
}
_SAMPLES = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--executor", default="fused_threads", help="of all sides (default %(default)s)")
    add("--num-learners", type=count, default=4, help="K (default %(default)s)")
    add("--batch-size", type=count, default=16, help="samples of a learner (default %(default)s)")
    add("--repetitions", type=count, default=12, help="windows of every side (default %(default)s)")
    add("--rounds", type=count, default=40, help="rounds of a window (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Windows of all sides by turns, in one process; ratios are taken within a turn."""
    trainers = {
        name: trainer_on_noise(
            "resnet32", _SAMPLES, batch_size=given.batch_size, num_learners=given.num_learners, optimizer=optimizer,
            averaging=SynchronousSGD(), executor=given.executor, precision="bf16", device="cpu",
        )
        for name, optimizer in SIDES.items()
    }  # fmt: skip
    windows: dict[str, Windows[Window]] = {name: Windows() for name in SIDES}
    for trainer in trainers.values():
        trainer.fit(max_rounds=5)
    for name in by_turns(tuple(SIDES), given.repetitions):
        images = given.num_learners * given.batch_size
        windows[name].add(partial(trained_window, trainers[name], images, max_rounds=given.rounds))
    rates = {name: own.rates() for name, own in windows.items()}
    shares = {
        name: [1 - own / base for own, base in zip(rates[name], rates[PLAIN], strict=True) if own and base]
        for name in SIDES
    }
    return {
        "model": "resnet32", "executor": given.executor, "num_learners": given.num_learners,
        "batch_size": given.batch_size, "n": given.repetitions, "rounds": given.rounds,
        "images_per_s": {name: spread([each for each in own if each]) for name, own in rates.items()},
        "share_of_round": {name: spread(own) for name, own in shares.items() if name != PLAIN},
        "dropped": sum(own.dropped for own in windows.values()),
    }  # fmt: skip


def headline(result: Result) -> str:
    share = result["share_of_round"][MUON]
    if share is None:
        return "Other programs were busy in every window."
    said = "reached" if share["median"] <= MOST else "missed"
    return f"Muon takes {spread_text(share, '.1%')} of a round (at most {MOST:.0%} was wanted: {said})."


def result_text(result: Result) -> str:
    rows = [
        [name, spread_text(own, ".0f"), spread_text(result["share_of_round"][name], ".1%") if name != PLAIN else ""]
        for name, own in result["images_per_s"].items()
    ]
    setting = (
        f"{result['model']}, K = {result['num_learners']}, batches of {result['batch_size']}, {result['executor']}, "
        f"bf16, n = {result['n']} windows of {result['rounds']} rounds, {result['dropped']} dropped."
    )
    table = markdown_table(["", "images/s", "share of a round more than SGD"], rows)
    return "\n\n".join([headline(result), setting, table])


TABLES = {"all": result_text, "headline": headline}


if __name__ == "__main__":
    raise SystemExit(main())
