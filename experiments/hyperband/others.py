"""The same trials by Optuna and by Ray Tune, as their users search: several processes, each with one trial at a time.

Both prune by successive halving when a trial reports, each by its own rule, so other trials may go on than in a
synchronous Hyperband. Trials, their parameters and seeds, data, order of samples, schedule and the training loop are
those of `default_loop`.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from crossbow_py.core.errors import CrossbowError
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.search.build import SearchRun
from crossbow_py.search.loop import epoch_samples
from crossbow_py.search.space import Space
from experiments.bench.machine import ROOT, usable_cores
from experiments.hyperband.default_loop import Images, accuracy, new_trial, train

OPTUNA, RAY = "optuna", "ray_tune"
OTHERS = (OPTUNA, RAY)
_NEEDED = {OPTUNA: ("optuna",), RAY: ("ray", "pandas", "pyarrow", "fsspec")}  # by modules
_JOB, _STUDY, _NUMBER, _SAMPLES = "job.pt", "search", "number", "samples"
_READY_S = 300.0


@dataclass(frozen=True)
class Job:
    """What every process is given: what is searched, the trials by number, the data, and where trials are measured.

    `steps` are what pruners count by, a power of `eta` for each rung, and `epochs` what they stand for.
    """

    space: Space
    params: tuple[Mapping[str, Any], ...]
    trials: tuple[TrialSettings, ...]
    images: Images
    eta: int
    epochs: tuple[float, ...]
    order_seed: int

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.eta**rung for rung in range(len(self.epochs)))


def missing(side: str) -> str | None:
    """Why a side cannot be had; None if it can."""
    gone = [name for name in _NEEDED[side] if find_spec(name) is None]
    return f"{', '.join(gone)} not installed" if gone else None


def job_of(run: SearchRun, images: Images) -> Job:
    """The search as other programs get it: models are copies of what each trial begins with."""
    brackets = run.rules.brackets
    params = tuple(run.study.params(number) for bracket in brackets for number in bracket.trials)
    settings = [run.trial_settings(number, own) for number, own in enumerate(params)]
    trials = tuple(replace(own, make_model=partial(copy.deepcopy, own.new_model())) for own in settings)
    space, epochs = run.config.parsed_space, max((bracket.epochs for bracket in brackets), key=len)
    return Job(space, params, trials, images, run.config.eta, epochs, run.settings.sample_order_seed)


def search_by(side: str, job: Job, num_processes: int, folder: Path) -> dict[str, Any]:
    """Search with that many processes at a time, each with its share of the cores as threads."""
    torch.save(job, folder / _JOB)
    found = (_by_optuna if side == OPTUNA else _by_ray)(job, num_processes, folder)
    ended = [(value, trial) for trial, rung, value in found["values"] if rung == len(job.epochs) - 1]
    if not ended:
        raise CrossbowError(f"{side}: every trial that went on to the last rung diverged")
    value, trial = max(ended)
    model = job.trials[trial].new_model()
    model.load_state_dict(torch.load(folder / f"{trial}.pt"))
    begun_s = time.perf_counter()
    test_accuracy = accuracy(model, job.images.test)
    seconds = round(found["seconds"] + time.perf_counter() - begun_s, 2)
    return {**found, "seconds": seconds, "trial": trial, "value": value, "test_accuracy": test_accuracy}


@cache
def _job(folder: Path) -> Job:
    """The job as a process reads it, once; the images are mapped, so that processes share their memory."""
    job: Job = torch.load(folder / _JOB, mmap=True, weights_only=False)
    return job


def _threads(num_processes: int) -> int:
    return max(1, usable_cores() // num_processes)


def _measured(job: Job, number: int, folder: Path) -> Iterator[tuple[float | None, int]]:
    """Train a trial from rung to rung: its validation accuracy there, None once it has diverged, and its samples."""
    trial, count = new_trial(job.trials[number], torch.device("cpu")), len(job.images.train[1])
    planned = epoch_samples(job.epochs[-1], count)
    for epochs in job.epochs:
        if not train(trial, epoch_samples(epochs, count), planned, job.images.train, job.order_seed):
            yield None, trial.samples_seen
            return
        if epochs == job.epochs[-1]:
            torch.save(trial.model.state_dict(), folder / f"{number}.pt")
        yield accuracy(trial.model, job.images.validation), trial.samples_seen


# --- Optuna -----------------------------------------------------------------------------------------------------------


def _by_optuna(job: Job, num_processes: int, folder: Path) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=_storage(folder), study_name=_STUDY, direction="maximize")
    for number, params in enumerate(job.params):
        study.enqueue_trial(dict(params), user_attrs={_NUMBER: number})
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(num_processes + 1)
    arguments = (folder, _threads(num_processes), ready)
    processes = [context.Process(target=_optuna_process, args=arguments) for _ in range(num_processes)]
    for process in processes:
        process.start()
    ready.wait(_READY_S)  # imports are in no side's time
    begun_s = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - begun_s
    if any(process.exitcode for process in processes):
        raise CrossbowError("a process of Optuna's failed; its error is above")
    records = [record for record in study.get_trials() if _NUMBER in record.user_attrs]
    return {
        "seconds": seconds,
        "samples": sum(record.user_attrs[_SAMPLES] for record in records),
        "values": [
            [record.user_attrs[_NUMBER], job.steps.index(step), value]
            for record in records
            for step, value in sorted(record.intermediate_values.items())
        ],
    }


def _storage(folder: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))


def _optuna_process(folder: Path, threads: int, ready: Barrier) -> None:
    """Take one trial after another from the study's queue, until it is empty."""
    torch.set_num_threads(threads)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    import_module("torch._dynamo")  # which torch's optimizers import when they first step
    job = _job(folder)
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=job.steps[-1], reduction_factor=job.eta)
    study = optuna.load_study(study_name=_STUDY, storage=_storage(folder), sampler=RandomSampler(), pruner=pruner)
    ready.wait(_READY_S)
    while _NUMBER in (trial := study.ask()).user_attrs:
        job.space.suggest(trial)  # the parameters of the queue, asked for as an objective does
        number, state = trial.user_attrs[_NUMBER], TrialState.COMPLETE
        for step, (value, samples) in zip(job.steps, _measured(job, number, folder), strict=False):
            trial.set_user_attr(_SAMPLES, samples)
            if value is None:
                state = TrialState.FAIL
                break
            trial.report(value, step)
            if step < job.steps[-1] and trial.should_prune():
                state = TrialState.PRUNED
                break
        study.tell(trial, value if state is TrialState.COMPLETE else None, state=state)
    study.tell(trial, state=TrialState.FAIL)  # the queue was empty: this one is no trial


# --- Ray Tune ---------------------------------------------------------------------------------------------------------


def _by_ray(job: Job, num_processes: int, folder: Path) -> dict[str, Any]:
    """Each trial has a fraction of the device, here of its cores; what Ray's processes take to start is counted."""
    ray, tune = import_module("ray"), import_module("ray.tune")  # which take seconds, and may not be there
    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
    # A cluster of its own, as another may run on this machine.
    ray.init(
        "local", num_cpus=usable_cores(), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        trial = partial(_ray_trial, folder=folder, threads=_threads(num_processes))
        scheduler = tune.schedulers.AsyncHyperBandScheduler(
            time_attr="step", grace_period=1, max_t=job.steps[-1], reduction_factor=job.eta, brackets=len(job.steps)
        )
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": usable_cores() / num_processes}),
            param_space={_NUMBER: tune.grid_search(list(range(len(job.trials))))},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=str(folder), name="ray", verbose=0),
        )
        begun_s, begun = time.perf_counter(), time.time()
        grid = tuner.fit()
        seconds = time.perf_counter() - begun_s
    finally:
        ray.shutdown()
    if grid.num_errors:
        raise CrossbowError(f"a trial of Ray Tune's failed: {grid.errors[0]}")
    results = [grid[place] for place in range(len(grid))]
    reports = [report for result in results for report in result.metrics_dataframe.to_dict("records")]
    return {
        "seconds": seconds,
        "start_s": round(min(report["begun"] for report in reports) - begun, 2),
        "samples": sum(int(result.metrics[_SAMPLES]) for result in results),
        "values": [[report[f"config/{_NUMBER}"], job.steps.index(report["step"]), report["accuracy"]]
                   for report in reports if not report["diverged"]],
    }  # fmt: skip


def _ray_trial(config: dict[str, Any], *, folder: Path, threads: int) -> None:
    """Train a trial, which Ray ends at the rung where its scheduler prunes it."""
    begun, report = time.time(), import_module("ray.tune").report
    torch.set_num_threads(threads)
    job = _job(folder)
    for step, (value, samples) in zip(job.steps, _measured(job, config[_NUMBER], folder), strict=False):
        report({"accuracy": value or 0.0, _SAMPLES: samples, "step": step, "begun": begun, "diverged": value is None})
