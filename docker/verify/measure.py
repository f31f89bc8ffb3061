"""What the files of an image weigh: of a base alone, and by `--base` what was added to it, torch and all else apart."""

import argparse
import os
import re
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

NO_FILES = {"/proc", "/sys", "/dev", "/workspace/runs", "/data", "/cache"}


def bytes_of_image() -> int:
    """All files, each once however many names it has."""
    seen: dict[tuple[int, int], int] = {}
    for walked, below, names in os.walk("/"):
        folder = Path(walked)
        below[:] = [name for name in below if str(folder / name) not in NO_FILES]
        for name in names:
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode):
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def needed_by(name: str) -> dict[str, Distribution]:
    """The distribution, all it requires here, and what these require: of their extras those that are asked for."""
    found: dict[str, Distribution] = {}
    asked = [(name, "")]
    for needed, extra in asked:  # which grows
        try:
            found[needed] = distribution(needed)
        except PackageNotFoundError:
            continue
        for requirement in found[needed].requires or []:
            required = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", requirement)
            if required and extra in (re.findall(r"""extra == ['"]([\w.-]+)""", requirement) or [""]):
                wanted = {"", *(required[2] or "").replace(" ", "").split(",")}
                asked += sorted({(_plain(required[1]), each) for each in wanted} - {*asked})
    return found


def files(installed: Distribution) -> Iterator[Path]:
    """Its files on disk."""
    yield from (path for entry in installed.files or [] if (path := Path(str(entry.locate()))).is_file())


def megabytes(installed: Distribution) -> float:
    """Size of its files."""
    return sum(path.stat().st_size for path in files(installed)) / 1e6


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Print the sizes; the exit code says whether what is over torch and the base is small enough."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=int)
    parser.add_argument("--max-mb", type=float)
    asked = parser.parse_args()
    total = bytes_of_image()
    if asked.base is None:
        print(total)
        return 0
    torch = needed_by("torch")
    others = {_plain(each.metadata["Name"]): megabytes(each) for each in distributions()}
    for name in (*torch, "pip"):  # pip is the base's
        others.pop(name, None)
    torch_mb, others_mb = sum(megabytes(each) for each in torch.values()), sum(others.values())
    over = (total - asked.base) / 1e6 - torch_mb
    print(f"image {total / 1e6:.0f} MB: base {asked.base / 1e6:.0f}, torch and the {len(torch) - 1} packages", end="")
    print(f" it needs {torch_mb:.0f}, over these {over:.0f} (at most {asked.max_mb:.0f})")
    largest = ", ".join(f"{name} {others[name]:.0f}" for name in sorted(others, key=lambda name: -others[name])[:6])
    print(f"of which {len(others)} Python packages {others_mb:.0f} MB ({largest}, ...)")
    print(f"and the C compiler with tini {over - others_mb:.0f} MB")
    return int(over > asked.max_mb)


if __name__ == "__main__":
    sys.exit(main())
