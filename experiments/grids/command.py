"""The command line that the experiments with grids of cells share."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossbow_py.cli.command_line import say
from experiments.bench.arguments import count, seeds
from experiments.bench.machine import ROOT, machine
from experiments.bench.results import results_folder, write_result
from experiments.grids.grid import Cell, Grid, chosen, in_turns
from experiments.grids.running import Places, add_recorded, collect, run_cells

_INTERRUPTED = 130


def run_grid(experiment: str, grids: Mapping[str, Grid], argv: Sequence[str] | None = None) -> int:
    """Run what is asked for of an experiment's grids and write its result; returns the exit code."""
    parser = _parser(experiment, grids)
    options = parser.parse_intermixed_args(argv)
    grid = grids[options.grid].with_overrides(options.overrides)
    if grid.alone and options.jobs > 1:
        parser.error(f"times matter in {grid.name}, so that its cells run one at a time; leave --jobs out.")
    try:
        cells = chosen(grid, options.cells)
    except ValueError as error:
        parser.error(str(error))
    turns, facts = in_turns(cells, options.seeds or grid.seeds), machine()
    if options.list:
        return say("\n".join(_listed(cell, seed) for cell, seed in turns))
    places = Places(options.runs / experiment, options.results)
    path = places.results / f"{options.name or grid.name}.json"
    if options.add and path.exists():
        add_recorded(grid, places, json.loads(path.read_text())["runs"])
    try:
        failed = run_cells(grid, turns, places, options.jobs)
    except KeyboardInterrupt:
        print("interrupted; give the same command again to go on.")
        return _INTERRUPTED
    result = collect(grid, places, facts)
    if result["runs"]:
        write_result(path, result)
        print(f"written to {path}")
    if failed:
        print(f"{len(failed)} runs failed; give the same command again to run them.")
    return 1 if failed else 0


def _listed(cell: Cell, seed: int) -> str:
    return f"{cell.name}, seed {seed}: python -m {shlex.join([cell.program, *cell.overrides, f'seed={seed}'])}"


def _parser(experiment: str, grids: Mapping[str, Grid]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains the cells of a grid and writes results/GRID.json.")
    add = parser.add_argument
    add("grid", choices=grids, help="which of the experiment's grids")
    add("--cells", default="*", metavar="PATTERN", help="only cells whose names match, as in 'sma*'")
    add("--seeds", type=seeds, metavar="0,1,...", help="one run of every cell each (default: the grid's)")
    add("--jobs", type=count, default=1, help="runs at a time, of one thread each if several; their times do not count")
    add("--list", action="store_true", help="only say what would be run, as commands")
    add("--add", action="store_true", help="runs of the results file with the same settings are done; run the others")
    add("--name", help="name of the results file (default: the grid's)")
    add("--runs", type=Path, default=ROOT / "runs", help="where run folders lie (default runs/ in the checkout)")
    add("--results", type=Path, default=results_folder(experiment), help="default: results/ beside the script")
    add("overrides", nargs="*", metavar="key=value", help="for every cell, as for crossbow_py.train")
    return parser
