"""What a study of many members shows: lines on a terminal, results.json, a picture, TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import versions
from crossbow_py.data.sources import DataSource
from crossbow_py.many.loop import ManyLoop
from crossbow_py.many.results import BAND, FEW, Results, by_group, curve
from crossbow_py.many.train_many import ManyRun
from crossbow_py.telemetry.loggers.chosen import TENSORBOARD
from crossbow_py.telemetry.pictures.files import INSTALL_MATPLOTLIB, has_matplotlib, save_picture
from crossbow_py.telemetry.records import TENSORBOARD_FOLDER, write_json
from crossbow_py.telemetry.screen import Screen, ScreenConsole, counted, fact

RESULTS_FILE, CURVES_FILE, OUT_OF_FOLD_FILE = "results.json", "curves.png", "out_of_fold.npy"
_PLAIN_EVERY_S = 10.0  # between lines of progress without a terminal


class ManyConsole(ScreenConsole):
    """Talks of a study on a screen."""

    WIDTH_FOR_A_BAR: ClassVar[int] = 80

    def __init__(self, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(screen, clock)
        self._next_plain_s = clock() + _PLAIN_EVERY_S

    def on_start(self, experiment: str, source: DataSource, study: ManyRun) -> None:
        """Say what is trained on what."""
        size = f"{study.train_feed.num_samples:,} training samples"
        self._begin(
            [f"{experiment}: {counted(len(study.members), 'member')} on {source.name}, {size}, {study.choices.device}"]
        )

    def on_progress(self, loop: ManyLoop) -> None:
        """Say how far it is."""
        done, total, rate = len(loop.results), len(loop.members), loop.samples / max(loop.train_s, 1e-9)
        line = f"{done} of {total} members, {len(loop.running)} running · {rate:,.0f} images/s"
        self._screen.show(self._with_bar(line, done, total))
        if not self._screen.is_live and self._clock() >= self._next_plain_s:
            self._next_plain_s = self._clock() + _PLAIN_EVERY_S
            self._say(f"  {line}")

    def on_end(self, results: Results, files: Sequence[str]) -> None:
        """Show the results."""
        lines = ["", results.table()]
        if (together := results.ensemble()) is not None:
            lines += ["", fact("ensemble", ", ".join(f"{name} {value:.4g}" for name, value in together.items()))]
        lines.append(fact("time", f"{results.wall_s:.1f} s, {results.images_per_s:,.0f} images/s of training"))
        lines += [fact("files" if not n else "", f"{results.path}/{f}") for n, f in enumerate(files)]
        self._end([*lines, *([] if has_matplotlib() else [fact("no picture", INSTALL_MATPLOTLIB)])])


def write_records(results: Results, folder: Path, logger: Sequence[str]) -> list[str]:
    """Write what there is of a study to its folder, and return the names of the files. Raises UserError."""
    files = [RESULTS_FILE]
    try:
        for stale in (OUT_OF_FOLD_FILE, CURVES_FILE):  # of another study in this folder
            (folder / stale).unlink(missing_ok=True)
        write_json(folder / RESULTS_FILE, as_plain(results))
        if any(each.held_out for each in results):
            np.save(folder / OUT_OF_FOLD_FILE, results.out_of_fold().numpy())
            files.append(OUT_OF_FOLD_FILE)
        if has_matplotlib() and any(each.history for each in results):
            from crossbow_py.many.curves import draw_curves  # noqa: PLC0415  matplotlib is an extra

            save_picture(draw_curves(results), folder / CURVES_FILE)
            files.append(CURVES_FILE)
        if TENSORBOARD in logger:
            _write_tensorboard(results, folder / TENSORBOARD_FOLDER)
            files.append(TENSORBOARD_FOLDER)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); make room there, and call again.") from error
    return files


def as_plain(results: Results) -> dict[str, object]:
    """Return results as plain values."""
    return {
        "members": [{**row, "history": each.history} for row, each in zip(results.rows(), results, strict=True)],
        "summary": {name: asdict(own) for name, own in results.summary().items()},
        "groups": {
            group: {name: asdict(own) for name, own in summary.items()} for group, summary in results.groups().items()
        },
        "ensemble": results.ensemble(),
        "images_per_s": results.images_per_s,
        "wall_s": results.wall_s,
        "notes": list(results.notes),
        "versions": versions(),
    }


def _write_tensorboard(results: Results, folder: Path) -> None:
    """Write curves: of each member where there are few, else each group's median and band, and the best member's."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  takes a fifth of a second

    for old in folder.glob("*/events.out.tfevents.*"):  # of an earlier call, with other members
        old.unlink()
    names = dict.fromkeys(name for each in results for entry in each.history for name in entry)
    tags = {name: [f"many/{name}_by_evaluation", *(f"many_band/{name}_{share}_percent" for share in BAND)]
            for name in names if name not in ("epoch", "samples")}  # fmt: skip
    runs, is_few = {each.name: [each] for each in results}, len(results) <= FEW
    if not is_few:
        runs = {group or "all": members for group, members in by_group(results).items()}
        runs |= {f"best, {each.name}": [each] for each in results.best_first()[:1]}
    for run, members in runs.items():
        with SummaryWriter(str(folder / run.replace("/", "_"))) as writer:
            if not is_few:
                bands = {name.replace("_", " "): ["Margin", own] for name, own in tags.items()}
                writer.add_custom_scalars({f"Median, and from {BAND[0]} to {BAND[1]} % of members": bands})
            for name, own in tags.items():
                its = curve(members, name)
                for number, values in enumerate(zip(its.middle, its.low, its.high, strict=True), 1):
                    for tag, value in zip(own[:1] if is_few else own, values, strict=False):
                        writer.add_scalar(tag, value, number, walltime=0)
