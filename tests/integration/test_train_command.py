"""`python -m crossbow_py.train`, called in process: what it says, what it leaves on disk and what it returns."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import crossbow_py.report.__main__
import crossbow_py.train.__main__
from crossbow_py.core.errors import LearnerError
from crossbow_py.core.signals import EXIT_INTERRUPTED, EXIT_TERMINATED
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.telemetry.screen import fact
from crossbow_py.train.__main__ import main
from tests.event_files import read_events
from tests.said import error_line
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
DIGITS = ["+experiment=digits", "model.hidden=[32]", "device=cpu", "precision=fp32"]


def two_classes() -> nn.Module:
    """A model for the wrong number of classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def unnamed_classes() -> tuple[Any, Any]:
    """Items (tensor, int) without `classes` or `targets`."""
    return [(torch.zeros(8), 1)] * 40, [(torch.zeros(8), 0)] * 10


def train(*arguments: str) -> int:
    return main([*DIGITS, *arguments])


def test_command_to_its_end_leaves_the_whole_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("max_epochs=3", "output_dir=run") == 0
    assert {path.name for path in Path("run").iterdir()} >= {
        "config.yaml", "metrics.jsonl", "summary.json", "console.log", "tensorboard", "checkpoints",
        "model.safetensors",
    }  # fmt: skip
    summary = read_summary(Path("run"))
    assert (summary["status"], summary["num_learners"], summary["experiment"]) == ("finished", 2, "digits")
    assert summary["test_accuracy"] > 0.8
    assert [line["epoch"] for line in read_metrics(Path("run/metrics.jsonl"))] == [1, 2, 3]
    assert any(Path("run/checkpoints").iterdir())
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == Path("run/console.log").read_text()
    assert f"test accuracy  {summary['test_accuracy']:.4f}" in captured.out
    assert "tensorboard --logdir_spec run:run/tensorboard\n" in captured.out


def test_command_without_output_dir_writes_under_runs() -> None:
    assert train("+debug=fast") == 0
    (run,) = Path("runs/digits").iterdir()
    assert read_summary(run)["samples_seen"] == 2 * 2 * 16
    assert (run / "model.safetensors").exists()
    assert any((run / "checkpoints").iterdir())
    assert any((run / "tensorboard").iterdir())
    assert read_metrics(run / "metrics.jsonl")


def test_command_with_independent_learners_ends_well() -> None:
    assert train("averaging=independent", "max_epochs=1", "output_dir=run") == 0
    assert len(read_metrics(Path("run/metrics.jsonl"))[0]["learner_accuracy"]) == 2


@pytest.mark.parametrize("flag", ["--help", "-h", "--list"])
def test_help_and_list_are_texts_and_train_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "+experiment=nonsense"]) == 0
    said = capsys.readouterr().out
    words = ["resnet32", "sma", "multistep"]
    of_help = ["num_learners=auto", "averaging.correction_rate=0.1", "grouped_sma: 1.0", "α"]
    own = ["LeNet on MNIST"] if flag == "--list" else of_help
    words += own
    for word in words:
        assert word in said
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lsit"], ["unknown option --lsit", "--list"]),
        (["batch_size=5000"], ["batch_size", "1501"]),
        (["data=mnist", "data.root=empty", "data.download=false", "model=lenet"], ["empty"]),
        (["max_epochs=null"], ["max_epochs"]),
        (["model=custom", f"model.target={__name__}.two_classes"], ["10"]),
        (["data=custom", f"data.target={__name__}.unnamed_classes"], ["set data.num_classes, or use model=custom"]),
        (["model=custom", "model.target=no_such_package.model"], ["model.target"]),
        (["-m", "seed=1,2", "batch_size=0"], ["batch_size"]),
        (["-m", "hydra/sweeper=optuna"], ["'hydra/sweeper=optuna' is not read here"]),
        (["--batch_size=32"], ["unknown option --batch_size=32; keys have no dashes: write batch_size=32."]),
        (["--num-learners", "2"], ["keys have no dashes: write num_learners=VALUE."]),
        (["-\x1b[2J\u202e\udc80"], [r"unknown option -\x1b[2J\u202e\udc80; known"]),
        (["-" + "x" * 100_000],
         ["error: unknown option -xxx", "xxx; known: --cfg, --completion, --config-dir, ", "--package, --resolve.\n"]),
        (["+experiment=digits", "+experiment=lenet"], ["error: experiment is chosen 2 times; choose it once.\n"]),
        (["+experiment=digits", "model.hidden=[4096,4096]", "num_learners=16384"],
         ["num_learners=16384 replicas of this model cannot be allocated on cpu", "lower num_learners.\n"]),
        pytest.param(["device=cuda"], ["device=cuda"],
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")),
    ],
)  # fmt: skip
def test_mistake_is_one_error_line_and_exit_code_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["device=cpu", *arguments]) == 2
    said = error_line(capsys)
    assert len(said) < 1000
    for word in words:
        assert word in said
    assert not list(Path("runs").rglob("config.yaml"))


@pytest.mark.slow
def test_metrics_by_their_targets_are_recorded_and_may_change_when_the_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    f1 = ["metrics.f1.target=tests.state_metrics.MacroF1", "metrics.f1.num_classes=10"]
    margin = ["metrics.margin.target=torch.nn.functional.multi_margin_loss", "metrics.margin.p=2"]
    assert train("max_epochs=1", "output_dir=run", *f1, *margin) == 0
    summary = read_summary(Path("run"))
    assert set(summary["metrics"]) == {"f1", "margin"}
    assert 0.5 < summary["metrics"]["f1"] < 1 and abs(summary["metrics"]["f1"] - summary["test_accuracy"]) < 0.1
    assert f" f1 {summary['metrics']['f1']:.4g} " in capsys.readouterr().out
    (line,) = read_metrics(Path("run/metrics.jsonl"))
    assert line["metrics"] == summary["metrics"]
    tags = read_events("run/tensorboard").Tags()["scalars"]
    assert {"metrics/f1", "metrics/margin"} <= set(tags)
    each = [*f1, "metrics.f1.average=null"]
    assert train("max_epochs=2", "output_dir=run", "resume=auto", *each) == 0
    assert set(read_summary(Path("run"))["metrics"]) == {f"f1/{digit}" for digit in range(10)}


@pytest.mark.slow
def test_language_model_shows_its_perplexity_everywhere_without_being_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    arguments = [
        "model=gpt", "model.depth=1", "model.width=16", "model.heads=2", "data=text", "data.file=text.txt",
        "data.context=8", "data.vocabulary=characters", "max_epochs=2", "num_learners=2", "executor=serial",
        "device=cpu", "output_dir=run",
    ]  # fmt: skip
    assert main(arguments) == 0
    summary, lines = read_summary(Path("run")), read_metrics(Path("run/metrics.jsonl"))
    for record in (summary, *lines):
        assert record["metrics"] == {"perplexity": pytest.approx(math.exp(record["test_loss"]), rel=1e-12)}
    said = capsys.readouterr().out
    assert f" · perplexity {lines[0]['metrics']['perplexity']:.4g} · " in said
    assert fact("perplexity", f"{summary['metrics']['perplexity']:.4g}") in said
    events = read_events("run/tensorboard")
    assert [each.value for each in events.Scalars("metrics/perplexity")] == [
        pytest.approx(line["metrics"]["perplexity"], rel=1e-6) for line in lines
    ]
    charts = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"perplexity" in charts
    assert crossbow_py.report.__main__.main(["run"]) == 0
    page = Path("run/report/report.html").read_text()
    assert f"<td>perplexity</td><td>{summary['metrics']['perplexity']:,.4g}</td>" in page
    assert Path("run/report/metric_0_perplexity.png").is_file()


@pytest.mark.slow
def test_run_that_cannot_be_gone_on_with_is_one_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("+debug=fast", "output_dir=run") == 0
    capsys.readouterr()
    for words, said in (([], "resume=auto"), (["resume=auto", "model.hidden=[16]"], "model.hidden")):
        assert train("+debug=fast", "output_dir=run", *words) == 2
        assert said in error_line(capsys)
    for file in Path("run/checkpoints").rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:100])
    assert train("+debug=fast", "output_dir=run", "max_rounds=4", "resume=auto") == 2
    assert "corrupted" in error_line(capsys)


def test_resume_with_a_later_end_goes_on_and_keeps_one_line_per_epoch() -> None:
    assert train("max_epochs=2", "output_dir=run", "schedule=constant") == 0
    assert train("max_epochs=3", "output_dir=run", "schedule=constant", "resume=auto") == 0
    assert [line["epoch"] for line in read_metrics(Path("run/metrics.jsonl"))] == [1, 2, 3]
    assert read_summary(Path("run"))["resumed_from"]


@pytest.mark.slow
def test_rounds_are_counted_since_the_run_began(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for rounds in (2, 5, 5):
        assert train("+debug=fast", "output_dir=run", f"max_rounds={rounds}", "resume=auto") == 0
        seen.append(json.loads(Path("run/summary.json").read_text())["samples_seen"])
    assert seen == [seen[0], seen[0] * 5 / 2, seen[0] * 5 / 2]
    assert "Nothing is left to train: the run had reached max_rounds" in capsys.readouterr().out


@pytest.mark.slow
def test_multirun_in_the_home_folder_is_there_and_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    assert train("-m", "+debug=fast", "seed=1,2", "output_dir=~/sweep") == 0
    folders = Path("home/sweep").iterdir()
    assert {path.name: read_summary(path)["seed"] for path in folders} == {"seed=1": 1, "seed=2": 2}
    assert "compare them: python -m crossbow_py.report" in capsys.readouterr().out
    assert not Path("~").exists()


def test_multirun_with_a_failing_job_runs_the_others_and_returns_the_worst_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("-m", "+debug=fast", "batch_size=5000,16", "output_dir=sweep") == 2
    assert "batch_size" in error_line(capsys)
    assert [path.name for path in Path("sweep").iterdir()] == ["batch_size=16"]


@pytest.mark.slow
def test_multirun_with_an_impossible_job_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("-m", "+debug=fast", "batch_size=16,0", "output_dir=sweep") == 2
    assert not Path("sweep").exists()
    assert "batch_size must be at least 1" in error_line(capsys)


@pytest.mark.parametrize(
    ("number", "status", "code"),
    thinned(
        [(signal.SIGTERM, "terminated", EXIT_TERMINATED), (signal.SIGINT, "interrupted", EXIT_INTERRUPTED)],
        quick=[0],
        slow=[1],
    ),
)
def test_signal_in_the_middle_writes_a_checkpoint_and_resume_auto_takes_it_up(
    number: signal.Signals, status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ConsoleListener, "on_epoch", lambda *_: signal.raise_signal(number))
        assert train("max_epochs=3") == code
    (run,) = Path("runs/digits").iterdir()
    assert read_summary(run)["status"] == status
    assert any((run / "checkpoints").iterdir())
    assert train("max_epochs=3", "resume=auto") == 0
    assert list(Path("runs/digits").iterdir()) == [run]
    assert [line["epoch"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_multirun_ends_with_the_job_that_was_stopped_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsoleListener, "on_epoch", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert train("-m", "max_epochs=3", "seed=1,2", "output_dir=sweep") == EXIT_TERMINATED
    assert [path.name for path in Path("sweep").iterdir()] == ["seed=1"]


def test_loss_that_is_not_finite_is_one_error_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("optimizer.learning_rate=1e30", "max_epochs=2", "output_dir=run") == 1
    said = error_line(capsys)
    assert "learner" in said
    assert "round" in said
    assert read_summary(Path("run"))["status"] == "failed"


def _failing(error: BaseException) -> Any:
    def build(*_: Any) -> Any:
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [(KeyboardInterrupt(), EXIT_INTERRUPTED, False), (RuntimeError("a bug"), 1, True)],
)
def test_fault_of_ours_has_its_traceback_and_an_interrupt_before_training_none(
    error: BaseException, code: int, traceback: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(crossbow_py.train.__main__, "build_trainer", _failing(error))
    assert train() == code
    said = capsys.readouterr().err
    assert ("Traceback" in said, "RuntimeError: a bug" in said) == (traceback, traceback)


def test_memory_that_does_not_hold_a_run_is_one_error_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = LearnerError("learning(0)", 0, "learner 0", torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB."))
    failure.__cause__ = torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB.")
    monkeypatch.setattr(crossbow_py.train.__main__, "build_trainer", _failing(failure))
    assert train() == 1
    said = error_line(capsys)
    assert said.startswith("error: memory does not hold this (OutOfMemoryError: CUDA out of memory. Tried 2 GiB); ")
    assert "python -m crossbow_py.estimate" in said


@pytest.mark.slow
def test_multirun_without_output_dir_names_folders_after_what_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("-m", "seed=1,2", "max_rounds=1") == 0
    (folder,) = Path("runs/digits").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["seed=1", "seed=2"]
    assert "run 2 of 2" in capsys.readouterr().out


def test_resume_auto_with_nothing_to_resume_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("max_rounds=1", "resume=auto") == 0
    assert "There is no checkpoint of an unfinished run configured like this" in capsys.readouterr().out


@pytest.mark.slow
def test_summary_of_a_resumed_run_is_of_the_whole_run() -> None:
    assert train("max_epochs=5", "output_dir=run") == 0
    first = read_summary(Path("run"))
    assert train("max_epochs=5", "output_dir=run", "resume=auto") == 0
    again = read_summary(Path("run"))
    assert again["images_per_s"] == pytest.approx(first["images_per_s"], rel=0.5)  # the last checkpoint takes time, too
    assert again["wall_time_s"] > again["train_time_s"] > 0
