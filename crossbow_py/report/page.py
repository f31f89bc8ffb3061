"""The report as one HTML page: text, tables and pictures are in it, nothing is loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from datetime import datetime
from html import escape

from crossbow_py.core.plain_values import differing
from crossbow_py.core.settings import written
from crossbow_py.core.version import __version__
from crossbow_py.report.charts import Chart, colour
from crossbow_py.report.reading import RunRecord
from crossbow_py.telemetry.figures import figures, number, same_settings

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1080px; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p.note, .caption, footer { opacity: .75; font-size: .88rem; } .caption { margin: .2rem 0 0; }
table { border-collapse: collapse; font-size: .9rem; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
.charts { display: grid; gap: 1.6rem 1.2rem; margin-top: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(470px, 1fr)); }
figure { margin: 0; } figure img { background: #fff; border-radius: 6px; width: 100%; }
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
        f'<div class="charts">{"".join(map(_figure, charts))}</div>',
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
    return (
        f'<figure><h2>{escape(chart.title)}</h2><img alt="{escape(chart.title)}" '
        f'src="data:image/svg+xml;base64,{content}"><p class="caption">{escape(chart.caption)}</p></figure>\n'
    )


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
