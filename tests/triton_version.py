"""Whether Triton's interpreter can run kernels here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

# Older interpreters do not go with the numpy these tests run with; on GPUs older versions serve, and compile.
_OLDEST = Version("3.9")


def has_interpreter() -> bool:
    """It is made for Linux alone."""
    try:
        return Version(version("triton")) >= _OLDEST
    except PackageNotFoundError:
        return False
