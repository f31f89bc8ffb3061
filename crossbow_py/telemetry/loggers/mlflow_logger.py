"""Runs and searches in MLflow.

What MLflow does not promise to keep is `mlflow.store.db.utils.MAX_RETRY_COUNT`, tried with MLflow 3.17.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import locked
from crossbow_py.core.measured import user_cache
from crossbow_py.core.settings import written
from crossbow_py.telemetry.events import Images
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import (
    RUNNING,
    Plain,
    Point,
    Subject,
    Tracker,
    TrialRun,
    known_id,
    refusing,
    without_password,
)

RUN_FILE = "mlflow.json"  # in the run's folder: the id of its run
LOCK_FILE = "mlflow.lock"  # in the user's cache

_STATUS = {"failed": "FAILED", "interrupted": "KILLED", "terminated": "KILLED"}
_REFUSED = re.compile(r"[^\w.\- :/]")  # in names
_LONGEST_NAME, _LONGEST_VALUE = 250, 5000
_PARENT_TAG, _TRIAL_TAG = "mlflow.parentRunId", "trial"
# At the start a server that does not answer should be noticed in seconds. Later the package's own minutes are right.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_DATABASE_TRIES = 4  # take a second, and the package's ten take two minutes


class MLflowLogger(RunLogger):
    """Records a run in MLflow.

    Where it goes follows MLflow's own variables, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. Without the
    former it is what `mlflow ui` shows: the database mlflow.db in the current folder.

    Args:
        experiment: name of MLflow's experiment; None is MLFLOW_EXPERIMENT_NAME, else the run's `experiment`.
        run_name: None is the name of the run's folder.
        tracking_uri: None is MLFLOW_TRACKING_URI.
        tags: further tags of the run.
        log_model: keep a copy of the model with the run.

    Raises:
        UserError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        log_model: bool = False,
    ) -> None:
        super().__init__(MLflowTracker(experiment, run_name, tracking_uri, tags), log_model)


class MLflowTracker(Tracker):
    """A run in MLflow; the arguments are those of `MLflowLogger`."""

    NAME: ClassVar[str] = "MLflow"
    KEY: ClassVar[str] = "mlflow"
    MODULE: ClassVar[str] = "mlflow"
    IS_SHARED: ClassVar[bool] = True

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._run_name, self._address = experiment, run_name, tracking_uri
        self._tags = {name: str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._folder: Path | None = None
        self._run_id = self._experiment_id = ""

    def check(self) -> None:
        """Ask a server whether it is there. A database is left to `open`, which makes the tables that it lacks."""
        import mlflow  # noqa: PLC0415  an extra, which takes a second

        address = self._address or mlflow.get_tracking_uri()
        with self._reaching(address):
            if not _is_database(address):
                mlflow.MlflowClient(tracking_uri=address).search_experiments(max_results=1)

    def open(self, subject: Subject) -> list[str]:
        import mlflow  # noqa: PLC0415

        self._folder = folder = subject.folder
        address = self._address or mlflow.get_tracking_uri()
        with known_id(folder, RUN_FILE) as known, self._reaching(address), _database_at_the_start(address):
            self._client = mlflow.MlflowClient(tracking_uri=address)
            before = (known.value or self._run_id or None) if subject.continues else None
            run = None if before is None else self._found(before)
            notes = [f"MLflow has no run {before} any more and begins a new one."] if before and run is None else []
            if run is None:
                run = self._begun(subject)
            self._run_id = known.value = run.info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._experiment_id = run.info.experiment_id
            notes += self._describe(subject, run.data.params)
        name = run.data.tags.get("mlflow.runName", self._run_id)
        goes_on = "goes on with" if before and before == self._run_id else "records"
        return [*notes, f"MLflow {goes_on} run {name} ({self._run_id}) at {without_password(address)}"]

    def log(self, points: Sequence[Point]) -> None:
        metrics = [self._metrics(point.values, point.time_ms, point.samples_seen) for point in points]
        self._client.log_batch(self._run_id, metrics=[each for own in metrics for each in own])

    def picture(self, name: str, picture: Images, samples_seen: int) -> None:
        self._client.log_image(self._run_id, picture, artifact_file=f"{name}.png")  # the newest stays

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def model(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path), "model")

    def trials(self, trials: Sequence[TrialRun], metric: str) -> None:
        """Record each trial once, as a run nested in the search's, whichever worker comes to it first."""
        with known_id(self._folder, RUN_FILE):
            there, now_ms = self._trials_there(), int(time.time() * 1000)
            for trial in trials:
                run = there.get(str(trial.number))
                if run is None:
                    tags = {_PARENT_TAG: self._run_id, _TRIAL_TAG: str(trial.number)}
                    name = f"trial_{trial.number:05}"
                    run = self._client.create_run(self._experiment_id, run_name=name, tags=tags)
                elif run.info.status != "RUNNING":
                    continue
                # One that runs was left by a worker that was stopped, or lost the server, midway.
                own, values = run.info.run_id, {} if _name(metric) in run.data.metrics else trial.values
                points = [self._metrics({metric: value}, now_ms, at)[0] for at, value in values.items()]
                self._client.log_batch(own, metrics=points, params=_params(trial.parameters))
                self._client.set_terminated(own, "FAILED" if trial.failed else "FINISHED")

    def end(self, status: str, samples_seen: int, figures: Mapping[str, float], facts: Mapping[str, Plain]) -> None:
        metrics = self._metrics(figures, int(time.time() * 1000), samples_seen)
        self._client.log_batch(self._run_id, metrics=metrics, tags=_tags(facts))
        if status != RUNNING:
            self._client.set_terminated(self._run_id, _STATUS.get(status, "FINISHED"))

    @contextmanager
    def _reaching(self, address: str) -> Iterator[None]:
        """Raise UserError, after seconds, for whatever the package raises."""
        where = f"MLflow at {without_password(address)}"
        with refusing(self, where, "start it, correct MLFLOW_TRACKING_URI"), _at_the_start():
            yield

    def _begun(self, subject: Subject) -> Any:
        from mlflow.tracking.context.registry import resolve_tags  # noqa: PLC0415  the user, the program, the commit

        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or subject.experiment
        experiment_id = None if self._experiment else os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment_id:
            found = self._client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage != "active":
                raise UserError(
                    f"MLflow's experiment {name} is deleted; restore it, or set MLFLOW_EXPERIMENT_NAME to another."
                )
            experiment_id = found.experiment_id if found else self._created(name)
        run_name = self._run_name or subject.name
        return self._client.create_run(experiment_id, run_name=run_name, tags=resolve_tags(self._tags))

    def _created(self, name: str) -> str:
        """Return the id of a new experiment, or of the one that another process has just made."""
        try:
            return str(self._client.create_experiment(name))
        except Exception:
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _found(self, run_id: str) -> Any:
        """Return the run of that id; None if there is none any more, or at another address."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, subject: Subject, known: Mapping[str, str]) -> list[str]:
        """Send parameters and facts. Returns what the user should know of parameters, which MLflow cannot change."""
        params = _params(subject.parameters)
        self._client.log_batch(
            self._run_id, params=[each for each in params if each.key not in known], tags=_tags(subject.facts)
        )
        changed = [f"{each.key}={known[each.key]}" for each in params if known.get(each.key, each.value) != each.value]
        return [f"MLflow keeps the parameters that the run began with: {', '.join(changed)}."] if changed else []

    def _trials_there(self) -> dict[str, Any]:
        """Return the runs of trials by their numbers."""
        found, token = dict[str, Any](), None
        while True:
            query = f"tags.`{_PARENT_TAG}` = '{self._run_id}'"
            page = self._client.search_runs([self._experiment_id], query, page_token=token)
            found.update({run.data.tags.get(_TRIAL_TAG, ""): run for run in page})
            token = page.token
            if not token:
                return found

    def _metrics(self, values: Mapping[str, float], time_ms: int, samples_seen: int) -> list[Any]:
        from mlflow.entities import Metric  # noqa: PLC0415

        return [Metric(_name(name), float(value), time_ms, samples_seen) for name, value in values.items()]


@contextmanager
def _at_the_start() -> Iterator[None]:
    """Give up on a server after seconds, unless the user has said when. Say nothing of a database that is made."""
    own = {name: value for name, value in _IMPATIENT.items() if name not in os.environ}
    logger = logging.getLogger("mlflow.store.db.utils")
    os.environ.update(own)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def _database_at_the_start(address: str) -> Iterator[None]:
    """Have one process of this user open a database at a time, as all that find it without tables would make them.

    One that cannot be opened is given up soon.
    """
    with ExitStack() as stack:
        if _is_database(address):
            utils: Any = import_module("mlflow.store.db.utils")
            stack.callback(setattr, utils, "MAX_RETRY_COUNT", getattr(utils, "MAX_RETRY_COUNT", None))
            utils.MAX_RETRY_COUNT = _DATABASE_TRIES
            with suppress(OSError):
                user_cache().mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(user_cache() / LOCK_FILE, lambda: None))
        yield


def _is_database(address: str) -> bool:
    from mlflow.store.db.db_types import DATABASE_ENGINES  # noqa: PLC0415

    return address.startswith(tuple(DATABASE_ENGINES))


def _params(values: Mapping[str, Plain]) -> list[Any]:
    from mlflow.entities import Param  # noqa: PLC0415

    return [Param(_name(name), written(value)[:_LONGEST_VALUE]) for name, value in values.items()]


def _tags(values: Mapping[str, Plain]) -> list[Any]:
    from mlflow.entities import RunTag  # noqa: PLC0415

    return [RunTag(_name(name), written(value)[:_LONGEST_VALUE]) for name, value in values.items()]


def _name(name: str) -> str:
    """Return a name that MLflow takes: of its characters, and a path without dots and empty parts."""
    parts = _REFUSED.sub(lambda found: f"_{ord(found[0]):x}_", name).split("/")
    return posixpath.join(*(part if part.strip(".") else f"_{part}" for part in parts))[:_LONGEST_NAME]
