"""Does what a page says: runs its commands in this process on tiny data, its Python, and writes the files it shows.

A command that cannot run here (several machines, CUDA, containers, what installs or runs for ever) is checked as far as
that goes without running it, and counted apart.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from tensorboard.plugins.core.core_plugin import CorePluginLoader
from torch.distributed.run import get_args_parser

from crossbow_py.check.config import CheckConfig
from crossbow_py.cli.configuration import compose
from crossbow_py.cli.flags import FLAGS, read_flags
from crossbow_py.cli.hydra_words import split_hydra
from crossbow_py.cli.launchers.words import split_launcher
from crossbow_py.cli.overrides import expand_sweeps
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.many.config import ManyConfig
from crossbow_py.predict.config import PredictConfig
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.run_folder.recorded_config import composed
from tests.pages.snippets import LANGUAGES, ROOT, Snippet, commands

# What makes a command of minutes one of seconds; left out where the page says so itself.
FAST = {
    "train": ["+debug=fast"],
    "many": ["+debug=fast"],
    "search": ["+debug=search_fast"],
    "predict": ["latency_s=0"],
    "estimate": [],
    "report": [],
}
KINDS = {
    "train": TrainConfig, "many": ManyConfig, "search": SearchConfig, "predict": PredictConfig,
    "estimate": EstimateConfig, "check": CheckConfig,
}  # fmt: skip
EXAMPLES = ROOT / "docs" / "examples"
# Programs that take a minute each; test_examples.py runs them in a short form.
IN_SHORT = frozenset({
    "tabular.py", "segmentation.py", "bert_classifier.py", "char_gpt.py", "deep_ensemble.py", "fine_tune.py",
})  # fmt: skip
ONLY_ON_CUDA = {"device=cuda", "executor=streams"}
# Packages that are not always installed, by what needs them in a command or a program.
OPTIONAL = {
    "data=huggingface": "datasets", "import datasets": "datasets", "torchvision.": "torchvision",
    "data.rand_augment=": "torchvision",
}  # fmt: skip
SERVICES = ("mlflow", "wandb")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass
class PageRun:
    """One page in one folder: what it did, and what was only checked.

    Attributes:
        folder: the current folder; the files that the page shows are written there.
        ran: commands, programs and files that were run or written.
        checked: commands that were only checked.
        namespace: that of the page's Python, which goes on from block to block.
    """

    folder: Path
    ran: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def do(self, snippet: Snippet) -> None:
        """Do what a block says. Raises AssertionError with its place for what does not work."""
        assert snippet.language in LANGUAGES, f"{snippet.place}: name the language, one of {sorted(LANGUAGES)}"
        if snippet.title is not None:
            path = self.folder / snippet.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.text, encoding="utf-8")
            importlib.invalidate_caches()
        if snippet.language == "sh":
            for words in commands(snippet):
                self.command(words, snippet.place)
        elif snippet.language == "python" and snippet.title is None:
            exec(compile(snippet.text, snippet.place, "exec", dont_inherit=True), self.namespace)
            self.ran.append(snippet.place)
        elif snippet.title in IN_SHORT:
            self.checked.append(f"{snippet.place} {snippet.title}")
        elif snippet.language == "python" and "__main__" in snippet.text and not _lacks(snippet.text):
            runpy.run_path(str(self.folder / (snippet.title or "")), run_name="__main__")
            self.ran.append(f"{snippet.place} {snippet.title}")

    def command(self, words: Sequence[str], place: str) -> None:
        """Run a command, or check it."""
        text = " ".join(words)
        words = list(words)
        while words and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        if words[0] == "eval":  # of what a command prints
            words = words[1].removeprefix("$(").removesuffix(")").split()
        if ">" in words:
            words = words[: words.index(">")]
        name = words[0] if words else ""
        if name == "python" and words[1] == "-m" and words[2].startswith("crossbow_py."):
            self._main(words[2].partition(".")[2], words[3:], place)
        elif name.startswith("crossbow-"):
            self._main(name.partition("-")[2], words[1:], place)
        elif words[:3] == ["python", "-m", "tests.simulated_cuda"]:
            _checks_simulated(words[3:])
            self.checked.append(f"{place} {text}")
        elif name == "python" and (self.folder / words[1]).is_file():
            self._program(words[1], f"{place} {text}")
        elif name == "cp":
            self._copy(words[-2], words[-1])
            self.ran.append(f"{place} {text}")
        elif name in CHECKS:
            CHECKS[name](words)
            self.checked.append(f"{place} {text}")
        else:
            raise AssertionError(f"{place}: no test knows how to run {text!r}")

    def _program(self, name: str, text: str) -> None:
        if name in IN_SHORT or _lacks((self.folder / name).read_text(encoding="utf-8")):
            self.checked.append(text)
            return
        runpy.run_path(str(self.folder / name), run_name="__main__")
        self.ran.append(text)

    def _copy(self, source: str, target: str) -> None:
        found = [path for root in (self.folder, ROOT) for path in [root / source] if path.exists()]
        (shutil.copytree if found[0].is_dir() else shutil.copy)(found[0], self.folder / target)

    def _main(self, entry: str, argv: list[str], place: str) -> None:
        text = f"{place} {entry} {' '.join(argv)}"
        if any(word.startswith(("hydra/launcher=", "launcher=")) for word in argv):  # a package that may not be there
            _, words = read_flags(argv, ())
            for overrides, _ in expand_sweeps(split_launcher(split_hydra(words)[1])[1]):
                compose(overrides, KINDS[entry])
            self.checked.append(text)
            return
        if "--completion" in argv and "bash" not in argv:  # each shell's script takes seconds, in tests of its own
            read_flags(argv, FLAGS)
            self.checked.append(text)
            return
        if ONLY_ON_CUDA & set(argv) or entry == "check" or _lacks(text) or _lacks_service(argv):  # checks take minutes
            compose(argv, KINDS[entry])
            self.checked.append(text)
            return
        debugged = any(word.startswith(("+debug=", "latency_s=", "--")) for word in argv)
        main = importlib.import_module(f"crossbow_py.{entry}.__main__").main
        shorter = ["max_time_s=1"] if "+debug=profile" in argv else []
        code = main([*argv, *(shorter if debugged else _shortened(entry, argv, place))])
        assert code == 0, f"{text} ended with {code}"
        self.ran.append(text)


def _shortened(entry: str, argv: Sequence[str], place: str) -> list[str]:
    """Return the words that make a command one of seconds. Only those of README measure which executor is fastest."""
    if any(word.startswith("num_trials=") for word in argv):
        return [*FAST[entry], "num_trials=4"]
    measures = place.startswith("README.md") or any(word.startswith("executor=") for word in argv)
    return FAST[entry] if measures or entry != "train" else [*FAST[entry], "executor=serial"]


def _lacks(text: str) -> bool:
    """Return whether a command or a program needs a package that is not installed."""
    needed = {package for word, package in OPTIONAL.items() if word in text}
    return not all(map(_is_there, needed))


@functools.cache
def _is_there(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):  # the latter of a torchvision that was built for another torch
        return False
    return True


def _lacks_service(argv: Sequence[str]) -> bool:
    asked = [name for word in argv if word.startswith("logger=") for name in SERVICES if name in word]
    return any(importlib.util.find_spec(name) is None for name in asked)


def _checks_make(words: Sequence[str]) -> None:
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def _checks_torchrun(words: Sequence[str]) -> None:
    """By torchrun's own parser; what it is to run is composed."""
    parsed = get_args_parser().parse_args(words[1:])
    if parsed.module:
        composed(parsed.training_script_args, KINDS[parsed.training_script.partition(".")[2]])


def _checks_tensorboard(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    CorePluginLoader().define_flags(parser)
    parser.parse_args(words[1:])


def _checks_pip(words: Sequence[str]) -> None:
    """What is installed is this project, or something that it declares or pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = [*project["dependencies"], *itertools.chain(*extras.values()), *filter(str.strip, pinned)]
    declared = {Requirement(line).name for line in wanted if not line.startswith("#")}
    for before, word in itertools.pairwise(words[1:]):
        if word.startswith("-"):
            continue
        if before == "-c":
            assert (ROOT / word).is_file(), f"no {word}"
            continue
        name, _, extra = word.rstrip("]").partition("[")
        assert name in declared | {".", project["name"]}, f"pip install {word}: not one of ours"
        assert set(filter(None, extra.split(","))) <= extras.keys(), f"pip install {word}: no such extra"


def _checks_docker(words: Sequence[str]) -> None:
    """Files are there; what the image is to train, or another entry point of it is to do, is checked as by itself."""
    for flag, value in itertools.pairwise(words):
        if flag == "-f":
            assert (ROOT / value).is_file(), f"no {value}"
    if "crossbow_py" in words and words[1] == "run":
        own = words[words.index("crossbow_py") + 1 :]
        if "--entrypoint" in words:
            entry = words[words.index("--entrypoint") + 1]
            CHECKS[entry]([entry, *own])
        else:
            compose(own, TrainConfig)


def _checks_nothing(words: Sequence[str]) -> None:
    """The shell's own, or another program's."""


def _checks_script(words: Sequence[str]) -> None:
    assert (ROOT / words[0]).is_file(), f"no {words[0]}"


def _checks_pytest(words: Sequence[str]) -> None:
    """The tests that are named are there."""
    missing = [word for word in words[1:] if word.startswith("tests") and not (ROOT / word).exists()]
    assert missing == [], f"no {missing}"


def _checks_simulated(words: Sequence[str]) -> None:
    """The module that is to run on the simulated device is there, and so are the tests that are named."""
    assert importlib.util.find_spec(words[0]) is not None, f"no {words[0]}"
    if words[0] == "pytest":
        _checks_pytest(words)


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "make": _checks_make,
    "torchrun": _checks_torchrun,
    "tensorboard": _checks_tensorboard,
    "pip": _checks_pip,
    "pytest": _checks_pytest,
    "docker": _checks_docker,
    "docker/verify.sh": _checks_script,
    **dict.fromkeys((".", "cd", "export", "git", "kill", "sbatch", "kubectl", "source", "ssh"), _checks_nothing),
}


def forget_modules(before: set[str]) -> None:
    """Modules that the page wrote are not those of the next page."""
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and "site-packages" not in file and not Path(file).is_relative_to(ROOT):
            del sys.modules[name]
