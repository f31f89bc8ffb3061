"""The archive of a climb: one file to send with a report about a failure."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import replacing
from crossbow_py.engine.trust import Outcome

_VARIABLES = ("CROSSBOW_", "CUDA_", "CUDNN_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_", "SIMULATED_")
_CONVOLUTIONS = Path("cache") / "crossbow_py" / "convolutions.json"


def check_writable(path: Path) -> None:
    """Raise UserError if an archive cannot be written, before minutes are spent on what is to be in it.

    It may replace an archive, and no other file.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not tarfile.is_tarfile(path):
            raise FileExistsError(errno.EEXIST, "it is there already, and is no archive")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def write_archive(
    path: Path, folder: Path, facts: Mapping[str, str], outcomes: Mapping[str, Outcome], lines: Sequence[str]
) -> None:
    """Write the archive.

    Args:
        path: the file, which is replaced.
        folder: what the children have written.
        facts: the device and versions.
        outcomes: those of all rungs, by name.
        lines: what was shown.

    Raises UserError if the file cannot be written.
    """
    texts = {
        "check.txt": "\n".join(lines) + "\n",
        "versions.json": json.dumps({**facts, **_surroundings()}, indent=1),
        "outcomes.json": json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1),
        "junit.xml": junit(outcomes),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    own = [folder / name for name in texts]
    logs = [each for name in outcomes for each in (folder / f"{name}.log", folder / f"{name}.json") if each.exists()]
    chosen = [folder / _CONVOLUTIONS] if (folder / _CONVOLUTIONS).exists() else []
    try:
        with replacing(path) as partial, tarfile.open(partial, "w:gz") as archive:
            for each in (*own, *logs, *chosen):
                archive.add(each, f"{path.name.partition('.')[0]}/{each.name}")
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _surroundings() -> dict[str, object]:
    """Return what may matter to a fault besides what outcomes depend on."""
    names = [name for name in sorted(os.environ) if name.startswith(_VARIABLES)]
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cores": os.cpu_count(),
        "memory_gib": [round(torch.cuda.get_device_properties(index).total_memory / 2**30, 2)
                       for index in range(torch.cuda.device_count())],
        "environment": {name: os.environ[name] for name in names},
    }  # fmt: skip


def _cannot_be_written(path: Path, error: OSError) -> UserError:
    reason = error.strerror or error
    return UserError(f"archive {path} cannot be written ({reason}); name a file in a folder that can: archive=PATH.")


def junit(outcomes: Mapping[str, Outcome]) -> str:
    """Return the outcomes as JUnit XML: a test case a rung."""
    counts = {"failures": "failed", "skipped": "skipped"}
    numbers = {key: str(sum(each.status == status for each in outcomes.values())) for key, status in counts.items()}
    suite = ET.Element("testsuite", {"name": "crossbow_py.check", "tests": str(len(outcomes)), **numbers})
    for name, outcome in outcomes.items():
        case = ET.SubElement(suite, "testcase", classname="ladder", name=name, time=f"{outcome.seconds:.3f}")
        if outcome.status == "failed":
            ET.SubElement(case, "failure", message=outcome.reason)
        elif outcome.status == "skipped":
            ET.SubElement(case, "skipped", message=outcome.reason)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)
