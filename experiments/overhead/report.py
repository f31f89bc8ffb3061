"""Tables of overhead: of starts and telemetry, of the figures of ranks, and of loggers."""

from __future__ import annotations

from experiments.overhead import loggers, ranks, run
from experiments.tables.markdown import texts_of_kind

TABLES = run.TABLES
TABLES_OF_KIND = {ranks.KIND: ranks.TABLES, loggers.KIND: loggers.TABLES}
TABLES_OVER_ALL = {
    "of_ranks": texts_of_kind(ranks.KIND, ranks.headline),
    "of_loggers": texts_of_kind(loggers.KIND, loggers.headline),
}
