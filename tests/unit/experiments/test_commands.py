"""Every command that a page of the experiments names runs, in a short form, on tiny data.

A command is cut to the options of SHORT, which take the place of its own. What a page shows of a command that was given
once, above a result, is cut in the same way. A command on no list is an error: say what makes it short.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from experiments.bench.results import EXPERIMENTS
from experiments.grids.grid import FILE, read_grids
from experiments.tables import pages, pictures
from experiments.throughput.sides import sides_on
from tests.pages.tiny_data import write_data_root

Words = tuple[str, ...]

# By program, and its first word where it has several jobs: what makes it one of seconds.
SHORT: Mapping[str, str] = {
    "grids": "",
    "grids batch_norm": "batch_size=4",  # 128 batches for statistics
    "before_and_now/run": "--before HEAD --models lenet --executors serial --repetitions 1 --seconds 0.05",
    "auto_tuner/run": "--quiet-s 1 --busy-s 1 --after-s 1",
    "checkpoint/run": "--model resnet32 --num-learners 1 --beside resnet20 --threads 1 --seconds 0.1 --folder {folder}",
    "defaults/run": "--seeds 1 --epochs 1",
    "estimate/run": "--models vgg16 --num-learners 1 --limits 1 --repetitions 0",
    "faults/kill9": "--kills 1 --kills-of-two-ranks 0 --epochs 3 --folder {folder}",
    "faults/restarts": "--runs 1 --starts 1 --epochs 3",
    "gpu/rows": "--json {folder}/rows.json --model lenet --device cpu --seconds 0.02 --turns 1 "
    "--cells serial:1:4:sma fused:2:4:sma",
    "hyperband/run": "--repetitions 1 --processes 0 --device cpu +experiment=search_lenet precision=fp32 num_trials=3 "
    "max_epochs=0.06 min_epochs=0.02 max_pack_size=2",
    "loader/decoders": "--size 16 --images 2 --seconds 0.01",
    "loader/run": "--size 16 --resize 20 --seconds 0.05",
    "muon_cost/run": "--repetitions 1 --rounds 2 --batch-size 4",
    "lora_search/run": "--quick --seeds 1",
    "attribution/run": "--subsets 2 --epochs 1 --repetitions 1",
    "cifar10_fast/run": "--quick --seeds 1 --sides crossbow_py",
    "halving/run": "--quick --repetitions 1",
    "bench/environments": "--list",
    "many_models/run": "--quick --tasks tabular --opponents --repetitions 1",
    "many_models/tokens": "--quick --steps 1x8 --turns 1",
    "memory/run": "--models mlp --num-learners 1 --batch-size 4 --device cpu",
    **{
        f"model_batch/run {figure}": "--quick --device cpu --max-foreign-share 9"
        for figure in ("training", "inference", "mlp_training", "mlp_inference", "lstm", "gru", "layers", "families",
                       "limits")
    },
    "averaged_gradients/run": "--models mlp --batch-size 4 --num-learners 2 --executors fused --precision fp32 "
    "--seconds 0.05 --repetitions 1 --max-foreign-share 9",
    "one_base/run": "--jobs finetune --repetitions 1",
    "overhead/run": "--repetitions 1 --seconds 0.05",
    "preprocessing/run": "--models 1 --rounds 2 --repetitions 1",
    "ranks/search": "--repetitions 1 +experiment=search_digits +debug=search_fast",
    "ranks/run": "--model lenet --batch-size 4 --rounds 2 --repetitions 1",
    "scaling/run": "--rounds 2",
    "small_layers/run": "--shapes tables --repetitions 1 --max-foreign-share 9",
    "throughput/run": "--model mlp --batch-size 4 --num-learners 2 --precision fp32 --seconds 0.05 --repetitions 1 "
    "--max-foreign-share 9 --device cpu --sides {sides}",
    "throughput/suite": "--models mlp --batch-sizes 4 --num-learners 2 --passes 1 --window-s 0.01 --minutes 1 "
    "--max-foreign-share 9 --device cpu",
    "update_bandwidth/run": "--model mlp --num-learners 2 --seconds 0.05 --device cpu",
    "workers/run": "--batch-sizes 2 --workers 1 --seconds 0.2 --repetitions 1",
    "tabular/run": "--quick --repetitions 1 --data churn",
    "tasks/run": "--examples tabular --repetitions 1",
    "zoo/run": "--models test_vit --processes 1",
    "zoo/speed": "--models test_vit --learners 2 --repetitions 1 --seconds 0.05",
}
# Others take seconds.
QUICK = {"tables", "bench/environments", "scaling/run", "update_bandwidth/run", "loader/run", "loader/decoders"}
# These take minutes together. Cells of all grids run in test_learning_experiments.py as well, and most others in short
# forms of their own tests.
LONG = {
    "grids", "throughput/run", "throughput/suite", "model_batch/run",
    "workers/run", "hyperband/run", "muon_cost/run", "overhead/run", "faults/restarts",
    "ranks/search", "checkpoint/run", "tasks/run",
    "averaged_gradients/run", "defaults/run", "one_base/run", "memory/run", "many_models/run", "many_models/tokens",
    "before_and_now/run", "lora_search/run", "halving/run", "tabular/run",
}  # fmt: skip
# Programs of results that pages show with the command of then: what does it now, if anything.
FORMER = {
    "experiments/auto_tuner/throttled.py": "experiments/auto_tuner/run.py",
    "experiments/agreement/run.py throughput": "experiments/before_and_now/run.py",
    "experiments/pack_step_time/run.py": "experiments/model_batch/run.py",
    "experiments/predicted_speed/run.py": None,
    "experiments/tasks/examples.py": "experiments/tasks/run.py",
}
_DROPPED = ("--json", "--jobs", "--cells", "--seeds", "--name")
_FLAGS = ("--add", "--quick")


def named_commands() -> Iterator[Words]:
    """The words of every line of a page that is a command."""
    for page in sorted(EXPERIMENTS.glob("*/README.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if not line.startswith(("    python ", "    pip ")):
                continue
            former = next((words for words in FORMER if words in line), "")
            now = FORMER.get(former, "")
            if now is not None:
                yield tuple(shlex.split(line.replace(former, now) if former else line, comments=True))


def shortened(words: Sequence[str]) -> Words:
    """A command in its short form. Raises KeyError for one that has none."""
    if words[:2] == ("python", "experiments/tables"):
        return ("tables", *words[2:])
    if words[:3] == ("python", "-m", "crossbow_py.train"):
        return ("train", *words[3:], "+debug=fast")
    program = words[1].removeprefix("experiments/").removesuffix(".py")
    if (EXPERIMENTS / Path(program).parent / FILE).exists():  # a command of before there was one for all grids
        program, words = "grids", (*words[:1], "experiments/grids", Path(program).parent.name, *words[2:])
    job = f"{program} {words[2]}" if len(words) > 2 and f"{program} {words[2]}" in SHORT else program
    short = SHORT[job].split()
    return (program, *_kept(words[2:], short), *short)


def _kept(words: Sequence[str], short: Sequence[str]) -> list[str]:
    """The words that the short form does not replace: neither options of it, nor keys, with their values."""
    replaced = {*_DROPPED, *(word for word in short if word.startswith("--"))}
    keys = {word.partition("=")[0] for word in short if "=" in word}
    kept, drops = list[str](), False
    for word in words:
        if word.startswith("--"):
            drops = word in replaced
            if not drops and word not in _FLAGS:
                kept.append(word)
        elif drops:
            continue
        elif word.partition("=")[0] not in keys:
            kept.append(word)
    return kept


# Of a question with grids, one: that all cells are valid is a test in test_learning_experiments.py.
COMMANDS = sorted({
    words[:2] if words[0] == "grids" else words: words
    for words in sorted(map(shortened, (words for words in named_commands() if words[0] == "python")), reverse=True)
}.values())  # fmt: skip


@pytest.fixture
def tiny_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little of every data set, and an empty current folder."""
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(write_data_root(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)


def _marks(program: str) -> list[pytest.MarkDecorator]:
    return [] if program in QUICK else [pytest.mark.slow, *([pytest.mark.long] if program in LONG else [])]


@pytest.mark.parametrize("words", [
    pytest.param(words, id=" ".join(words[:3]), marks=_marks(words[0])) for words in COMMANDS
])  # fmt: skip
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("tiny_data")
def test_command_of_a_page_runs(words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *given = words
    cut = [sides_on("cpu") if word == "{sides}" else [word.format(folder=tmp_path)] for word in given]
    arguments = [word for words in cut for word in words]
    if program == "tables":
        monkeypatch.setattr(pictures, "_save", lambda figure, path: None)
        assert pages.main(arguments or ["--check"]) == 0
        return
    if program == "train":
        arguments.append(f"output_dir={tmp_path}/run")
        assert importlib.import_module("crossbow_py.train.__main__").main(arguments) == 0
        return
    if program.startswith("zoo/") and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    name = "grids.running" if program == "grids" else program.replace("/", ".")
    module = importlib.import_module(f"experiments.{name}")
    written = tmp_path / "written.json"
    if program == "bench/environments":
        assert module.main(arguments) == 0
        return
    if program == "grids":
        grid = read_grids(arguments[0])[arguments[1]]
        written = tmp_path / f"{grid.name}.json"
        arguments += ["--cells", grid.cells[0].name, "--seeds", "0", "--runs", str(tmp_path), "--results",
                      str(tmp_path), "max_epochs=0.1", "+debug=fast"]  # fmt: skip
    else:
        arguments += ["--json", str(written)]
    assert module.main(arguments) == 0
    assert json.loads(written.read_text())["machine"]["cores"] >= 1


def test_every_program_of_a_question_is_named_on_its_page() -> None:
    programs = {
        str(path.relative_to(EXPERIMENTS).with_suffix(""))
        for question in pages.questions()
        if question != "gpu"  # whose programs are stages, see test_gpu.py
        for path in (EXPERIMENTS / question).glob("*.py")
        if re.search(r"^(main = partial|def main\(argv: Sequence\[str\] \| None)", path.read_text(), re.MULTILINE)
    }
    assert programs == {words[0] for words in COMMANDS} - {"tables", "train", "grids", "gpu/rows", "bench/environments"}
