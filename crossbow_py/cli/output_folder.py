"""The folders that results are written to: by default runs/<experiment>/<time>."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from crossbow_py.core.errors import unwritable
from crossbow_py.telemetry.records import CONFIG_FILE

RUNS = Path("runs")


def new_folder(experiment: str) -> Path:
    """Make runs/<experiment>/<time>; two runs started in one second get two folders."""
    parent, now = make_folder(RUNS / experiment), time_name()
    path, number = parent / now, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{now}_{number}"
        except OSError as error:
            raise unwritable(path, error) from error


def time_name() -> str:
    """Return the present time as the name of a folder."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def make_folder(path: Path) -> Path:
    """Make a folder if it is missing. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_dangling = path.is_symlink() and not path.exists()
        found = OSError(f"it is a link to {path.readlink()}, which does not exist") if is_dangling else error
        raise unwritable(path, found) from error
    return path


def recorded_folders(experiment: str) -> list[Path]:
    """Return the folders in runs/<experiment> that have a configuration, the newest first."""
    found = (path for path in (RUNS / experiment).glob("*") if (path / CONFIG_FILE).is_file())
    return sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime_ns, reverse=True)
