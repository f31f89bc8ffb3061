"""Hyperband by several sides: the same trials, budget and data, whoever trains and prunes them."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from crossbow_py.cli.configuration import compose
from crossbow_py.core.host import foreign_share
from crossbow_py.data.datasets import as_pair
from crossbow_py.data.sources.base import DataSource
from crossbow_py.engine.device.host import flush_denormals
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.search.build import SearchRun
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import SearchListener
from crossbow_py.search.folder import open_search_folder
from experiments.bench.windows import load_with_ended, paired_ratios, spread
from experiments.hyperband.default_loop import Images, search
from experiments.hyperband.others import OTHERS, RAY, job_of, missing, search_by

SIDES = ("default_loop", "one_at_a_time", "packed")  # on any device
_POLICIES = {"one_at_a_time": "none", "packed": "signature"}
Side = Callable[[], dict[str, Any]]


class _Messages(SearchListener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, message: str) -> None:
        self.said.append(message)


def measure_hyperband(
    overrides: Sequence[str], repetitions: int, device: str, num_processes: int = 0
) -> dict[str, Any]:
    """Every side `repetitions` times, in one order and then the other.

    Args:
        overrides: of the search.
        repetitions: searches by each side.
        device: cpu or cuda.
        num_processes: trials at a time by Optuna and by Ray Tune, each in a process, on a CPU; 0 leaves them out.
    """
    overrides = [*overrides, f"device={device}"]
    others = OTHERS if device == "cpu" and num_processes else ()
    left_out = {side: reason for side in others if (reason := missing(side))}
    sides = (*(side for side in others if side not in left_out), *SIDES)
    taken: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    packing = _warm_up(overrides)
    for repetition in range(repetitions):
        for side in sides if repetition % 2 == 0 else reversed(sides):
            outcome = _run_apart(side, overrides, num_processes)
            taken[side].append(outcome)
            said = f"{outcome['seconds']:.1f} s, others {outcome.get('foreign_share')}"
            print(f"repetition {repetition + 1}: {side} {said}", flush=True)
    seconds = {side: [run["seconds"] for run in taken[side]] for side in sides}
    return {
        "overrides": overrides,
        "device": device,
        "repetitions": repetitions,
        "num_processes": num_processes,
        "left_out": left_out,
        "packing": packing,
        "runs": taken,
        "seconds": {side: spread(seconds[side]) for side in sides},
        "ratios": {
            f"{side}_over_packed": spread(paired_ratios(seconds[side], seconds["packed"])) for side in sides[:-1]
        },
        "best": {side: median(run["test_accuracy"] for run in taken[side]) for side in sides},
    }


def _warm_up(overrides: Sequence[str]) -> list[str]:
    """Measure how wide packs are, which is remembered: it is no part of any side. Returns what was said of that."""
    said: list[str] = []
    for side in _POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            said += _said_at_first(overrides, side, Path(folder))
    return said


def _said_at_first(overrides: Sequence[str], side: str, folder: Path) -> list[str]:
    messages = _Messages()
    with closing(_search_run(overrides, side, folder, messages)) as run:
        run.run(lambda: "stopped" if any(words.startswith("Trials of") for words in messages.said) else None)
    return messages.said


def _search_run(overrides: Sequence[str], side: str, folder: Path, listener: SearchListener) -> SearchRun:
    words = [*overrides, f"packing={_POLICIES[side]}", f"output_dir={folder / 'search'}"]
    config = compose(words, SearchConfig)
    return SearchRun(config, open_search_folder(config), [listener])


def _run_apart(side: str, overrides: Sequence[str], num_processes: int) -> dict[str, Any]:
    """Run in a process of its own: a side's setting of torch's threads is nothing to the others."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_watched, side, overrides, num_processes).result()


def _watched(side: str, overrides: Sequence[str], num_processes: int) -> dict[str, Any]:
    before = load_with_ended()
    outcome = _run(side, overrides, num_processes)
    # Ray's processes are nobody's children when they end, so nothing tells them from other programs.
    share = None if side == RAY else foreign_share(before, load_with_ended())
    return {**outcome, "foreign_share": None if share is None else round(share, 3)}


def _run(side: str, overrides: Sequence[str], num_processes: int) -> dict[str, Any]:
    """One search, without imports, data and what is measured about packs."""
    with tempfile.TemporaryDirectory() as folder:
        if side in OTHERS:
            return _run_other(side, overrides, num_processes, Path(folder))
        if side == "default_loop":
            return _run_default_loop(overrides, Path(folder))
        flush_denormals()  # as the command does at its beginning
        with closing(_search_run(overrides, side, Path(folder), SearchListener())) as run:
            begun = time.perf_counter()
            summary = run.run(lambda: None)
            seconds = time.perf_counter() - begun
    assert summary.best is not None, "some trial has a value"
    return {
        "seconds": round(seconds, 2),
        "trial": summary.best.trial,
        "value": summary.best.value,
        "test_accuracy": summary.best.test_accuracy,
        "samples": summary.samples,
        "precision": summary.info.precision,
        "train_s": round(summary.train_time_s, 2),
        "evaluation_s": round(summary.evaluation_time_s, 2),
        "overhead_s": round(seconds - summary.train_time_s - summary.evaluation_time_s - summary.tuning_time_s, 2),
        "values": [
            [trial.trial, place, value] for trial in summary.trials for place, value in enumerate(trial.values.values())
        ],
    }


def _run_default_loop(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Trials and their seeds are those of the search; the folder holds their sampling and nothing else."""
    with closing(_search_run(overrides, "one_at_a_time", folder, SearchListener())) as run:
        images = _images(run.source, run.choices.device)
        begun = time.perf_counter()
        found = search(
            run.rules.brackets, lambda trial: run.trial_settings(trial, run.study.params(trial)), images,
            run.settings.sample_order_seed,
        )
        return {"seconds": round(time.perf_counter() - begun, 2), "precision": FP32.name, **found}


def _run_other(side: str, overrides: Sequence[str], num_processes: int, folder: Path) -> dict[str, Any]:
    with closing(_search_run(overrides, "one_at_a_time", folder, SearchListener())) as run:
        job = job_of(run, _images(run.source, run.choices.device))
    return {"precision": FP32.name, **search_by(side, job, num_processes, folder)}


def _images(source: DataSource, device: torch.device) -> Images:
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (source.mean, source.std))

    def prepared(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pair = as_pair(data)
        assert pair is not None, "the data set is in memory"
        return ((pair[0].float() / 255 - mean) / std).to(device), pair[1].to(device)

    return Images(prepared(source.train), prepared(source.validation), prepared(source.test))
