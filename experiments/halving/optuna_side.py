"""Given configurations of an MLP by Optuna, as its users search; takes the folder of the job."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from experiments.halving.job import prepare, read, report, trained

optuna.logging.set_verbosity(optuna.logging.WARNING)


def search(folder: str) -> tuple[float, float]:
    """Queue the configurations in a journal file, from which a process a core takes them."""
    job = read(folder)
    study = optuna.create_study(study_name="search", storage=_storage(folder), direction="maximize")
    for config in job["configurations"]:
        study.enqueue_trial(config)
    cores = range(job["cores"])
    with ProcessPoolExecutor(len(cores), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(prepare, cores))
        begun_s, begun = time.perf_counter(), time.time()
        list(pool.map(_process, [folder for _ in cores]))
        return time.perf_counter() - begun_s, begun


def _process(folder: str) -> None:
    job = read(folder)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=job["eta"])
    study = optuna.load_study(study_name="search", storage=_storage(folder), pruner=pruner)

    def objective(trial: Any) -> float:
        if trial.number >= len(job["configurations"]):  # the queue is empty
            trial.study.stop()
            raise optuna.TrialPruned
        for name, entry in job["space"].items():
            trial.suggest_float(name, **entry)
        for epochs, value in trained(folder, trial.number):
            trial.report(value, epochs)
            if epochs < job["rungs"][-1] and trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(objective)


def _storage(folder: str) -> JournalStorage:
    return JournalStorage(JournalFileBackend(f"{folder}/optuna.journal"))


if __name__ == "__main__":
    report(search)
