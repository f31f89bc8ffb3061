"""`pip config list | pip_conf.py`: where pip takes packages from, as a pip.conf; `pip_conf.py --folders <pip.conf`."""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PASSED = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "proxy", "timeout", "no-index")
ENVIRONMENT = ":env:"


def settings(listed: Iterable[str]) -> dict[str, str]:
    """What concerns installing, of the lines `section.key='value'`; the environment wins over files."""
    kept: dict[str, str] = {}
    for line in listed:
        name, _, value = line.strip().partition("=")
        section, _, key = name.rpartition(".")
        if key in PASSED and (section == ENVIRONMENT or (section in ("global", "install") and key not in kept)):
            kept[key] = " ".join(str(ast.literal_eval(value)).split())
    return kept


def folders(lines: Iterable[str]) -> Iterator[Path]:
    """Folders of this machine that a pip.conf needs. The files of an index lie beside its pages: its parent."""
    for word in " ".join(line.partition("=")[2] for line in lines).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            yield path.parent if path.is_file() or word.startswith("file://") else path


if __name__ == "__main__":
    if sys.argv[1:] == ["--folders"]:
        print(*sorted({str(path) for path in folders(sys.stdin)}), sep="\n")
    else:
        print("[global]", *(f"{key} = {value}" for key, value in settings(sys.stdin).items()), sep="\n")
