"""The report as one HTML page: text, tables and pictures are in it, nothing is loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import TypeVar

from crossbow_py.core.plain_values import differing
from crossbow_py.core.settings import read_as, written
from crossbow_py.core.version import __version__
from crossbow_py.report.charts import Chart, colour
from crossbow_py.report.reading import RunRecord
from crossbow_py.telemetry.class_counts import MEAN, ClassFigures, class_rows, mean_figures, written_share
from crossbow_py.telemetry.figures import by_setting, figures, number, same_settings, seed_means
from crossbow_py.telemetry.learners import LearnerFigures, learner_rows
from crossbow_py.telemetry.rank_pace import RankPace, rank_rows

T = TypeVar("T")
_MOST_CLASSES, _MOST_RANKS = 25, 16  # in a table that is open

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p.note, .caption, footer { opacity: .75; font-size: .88rem; } .caption { margin: .2rem 0 0; }
table { border-collapse: collapse; font-size: .9rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); min-width: 4.5rem; overflow-wrap: anywhere; padding: .25rem .7rem;
  text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } td.text { text-align: left; }
.charts { display: grid; gap: 1.6rem 1.2rem; margin-top: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(470px, 1fr)); }
figure { margin: 0; } figure img { background: #fff; border-radius: 6px; width: 100%; }
figure.wide { grid-column: 1 / -1; } figure.wide img { max-width: fit-content; }
figure h2 { margin: 0 0 .3rem; } .dot { border-radius: 50%; display: inline-block; height: .7em; width: .7em; }
pre { background: var(--soft); overflow-x: auto; padding: .8rem; } ul { padding-left: 1.2rem; }
"""


def as_html(runs: Sequence[RunRecord], charts: Sequence[Chart], now: datetime) -> str:
    """Return the page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else "",
        _figures(runs),
        _seeds(runs),
        f'<div class="charts">{"".join(map(_figure, charts))}</div>',
        _classes(runs),
        *(_learners(run, alone=len(runs) == 1) for run in runs),
        *(_ranks(run, alone=len(runs) == 1) for run in runs),
        _decisions(runs),
        _differences(runs),
        *(_configuration(run) for run in runs),
        f"<footer><p>crossbow_py {__version__} · {now:%Y-%m-%d %H:%M}</p></footer>",
    ]
    body = "\n".join(part for part in parts if part)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · crossbow_py</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n'
        "</body></html>\n"
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text that can be written


def _figures(runs: Sequence[RunRecord]) -> str:
    rows = [[escape(name), *map(escape, values)] for name, values in figures(runs)]
    same = " · ".join(f"{name} {value}" for name, value in same_settings(runs))
    note = f'<p class="note">{"All runs: " if len(runs) > 1 else ""}{escape(same)}</p>' if same else ""
    return note + _table(["", *_names(runs)], rows)


def _seeds(runs: Sequence[RunRecord]) -> str:
    """Return the table of means over seeds; empty where no setting has two."""
    groups = by_setting(runs)
    rows = [[name, *values] for name, values in seed_means(groups)] if groups else []
    return "<h2>Means over seeds, ± 95 % intervals</h2>" + _table(["", *map(escape, groups)], rows) if rows else ""


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return each with the colour of its curves."""
    return [
        f'<span class="dot" style="background:{colour(index)}"></span> {escape(run.name)}'
        for index, run in enumerate(runs)
    ]


def _figure(chart: Chart) -> str:
    picture = io.BytesIO()
    chart.figure.savefig(picture, format="svg", metadata={"Date": None})
    content = base64.b64encode(picture.getvalue()).decode("ascii")
    kind, title = ' class="wide"' if chart.is_wide else "", escape(chart.title)
    shown = (
        f'<img alt="{title}" src="data:image/svg+xml;base64,{content}"><p class="caption">{escape(chart.caption)}</p>'
    )
    if chart.is_folded:
        return f"<figure{kind}><details><summary>{title}</summary>{shown}</details></figure>\n"
    return f"<figure{kind}><h2>{title}</h2>{shown}</figure>\n"


def _classes(runs: Sequence[RunRecord]) -> str:
    """Return the table of classes: of one run all figures, of several each run's F1, or IoU of masks."""
    found = [_class_figures(run) for run in runs]
    names = dict.fromkeys(each.name for own in found for each in own)
    if not names:
        return ""
    if len(runs) == 1:
        heads, rows = class_rows(found[0])
        title = "Classes"
    else:
        kind, title = ("iou", "IoU") if any(each.iou is not None for own in found for each in own) else ("f1", "F1")
        by_name = [{each.name: getattr(each, kind) for each in (*own, mean_figures(own))} for own in found]
        heads = ["class", *_names(runs)]
        rows = [[name, *(written_share(own.get(name)) for own in by_name)] for name in (*names, MEAN)]
        title += " of the classes"
    table = _table(heads, [[escape(name), *rest] for name, *rest in rows])
    if len(names) <= _MOST_CLASSES:
        return f"<h2>{title}</h2>{table}"
    return f"<details><summary>{title}, {len(names)} of them</summary>{table}</details>"


def _class_figures(run: RunRecord) -> tuple[ClassFigures, ...]:
    """Return the summary's figures; without a summary those of the newest confusion matrix."""
    saved = _saved(run, "per_class", ClassFigures)
    return tuple(saved) if saved else run.class_counts.figures() if run.class_counts else ()


def _saved(run: RunRecord, key: str, kind: type[T]) -> list[T]:
    """Return a list of the summary, which may be damaged: then none."""
    saved = run.summary.get(key)
    found = [read_as(kind, each) for each in saved] if isinstance(saved, list) else []
    return [each for each in found if each is not None] if all(found) else []


def _ranks(run: RunRecord, alone: bool) -> str:
    """Return the table of a run's ranks, the slowest first; empty with one rank."""
    ranks = _saved(run, "per_rank", RankPace)
    if not ranks:
        return ""
    heads, rows = rank_rows(ranks)
    table = _table(heads, [list(map(escape, row)) for row in rows])
    if alone and len(ranks) <= _MOST_RANKS:
        return f"<h2>The ranks</h2>{table}"
    title = "The ranks" if alone else f"The ranks of {escape(run.name)}"
    return f"<details><summary>{title}, {len(ranks)} of them</summary>{table}</details>"


def _learners(run: RunRecord, alone: bool) -> str:
    """Return the table of a run's independent learners, whose best has a `*`; empty of others."""
    learners = _saved(run, "learners", LearnerFigures)
    if not learners:
        return ""
    heads, rows = learner_rows(learners)
    title = "The learners" if alone else f"The learners of {escape(run.name)}"
    table = _table(list(map(escape, heads)), [list(map(escape, row)) for row in rows])
    return f'<h2>{title}</h2>{table}<p class="caption">* the best one.</p>'


def _decisions(runs: Sequence[RunRecord]) -> str:
    def shown(given: object, form: str) -> str:
        value = number(given)
        return "" if value is None else format(value, form)

    names = _names(runs)
    rows = [
        [names[index], shown(decision.get("samples_seen"), ",.0f"), shown(decision.get("elapsed_s"), ".1f"),
         f'<td class="text">{escape(str(decision.get("reason", "")))}</td>']
        for index, run in enumerate(runs)
        for decision in run.decisions
    ]  # fmt: skip
    if not rows:
        return ""
    return "<h2>Decisions of the auto-tuner</h2>" + _table(["run", "samples seen", "after, s", ""], rows)


def _differences(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return ""
    found = differing([run.config for run in runs])
    if not found:
        return '<h2>Differences in configuration</h2><p class="note">None.</p>'
    rows = [[escape(key), *map(escape, values)] for key, values in found.items()]
    return "<h2>Differences in configuration</h2>" + _table(["key", *_names(runs)], rows)


def _configuration(run: RunRecord) -> str:
    if not run.config:
        return ""
    lines = "\n".join(f"{key}={written(value)}" for key, value in run.config.items())
    return f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(lines)}</pre></details>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; a cell that brings its own `<td>` keeps it."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "\n".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
