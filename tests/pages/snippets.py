"""What pages tell readers to type: the fenced blocks of a Markdown page, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = frozenset({"sh", "python", "yaml", "text", "json", "c"})
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+)(?P<info>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_INCLUDE = re.compile(r'^--8<-- "([^"]+)"$')


@dataclass(frozen=True)
class Snippet:
    """A fenced block: `page:line` of its fence, its language, and the file that it is said to be, if any."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    @property
    def place(self) -> str:
        """Where to look."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that a newcomer reads. Those of the experiments have commands of hours and are left out."""
    others = ("README.md", "CONTRIBUTING.md", "tests/simulated_cuda/README.md")
    return [*(ROOT / name for name in others), *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    """The fenced blocks of a page in their order, includes resolved."""
    found: list[Snippet] = []
    fence, start, info, lines = "", 0, "", list[str]()
    indent = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if not fence and match:
            fence, start, info, lines, indent = match["ticks"], number, match["info"].strip(), [], len(match["indent"])
        elif fence and match and match["ticks"].startswith(fence) and not match["info"].strip():
            title = _TITLE.search(info)
            language = info.split()[0] if info else ""
            found.append(
                Snippet(page, start, language, title[1] if title else None, _included("\n".join(lines)) + "\n")
            )
            fence = ""
        elif fence:
            lines.append(line[min(indent, len(line) - len(line.lstrip())) :])
    assert not fence, f"{page}:{start}: the block has no end"
    return found


def _included(text: str) -> str:
    """The text of a file that the block includes, or the block as it is."""
    match = _INCLUDE.match(text.strip())
    return (ROOT / match[1]).read_text(encoding="utf-8").rstrip("\n") if match else text


def commands(snippet: Snippet) -> list[list[str]]:
    """The words of every command of a `sh` block: lines joined at backslashes, comments dropped."""
    joined = re.sub(r"\\\n\s*", "", snippet.text)
    words = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [each for each in words if each]


def indented_blocks(page: Path) -> list[str]:
    """Lines of blocks made by indentation, which have no language and so nobody runs them."""
    found, in_fence, before = list[str](), False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if _FENCE.match(line):
            in_fence = not in_fence
        elif not in_fence and line.startswith("    ") and not before.strip() and line.strip():
            found.append(f"{page.relative_to(ROOT)}:{number}")
        before = line
    return found
