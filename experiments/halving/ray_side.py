"""Given configurations of an MLP by Ray Tune, as its users search; takes the folder of the job."""

from __future__ import annotations

import logging
import time
from functools import partial

import ray
import torch
from ray import tune

from experiments.halving.job import read, report, trained


def search(folder: str) -> tuple[float, float]:
    """Give each trial a core, under asynchronous successive halving; what Ray's processes take to start is counted."""
    job = read(folder)
    ray.init("local", num_cpus=job["cores"], include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    scheduler = tune.schedulers.ASHAScheduler(
        time_attr="epochs", grace_period=1, max_t=job["rungs"][-1], reduction_factor=job["eta"]
    )
    numbers = list(range(len(job["configurations"])))
    tuner = tune.Tuner(
        tune.with_resources(partial(_trial, folder=folder), {"cpu": 1}),
        param_space={"number": tune.grid_search(numbers)},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=folder, name="ray", verbose=0),
    )
    begun_s, begun = time.perf_counter(), time.time()
    found = tuner.fit()
    seconds = time.perf_counter() - begun_s
    ray.shutdown()
    if found.num_errors:
        raise RuntimeError(f"a trial of Ray Tune's failed: {found.errors[0]}")
    return seconds, begun


def _trial(config: dict[str, int], *, folder: str) -> None:
    torch.set_num_threads(1)
    for epochs, value in trained(folder, config["number"]):
        tune.report({"epochs": epochs, "accuracy": value})


if __name__ == "__main__":
    report(search)
