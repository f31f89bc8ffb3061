"""What a result depends on besides its configuration."""

from __future__ import annotations

import platform

import torch

from crossbow_py.core.version import __version__


def versions() -> dict[str, str]:
    """Of this package, of torch and of Python."""
    return {"crossbow_py": __version__, "torch": torch.__version__, "python": platform.python_version()}
