"""Tables of overhead: of starts and telemetry, of the figures of ranks, and of loggers."""

from __future__ import annotations

from experiments.overhead import loggers, ranks, run

TABLES = run.TABLES
TABLES_OF_KIND = {ranks.KIND: ranks.TABLES, loggers.KIND: loggers.TABLES}
TABLES_OVER_ALL = {"of_ranks": ranks.answer, "of_loggers": loggers.answer}
