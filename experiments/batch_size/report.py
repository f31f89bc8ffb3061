"""Tables of the epochs to a target by batch size: of one model, and of learners with as many samples a round."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.grids.report import Reached, Result, Run, by_cell, notes, reached, when
from experiments.tables.markdown import NONE, markdown_table

ONE, LEARNERS = "one model", "learners of 32"
LEARNER_BATCH = 32


@dataclass(frozen=True)
class Best:
    """The best rate of a side with so many samples a round, over `n` seeds."""

    side: str
    total: int
    rate: float
    reached: Reached
    n: int


def best_rates(result: Result) -> list[Best]:
    """Find the best rate by side and samples a round: most seeds reach the target, then from the fewest samples."""
    found: dict[tuple[str, int], Best] = {}
    for runs in by_cell(result).values():
        first = runs[0]
        key = (first["labels"]["side"], first["summary"]["num_learners"] * first["summary"]["batch_size"])
        own = Best(*key, _rate(result, first), reached(runs, result["targets"][0]), len(runs))
        if key not in found or _rank(own) > _rank(found[key]):
            found[key] = own
    return list(found.values())


def _rate(result: Result, run: Run) -> float:
    settings = dict(word.split("=", 1) for word in f"{result['settings']} {run['settings']}".split())
    return float(settings["optimizer.learning_rate"])


def _rank(best: Best) -> tuple[float, float]:
    samples = best.reached.samples
    return best.reached.n / best.n, -float("inf") if samples is None else -samples


def batches_table(result: Result) -> str:
    found = {(best.side, best.total): best for best in best_rates(result)}
    header = ["samples a round"]
    for name in (ONE, f"K · {LEARNER_BATCH}"):
        header += [f"{name}: rate", "epochs", "seconds", "n"]
    rows = [
        [str(total), *(cell for side in (ONE, LEARNERS) for cell in _cells(found.get((side, total))))]
        for total in sorted({total for _, total in found})
    ]
    return markdown_table(header, rows)


def _cells(best: Best | None) -> list[str]:
    if best is None:
        return [""] * 4
    own = best.reached
    rate = f"{best.rate:.4g}" if own.n else NONE
    return [rate, when(own, own.epochs, best.n, "{:.2f}"), when(own, own.seconds, best.n, "{:.1f}"), str(best.n)]


def result_text(result: Result) -> str:
    return f"![{result['title']}](results/{result['grid']}.png)\n\n{batches_table(result)}\n\n{notes(result)}"


TABLES = {"all": result_text}
