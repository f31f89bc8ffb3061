"""Runs and searches in Weights & Biases."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args

from crossbow_py.core.errors import UserError, without_secrets
from crossbow_py.core.settings import shown
from crossbow_py.core.signals import StopSignal
from crossbow_py.telemetry.events import Images
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.loggers.tracker import END_S, Plain, Point, Subject, Tracker, TrialRun, known_id, refusing

RUN_FILE = "wandb.json"  # in the run's folder: the id of its run
WANDB_FOLDER = "wandb"  # there, too, unless WANDB_DIR is set
FILES_FOLDER = "crossbow_py"  # among the run's files: those of the run's folder
SAMPLES = "samples_seen"  # the x-axis of all curves


class WandbLogger(RunLogger):
    """Records a run in Weights & Biases.

    Where it goes follows its own variables, such as WANDB_MODE, WANDB_PROJECT and WANDB_DIR. Without the last, a run
    with a folder has its files there.

    Args:
        project: None is WANDB_PROJECT, else the run's `experiment`.
        name: None is WANDB_NAME, else the name of the run's folder.
        log_model: keep the model as an artifact of the run.
        init: further arguments of `wandb.init`, such as `entity`, `group`, `tags` and `mode`.

    Raises:
        UserError: wandb is not installed; when the run begins, also that `wandb.init` has no such argument.
    """

    def __init__(
        self, project: str | None = None, name: str | None = None, log_model: bool = False, **init: Any
    ) -> None:
        super().__init__(WandbTracker(project, name, **init), log_model)


class WandbTracker(Tracker):
    """A run in Weights & Biases; the arguments are those of `WandbLogger`."""

    NAME: ClassVar[str] = "Weights & Biases"
    KEY: ClassVar[str] = "wandb"
    MODULE: ClassVar[str] = "wandb"
    IS_SHARED: ClassVar[bool] = False

    def __init__(self, project: str | None = None, name: str | None = None, **init: Any) -> None:
        super().__init__()
        self._project, self._name, self._init = project, name, init
        self._run: Any = None
        self._run_id: str | None = None

    def check(self) -> None:
        import wandb  # noqa: PLC0415  an extra, which takes a second

        modes = get_args(wandb.Settings.model_fields["mode"].annotation)
        mode = self._init.get("mode") or os.environ.get("WANDB_MODE")
        if mode and mode not in modes:
            raise UserError(f"WANDB_MODE must be one of {', '.join(modes)}, got {shown(mode)}; correct it.")

    def open(self, subject: Subject) -> list[str]:
        import wandb  # noqa: PLC0415

        self.check()
        folder = subject.folder
        if folder is not None and (folder / WANDB_FOLDER).is_symlink():
            raise UserError(f"output_dir {folder} has {WANDB_FOLDER} as a link; remove it, or set WANDB_DIR.")
        given = {
            "project": self._project or os.environ.get("WANDB_PROJECT") or subject.experiment,
            "name": self._name or os.environ.get("WANDB_NAME") or subject.name,
            "config": {**subject.parameters, **subject.facts},
            "reinit": "create_new",  # beside a run that the program has itself
            # There is console.log. What takes longer to upload in the end stays in the folder.
            "settings": wandb.Settings(console="off", quiet=True, finish_timeout=END_S),
        }
        if folder is not None and not os.environ.get("WANDB_DIR"):
            given["dir"] = str(folder)
        if subject.worker is not None and folder is not None:
            given["group"] = os.environ.get("WANDB_RUN_GROUP") or folder.resolve().name
        remedy = "log in with wandb login, correct WANDB_BASE_URL, set WANDB_MODE=offline"
        with (
            known_id(folder if subject.worker is None else None, RUN_FILE) as known,
            refusing(self, self.NAME, remedy),
            _masked_command_line(),
        ):
            before = (known.value or self._run_id) if subject.continues else None
            if before is not None:
                given |= {"id": before, "resume": "allow"}
            self._run = run = _begun({**given, **self._init})
            self._run_id = known.value = run.id
            run.config.update({**subject.parameters, **subject.facts}, allow_val_change=True)
            run.define_metric(SAMPLES)
            run.define_metric("*", step_metric=SAMPLES)
        goes_on = "goes on with" if before is not None else "records"
        where = f"{Path(run.dir).parent}, which wandb sync uploads" if run.offline else run.url
        return [f"{self.NAME} {goes_on} run {run.name or run.id} ({run.id}) at {where}"]

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({SAMPLES: point.samples_seen, **point.values})

    def picture(self, name: str, picture: Images, samples_seen: int) -> None:
        import wandb  # noqa: PLC0415

        self._run.log({SAMPLES: samples_seen, name: wandb.Image(picture)})

    def file(self, path: Path) -> None:
        # In a folder, as config.yaml is a name of the package's own.
        copy = Path(self._run.dir) / FILES_FOLDER / path.name
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        self._run.save(glob.escape(str(copy)), base_path=self._run.dir, policy="now")

    def model(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=f"{path.stem}-{self._run.id}", type="model")

    def trials(self, trials: Sequence[TrialRun], metric: str) -> None:
        """Show a table of the trials."""
        import wandb  # noqa: PLC0415

        keys = list(dict.fromkeys(key for trial in trials for key in trial.parameters))
        rows = [
            [
                trial.number,
                *(trial.parameters.get(key) for key in keys),
                max(trial.values, default=None),
                trial.values[max(trial.values)] if trial.values else None,
                trial.failed,
            ]
            for trial in trials
        ]
        columns = ["trial", *keys, SAMPLES, metric, "failed"]
        self._run.log({"trials": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

    def end(self, status: str, samples_seen: int, figures: Mapping[str, float], facts: Mapping[str, Plain]) -> None:
        self._run.summary.update({**figures, **{f"summary/{name}": value for name, value in facts.items()}})
        self._run.finish(exit_code=StopSignal.EXIT_CODES.get(status, int(status == "failed")))


def _begun(arguments: Mapping[str, Any]) -> Any:
    import wandb  # noqa: PLC0415

    try:
        return wandb.init(**arguments)
    except TypeError as error:
        raise UserError(f"WandbLogger passes its other arguments to wandb.init, and {error}; correct them.") from error


@contextmanager
def _masked_command_line() -> Iterator[None]:
    """Hide passwords in the command line, which the package records: a search's has the address of its storage."""
    words = sys.argv
    sys.argv = [without_secrets(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words
