"""Tables of the average model's accuracy with every kind of BatchNorm statistics, and what these cost."""

from __future__ import annotations

from statistics import mean, median

from crossbow_py.core.intervals import estimate
from experiments.batch_norm.variants import MEAN, VARIANTS
from experiments.grids.report import Result, Run, accuracy, by_cell, has_diverged, notes
from experiments.tables.markdown import NONE, markdown_table


def healthy(result: Result) -> dict[str, list[Run]]:
    """The runs of every cell that did not diverge; a cell of which all did is left out."""
    found = {name: [run for run in runs if not has_diverged(run)] for name, runs in by_cell(result).items()}
    return {name: runs for name, runs in found.items() if runs}


def curve(run: Run, variant: str) -> list[float]:
    """Test accuracies with one kind of statistics, evaluation by evaluation."""
    return [line["variants"][variant]["test_accuracy"] for line in run["measured"]]


def accuracies_table(result: Result) -> str:
    others = [name for name in VARIANTS if name != MEAN]
    header = ["", "K", "epochs", MEAN, *(f"{name}: − {MEAN}" for name in others), "n"]
    rows = []
    for name, runs in healthy(result).items():
        learners = str(runs[0]["summary"]["num_learners"])
        for place in range(min(len(run["measured"]) for run in runs)):
            epoch = mean(run["measured"][place]["epoch"] for run in runs)
            own = accuracy(estimate([curve(run, MEAN)[place] for run in runs]))
            differences = [
                accuracy(estimate([curve(run, each)[place] - curve(run, MEAN)[place] for run in runs]), signed=True)
                for each in others
            ]
            rows.append([name, learners, f"{epoch:.2f}", own, *differences, str(len(runs))])
    return markdown_table(header, rows)


def costs_table(result: Result) -> str:
    runs = [run for own in healthy(result).values() for run in own]
    alone = [run for run in runs if run["alone"]]
    rows = []
    for name in VARIANTS:
        lines = [line["variants"][name] for run in runs for line in run["measured"]]
        seconds = [line["variants"][name]["statistics_s"] for run in alone for line in run["measured"]]
        share = median(line["statistics_s"] / line["evaluation_s"] for line in lines)
        rows.append([name, f"{median(seconds):.3f}" if seconds else NONE, f"{share:.3f}"])
    return markdown_table(["statistics", "seconds", "of an evaluation's time"], rows)


def result_text(result: Result) -> str:
    picture = f"![{result['title']}](results/{result['grid']}.png)"
    if not healthy(result):
        return f"All runs diverged. {notes(result)}"
    said = f"{notes(result)} Costs as parts of an evaluation's time are of all runs."
    return f"{picture}\n\n{accuracies_table(result)}\n\n{costs_table(result)}\n\n{said}"


TABLES = {"all": result_text}
