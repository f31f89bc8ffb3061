"""The documentation: it builds without a warning, and asks for nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.snippets import ROOT, pages

_PATH = re.compile(r"`([\w./]+(?:\.py|\.c|/))`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(300)
def test_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file()


def test_no_page_of_the_site_loads_anything_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)\"")
    found = {url for page in site.rglob("*.html") for url in loads.findall(page.read_text(encoding="utf-8"))}
    assert found == set()


def test_links_of_pages_lead_somewhere() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages()
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if not link.startswith(("http:", "https:", "mailto:")) and not (page.parent / link).exists()
    ]
    assert missing == []


def test_files_that_pages_for_developers_name_are_there() -> None:
    """Below the package or the checkout, or beside one that the same line named before."""
    missing, named = [], 0
    architecture, contributing = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/architecture.md", "CONTRIBUTING.md")
    )
    listed = contributing.split("## Where to find what\n")[1].split("\n## ")[0]
    for line in (architecture + listed).splitlines():
        folders = [ROOT / "crossbow_py", ROOT]
        for name in _PATH.findall(line):
            found = [folder / name for folder in folders if (folder / name).exists()]
            named += 1
            folders += [path if path.is_dir() else path.parent for path in found]
            missing += [] if found else [f"{name}: {line}"]
    assert missing == []
    assert named > 30  # the pages do name files
