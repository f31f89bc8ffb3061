"""From folders of runs to the files of a report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from crossbow_py.cli.output_folder import RUNS, make_folder, time_name
from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.files import replacing
from crossbow_py.report.reading import find_runs, read_runs
from crossbow_py.telemetry.records import write_atomically

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"
_PNG_DPI = 150


def write_report(paths: Sequence[Path], output_dir: Path | None = None) -> tuple[list[str], Path]:
    """Read the runs that `paths` are or hold and write report.html, and a PNG a chart, into a folder.

    Args:
        paths: folders of runs, or folders that hold such.
        output_dir: the folder; None is report/ in what is given, and where that is several folders runs/report/<time>.

    Returns:
        The notes on what is missing or damaged, each with its run, and the page.

    Raises:
        UserError: there is no run, there are too many, matplotlib is missing, or nothing can be written.
    """
    folders = find_runs(paths)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("a report needs matplotlib, which is not there; pip install matplotlib.")
    from crossbow_py.report.charts import all_charts  # noqa: PLC0415  matplotlib is an extra
    from crossbow_py.report.page import as_html  # noqa: PLC0415

    runs = read_runs(folders)
    if output_dir is None:
        output_dir = paths[0] / REPORT_FOLDER if len(paths) == 1 else RUNS / REPORT_FOLDER / time_name()
    folder = make_folder(output_dir)
    charts = list(all_charts(runs))
    try:
        for chart in charts:
            with replacing(folder / f"{chart.name}.png") as partial:
                chart.figure.savefig(partial, dpi=_PNG_DPI, format="png")
        write_atomically(folder / PAGE_FILE, as_html(runs, charts, datetime.now()))
    except OSError as error:
        raise unwritable(folder, error) from error
    return [f"{run.name}: {note}" for run in runs for note in run.notes], folder / PAGE_FILE
