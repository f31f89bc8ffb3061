"""Every command, program and file on a page does what the page says; what could only be checked is counted apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from crossbow_py.averaging import RULES
from crossbow_py.engine.executors import EXECUTORS
from tests.pages.commands import PageRun, forget_modules
from tests.pages.snippets import ROOT, indented_blocks, pages, snippets
from tests.pages.tiny_data import write_data_root


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_root(tmp_path_factory.mktemp("data"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_does_what_it_says(
    page: Path,
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(data_root))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if (datasets := sys.modules.get("datasets")) is not None:  # it has read the variable
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    modules, run = set(sys.modules), PageRun(tmp_path)
    try:
        with patch.dict(RULES), patch.dict(EXECUTORS):  # pages add to them
            for snippet in snippets(page):
                run.do(snippet)
    finally:
        forget_modules(modules)
    record_property("snippets", [str(page.relative_to(ROOT)), len(run.ran), len(run.checked)])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_block_that_is_not_run(page: Path) -> None:
    assert indented_blocks(page) == []
