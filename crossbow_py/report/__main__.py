"""`python -m crossbow_py.report RUN [RUN ...]`: what runs did, as one HTML page and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from crossbow_py.cli.command_line import run_with_text, say
from crossbow_py.cli.output_folder import RUNS, make_folder, time_name
from crossbow_py.core.errors import UserError, unwritable
from crossbow_py.core.files import given_path
from crossbow_py.report.reading import find_runs, read_runs
from crossbow_py.telemetry.pictures.files import has_matplotlib, save_picture
from crossbow_py.telemetry.records import write_atomically

PAGE_FILE = "report.html"
REPORT_FOLDER = "report"
_PNG_DPI = 150

USAGE = """\
usage: python -m crossbow_py.report RUN [RUN ...] [output_dir=PATH] [--help]

Writes one page, report.html, that reads without a network: the figures of runs side by side, curves over samples seen
and over time, throughput with the number of learners and the auto-tuner's decisions, three rounds of the timeline
(where the run had trace=true), and the differences between configurations. Every chart is a PNG beside it, too.

  python -m crossbow_py.report runs/digits/a
  python -m crossbow_py.report runs/digits/a runs/digits/b output_dir=compared
  python -m crossbow_py.report runs/digits          # all runs in it, twelve at most

RUN is a run's folder. The run may be unfinished or killed; the report shows what is there and changes nothing.
output_dir is by default report/ in the folder that is given, and runs/report/<time> where several are.

Exit codes: 0 done, 2 a mistake in what was asked for, 130 after Ctrl-C, 1 anything else.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; returns the exit code."""
    return run_with_text(argv, USAGE, report)


def report(arguments: list[str]) -> int:
    """One report; returns its exit code."""
    options = [each for each in arguments if "=" in each and not _is_there(each)]
    paths = [each for each in arguments if each not in options]
    unknown = next((each for each in options if not each.startswith("output_dir=")), None)
    if unknown:
        raise UserError(f"unknown key {unknown}; a report has only output_dir=PATH.")
    if not paths:
        raise UserError("a report is of at least one run, got none; give its folder, such as runs/digits/<time>.")
    if len(options) > 1 or options == ["output_dir="]:
        raise UserError(f"output_dir names one folder, got {', '.join(options)}; write output_dir=PATH once.")
    output_dir = options[0].removeprefix("output_dir=") if options else None
    folders = [given_path("RUN", path) for path in paths]
    notes, page = write_report(folders, given_path("output_dir", output_dir) if output_dir else None)
    return say("\n".join([*notes, f"Written to {page}, with its charts as PNG beside it."]))


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # no file system takes such a name
        return False


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
    if not has_matplotlib():
        raise UserError("a report needs matplotlib, which is not installed; run pip install matplotlib.")
    from crossbow_py.report.charts import all_charts  # noqa: PLC0415  matplotlib is an extra
    from crossbow_py.report.page import as_html  # noqa: PLC0415

    runs = read_runs(folders)
    if output_dir is None:
        output_dir = paths[0] / REPORT_FOLDER if len(paths) == 1 else RUNS / REPORT_FOLDER / time_name()
    folder = make_folder(output_dir)
    charts = list(all_charts(runs))
    try:
        for chart in charts:
            save_picture(chart.figure, folder / f"{chart.name}.png", _PNG_DPI)
        write_atomically(folder / PAGE_FILE, as_html(runs, charts, datetime.now()))
    except OSError as error:
        raise unwritable(folder, error) from error
    return [f"{run.name}: {note}" for run in runs for note in run.notes], folder / PAGE_FILE


if __name__ == "__main__":
    raise SystemExit(main())
