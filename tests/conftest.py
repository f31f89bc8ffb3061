"""What holds for every test: fixed seeds, one intra-op thread, and nothing left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from crossbow_py.engine.device import graphs
from crossbow_py.engine.trust import assumed
from tests.fork_server import one_for_all
from tests.long_cases import is_long
from tests.triton_version import has_interpreter

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("house")

_IN_INTERPRETER = [
    "unit/engine/kernels", "unit/engine/fusion/units/test_convolution_ways.py",
    "unit/data/resident/test_image_kernels.py", "unit/core/test_triton_launch.py", "unit/train/ladder/test_variants.py",
    "integration/test_kernel_rounds.py", "integration/test_compile_kernels.py",
]  # fmt: skip


assert all((Path(__file__).parent / path).exists() for path in _IN_INTERPRETER), "tests moved"
collect_ignore = [] if has_interpreter() else _IN_INTERPRETER
if importlib.util.find_spec("triton") is None:
    collect_ignore.append("gpu/test_kernels.py")

# Set by pytest itself, or once by a library for its own process when it is first used.
UNWATCHED_VARIABLES = (
    "PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_", "TF_", "GRPC_", "MPL", "_MLFLOW_", "WANDB_SERVICE",
)  # fmt: skip
SECONDS_TO_END = 2.0


def pytest_configure(config: pytest.Config) -> None:
    """Small tensors are slower on many threads than on one, and results should not hang on the number of cores.

    Kernels run in Triton's interpreter, on CPU tensors, but for the tests on a GPU; Triton reads that when imported.
    """
    torch.set_num_threads(1)
    if not _on_gpu(config):
        os.environ["TRITON_INTERPRET"] = "1"


def _on_gpu(config: pytest.Config) -> bool:
    return torch.cuda.is_available() and config.option.markexpr.split(" and ")[0] == "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is imported and collected stays: garbage is not looked for in it, then nor in any test.

    It is most of what there is, and one look through it takes longer than most tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Python's end looks for everything, and libraries complain of what it does not find."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some cases are long; tests marked `gpu` run by themselves, where there is CUDA."""
    for item in items:
        path, case = item.path.relative_to(Path(__file__).parent).as_posix(), getattr(item, "callspec", None)
        if is_long(f"{path}::{item.name.partition('[')[0]}", "" if case is None else case.id):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)
    if _on_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and pytest -m gpu"))


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """Whatever a test has changed, processes are forked from a server that has imported all that any of them needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", one_for_all())
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same generator states."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test ends with the threads, the environment and torch's global settings it began with."""
    threads, environment, torch_settings = set(threading.enumerate()), _environment(), _torch_settings()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in left:
        thread.join(SECONDS_TO_END)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left running: {alive}"
    after, torch_after = _environment(), _torch_settings()
    _restore(environment, torch_settings)
    changed = sorted(name for name in environment.keys() | after.keys() if environment.get(name) != after.get(name))
    assert not changed, f"environment variables left changed: {changed}"
    assert torch_after == torch_settings, f"torch's (threads, dtype, gradients) left at {torch_after}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(UNWATCHED_VARIABLES)}


def _torch_settings() -> tuple[int, torch.dtype, bool]:
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()


def _restore(environment: dict[str, str], torch_settings: tuple[int, torch.dtype, bool]) -> None:
    for name in _environment().keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    threads, dtype, gradients = torch_settings
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)


@pytest.fixture(autouse=True)
def no_capture_has_failed() -> None:
    """A capture that was made to fail in one test does not end all captures in the next; on a GPU it has to."""
    if not torch.cuda.is_available():
        graphs._FAILED_CAPTURES.clear()


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def known_executor() -> Iterator[None]:
    """What `executor=auto` takes is assumed, so that no test measures unless it means to."""
    with assumed("executor", "threads"):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many commands, programs and files of the pages were run, and how many only checked."""
    counts = [value for report in terminalreporter.getreports("passed") for name, value in report.user_properties
              if name == "snippets"]  # fmt: skip
    if counts:
        ran, checked = (sum(count[place] for count in counts) for place in (1, 2))
        terminalreporter.write_line(f"snippets of {len(counts)} pages: {ran} run, {checked} only checked")
