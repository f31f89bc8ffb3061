"""What `python -m crossbow_py.search` says of a user's mistakes, and of trials that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

import crossbow_py
from crossbow_py.search.__main__ import main
from crossbow_py.train.__main__ import main as train
from tests.said import error_line
from tests.searches import merged, report, search_digits, segments
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
MODULE = __name__
CUSTOM = [
    "data=digits", "model=custom", "device=cpu", "precision=fp32", "executor=serial", "packing=none", "method=none",
    "max_epochs=1", "sampler=grid", "output_dir=search",
]  # fmt: skip
OF_ONE_TRIAL = ["num_trials=1", "method=none", "sampler=random", "space={batch_size:[8]}", "max_epochs=1"]


def narrow(width: int = 8) -> nn.Module:
    """A model that is not made with every width."""
    if width > 8:
        raise ValueError(f"{width} is too wide")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Tiring(nn.Module):
    """A linear model that can raise in its rounds."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.linear, self.rounds_left = nn.Linear(64, 10), rounds

    def forward(self, inputs: Tensor) -> Tensor:
        self.rounds_left -= self.training
        if self.rounds_left < 0:
            raise ArithmeticError("that was enough")
        return self.linear(inputs.flatten(1))  # type: ignore[no-any-return]


F1 = ["metrics.f1.target=tests.state_metrics.MacroF1", "metrics.f1.num_classes=10"]


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("overrides", "words"),
    thinned(
        [
            (["space.optimizer.momentun=[0.5]"], ["optimizer.momentun", "did you mean 'optimizer.momentum'"]),
            (["space.momentum=[0.5]"], ["space has no key 'momentum'", "optimizer"]),
            (["space={}", "space.batch_size=[]"], ["space: batch_size", "choices"]),
            (["optimizer=muon", "model.hidden=[]"], ["optimizer=muon needs linear or", "set optimizer=sgd"]),
            (["maximize=true"], ["maximize=true is for a metric of metrics, got metric=accuracy; leave it out"]),
            (["metric=f1", *F1], ["metric=f1 does not say whether greater is better; set maximize=true"]),
            (["metric=f1/11", "maximize=true", *F1], ["metric=f1/11 is none of what the metrics give, f1; set one of"]),
            (
                ["metric=f1", "maximize=true", F1[0], "metrics.f1.num_classes=3"],
                ["metrics['f1'] cannot take the model's output [2, 10] with targets [2]"],
            ),
            (["metric=f1", "maximize=true", F1[0]], ["metrics.f1.target=tests.state_metrics.MacroF1 cannot be made"]),
            (["sampler.n_startup_trials=3"], ["sampler must be a name", "a function that takes a seed"]),
            (["direction=maximize"], ["unknown key direction; did you mean 'maximize'?"]),
            (["scheduler=asha"], ["unknown key scheduler; did you mean 'method'?"]),
            (["space.seed=tag(log,interval(1,9))"], ["write 'space.seed={low:1,high:9,log:true}'"]),
            (["space.seed=loguniform(1,9)"], ["write 'space.seed={low:1,high:9,log:true}'"]),
            (["sampler=no.Sampler"], ["sampler=no.Sampler cannot be imported"]),
            (["method=asha"], ["method must be one of hyperband"]),
            (["packing=all"], ["packing must be one of signature"]),
            (["min_epochs=5"], ["min_epochs", "at most max_epochs (3.0)"]),
            (["max_samples=64"], ["unknown key max_samples, which is for python -m crossbow_py.train"]),
            (["num_learners=2"], ["unknown key num_learners, which is for python -m crossbow_py.train"]),
            (["data.validation_fraction=0"], ["set data.validation_fraction=0.1"]),
            (["batch_size=5000"], ["batch_size=5000", "at most 1351"]),
            (["space.batch_size=[16,5000]"], ["batch_size=5000", "at most 1351"]),
            (["storage=journal:nowhere/search.log"], ["nowhere does not exist", "make it"]),
            (["storage=sqlite:///nowhere/search.db"], ["nowhere does not exist", "make it"]),
            (["data.root=nowhere", "data=mnist", "data.download=false"], ["nowhere"]),
        ],
        quick=range(0, 26, 2),
        slow=range(26),
    ),
)
def test_mistake_is_one_error_line_and_leaves_nothing_behind(
    overrides: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_digits(*overrides) == 2
    said = error_line(capsys)
    for word in words:
        assert word in said
    assert files() == []


@pytest.mark.slow
def test_mistake_leaves_no_trace_in_a_storage_so_that_the_corrected_command_may_use_it() -> None:
    assert search_digits("storage=journal:kept.log", "data.validation_fraction=0") == 2
    assert files() == []
    assert search_digits("storage=journal:kept.log") == 0


@pytest.mark.slow
def test_journal_that_was_emptied_is_refused_and_nothing_is_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_digits() == 0
    capsys.readouterr()
    before = Path("search/search.json").read_bytes()
    Path("search/search.journal").write_bytes(b"")
    assert search_digits() == 2
    assert "search holds results, and journal:search/search.journal holds no search; restore" in error_line(capsys)
    assert Path("search/search.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["null", "auto"])
def test_run_in_the_folder_of_a_search_is_refused_and_the_search_goes_on(
    resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_digits("max_time_s=1e-3") == 0
    capsys.readouterr()
    before = {path: Path(path).read_bytes() for path in files()}
    assert train(["+experiment=digits", "+debug=fast", "device=cpu", "output_dir=search", f"resume={resume}"]) == 2
    assert "output_dir search holds a search, not a run; choose another folder." in error_line(capsys)
    assert {path: Path(path).read_bytes() for path in files()} == before
    assert search_digits() == 0


def test_storage_that_is_no_journal_is_one_error_line_and_keeps_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.log").write_text("my notes\n")
    assert search_digits("storage=notes.log") == 2
    assert "notes.log is no journal of a search; give another path" in error_line(capsys)
    assert Path("notes.log").read_text() == "my notes\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "key", "failing", "reason"),
    [
        ([f"model.target={MODULE}.narrow"], "model.args.width=[4,16,8]", 16, "ValueError: 16 is too wide"),
        ([f"model.target={MODULE}.Tiring"], "model.args.rounds=[20,100000]", 20, "ArithmeticError: that was enough"),
        (["optimizer=sgd", "model=mlp", "model.hidden=[16]"], "optimizer.learning_rate=[1e20,0.1]", 1e20, "not finite"),
    ],
    ids=["when it is made", "in its rounds", "by diverging"],
)
def test_trial_that_fails_is_recorded_with_its_reason_and_the_others_go_on(
    options: list[str], key: str, failing: float, reason: str
) -> None:
    assert main([*merged(CUSTOM, tuple(options)), f"space.{key}"]) == 0
    for trial in report()["trials"]:
        failed = trial["params"][key.partition("=")[0]] == failing
        assert trial["state"] == ("failed" if failed else "complete")
        assert reason in trial["reason"] if failed else trial["reason"] is None
    assert report()["best"]["params"][key.partition("=")[0]] != failing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [*CUSTOM, "model.target=package.model", "space.seed=[1,2]", "num_trials=3"],
            "num_trials=3 is more than the 2 points of the grid; lower it",
        ),
        (
            [*CUSTOM, "model.target=no_such_package.model", "space.seed=[1,2]"],
            "model.target=no_such_package.model cannot be imported",
        ),
        (["+experiment=search_digits", "model=lenet", "device=cpu", "output_dir=search"], "model=lenet needs images"),
        ([*CUSTOM, f"model.target={MODULE}.narrow", "space.model.args.width=[16,32]"], "ValueError: 16 is too wide"),
    ],
)
def test_search_that_no_trial_could_be_of_is_refused_before_any(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert words in error_line(capsys)
    assert files() == []


@pytest.mark.slow
def test_search_of_which_every_trial_fails_is_one_error_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [f"model.target={MODULE}.Tiring", "space.model.args.rounds=[20,30]"]
    assert main([*CUSTOM, *options]) == 1
    said = error_line(capsys)
    assert said.startswith("error: every trial failed, 2 of 2; trial 0: ")
    assert "ArithmeticError: that was enough" in said
    assert [trial["state"] for trial in report()["trials"]] == ["failed", "failed"]
    assert report()["best"] is None
    assert len(segments()) == 2
    assert not list(Path().rglob("*.safetensors"))


@pytest.mark.slow
def test_search_without_optuna_is_one_error_line_that_says_how_to_install_it(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['optuna'] = None\n"
        "from crossbow_py.search.__main__ import main; sys.exit(main(['+experiment=search_digits']))"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(crossbow_py.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: a search needs Optuna")
    assert "run pip install optuna." in done.stderr
    assert files() == []


def rewrite_journal(change: Callable[[str], str]) -> None:
    journal = Path("search/search.journal")
    journal.write_text("".join(change(line) for line in journal.read_text().splitlines(keepends=True)))


@pytest.mark.slow
def test_search_does_not_call_what_its_storage_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_digits(*OF_ONE_TRIAL) == 0
    mkdir = {"model": "custom", "model.target": "os.mkdir", "model.args": "sprung"}

    def with_targets(line: str) -> str:
        record = json.loads(line)
        if record.get("params"):
            choice = {key: json.dumps({"name": "CategoricalDistribution", "attributes": {"choices": [value]}})
                      for key, value in mkdir.items()}  # fmt: skip
            record["params"] = {**record["params"], **dict.fromkeys(mkdir, 0)}
            record["distributions"] = {**record["distributions"], **choice}
        return json.dumps(record, separators=(",", ":")) + "\n"

    rewrite_journal(with_targets)
    capsys.readouterr()
    code = search_digits(*OF_ONE_TRIAL, "resume=auto")
    assert (code, Path("sprung").exists()) == (2, False)
    assert "trial 0 has model='custom', which is not searched there" in error_line(capsys)


@pytest.mark.slow
def test_result_of_a_rung_that_the_search_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_digits(*OF_ONE_TRIAL) == 0
    rewrite_journal(lambda line: line.replace('"rung":0', '"rung":7'))
    capsys.readouterr()
    assert search_digits(*OF_ONE_TRIAL, "resume=auto") == 2
    assert "trial 0 has a result at rung 7" in error_line(capsys)
