"""`python -m crossbow_py.many`: its table and files, killed and gone on with, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from crossbow_py.cli.configuration import compose
from crossbow_py.data.sources.digits import Digits
from crossbow_py.many.__main__ import main
from crossbow_py.many.config import ManyConfig
from crossbow_py.models import MLP
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.__main__ import main as train
from tests.thinned import thinned

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
STUDY = [
    "+experiment=digits", "folds=2", "seeds=2", "max_epochs=2", "executor=serial", "output_dir=study", "device=cpu",
    "members=[{optimizer.learning_rate: 0.01}, {name: fast, optimizer.learning_rate: 0.1}]",
]  # fmt: skip


def weights(folder: str) -> dict[str, dict[str, list[float]]]:
    return {
        path.name: {name: value.flatten().tolist() for name, value in load_file(path).items()}
        for path in Path(folder, "members").glob("*.safetensors")
    }


@pytest.mark.slow
def test_members_begin_with_the_weights_of_a_file() -> None:
    """At a rate of 0 adapters add nothing to what they begin with: the base."""
    words = ["+experiment=digits", "executor=serial", "device=cpu", "precision=fp32"]
    assert train([*words, "num_learners=1", "max_epochs=1", "output_dir=base"]) == 0
    lora = ["init_from=base/model.safetensors", "model.lora={rank: 2, targets: ['1']}", "optimizer.learning_rate=0"]
    assert main([*words, *lora, "seeds=2", "max_epochs=0.1", "output_dir=study"]) == 0
    base = read_summary(Path("base"))["test_loss"]
    found = json.loads(Path("study/results.json").read_text())["members"]
    assert [each["test_loss"] for each in found] == pytest.approx([base, base], rel=1e-4)


@pytest.mark.slow
def test_study_of_folds_seeds_and_settings_leaves_its_table_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(STUDY) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out == Path("study/console.log").read_text()
    assert said.out.startswith("digits: 8 members on digits, 1,501 training samples, cpu\n")
    found = json.loads(Path("study/results.json").read_text())
    assert [each["name"] for each in found["members"]] == [
        f"{group}, fold {fold}, seed {seed}"
        for group in ("learning_rate=0.01", "fast") for fold in range(2) for seed in range(2)
    ]  # fmt: skip
    slow, fast = (found["groups"][name]["test_accuracy"] for name in ("learning_rate=0.01", "fast"))
    assert slow["n"] == fast["n"] == 4 and fast["mean"] > slow["mean"] > 0.5
    mean = np.mean([each["test_accuracy"] for each in found["members"]])
    assert found["summary"]["test_accuracy"]["mean"] == pytest.approx(mean)
    for line in ("mean of fast", "ensemble       accuracy 0.9"):
        assert line in said.out
    predictions = np.load("study/out_of_fold.npy")
    assert predictions.shape == (1501, 10) and predictions.sum(1) == pytest.approx(np.ones(1501), abs=1e-5)
    runs = sorted(path.name for path in Path("study/tensorboard").iterdir())
    assert runs == sorted(each["name"] for each in found["members"])
    events = EventAccumulator(f"study/tensorboard/{runs[0]}").Reload()
    assert "many/validation_accuracy_by_evaluation" in events.Tags()["scalars"]
    assert main(STUDY) == 0  # goes on with what is there: nothing
    assert "0 images/s of training" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_are_folders_that_give_what_was_measured_by_peft_over_the_base(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "+experiment=digits", "max_epochs=2", "executor=serial", "output_dir=study", "device=cpu", "model.hidden=[32]",
        'model.lora={targets: ["1"], trained: ["3"]}', "members=[{model.lora.rank: 2}, {model.lora.rank: 3}]", "seed=5",
    ]  # fmt: skip
    assert main(words) == 0
    assert "Adapters, as PEFT loads them, are in study/adapters." in capsys.readouterr().out
    found, digits = json.loads(Path("study/results.json").read_text())["members"], Digits().load(progress=False)
    inputs, labels = digits.test
    inputs = (inputs / 255 - digits.mean[0]) / digits.std[0]
    for each, folder in zip(found, sorted(Path("study/adapters").iterdir()), strict=True):
        torch.manual_seed(each["seed"])
        model = peft.PeftModel.from_pretrained(MLP(hidden=(32,)).build((1, 8, 8), 10), folder).eval()
        assert float((model(inputs).argmax(1) == labels).double().mean()) == pytest.approx(each["test_accuracy"])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_study_that_is_killed_goes_on_to_the_same_bits() -> None:
    words = [*STUDY[:-1], "checkpoint_every_s=0.01", "max_pack_size=2"]
    whole = [word.replace("=study", "=whole") for word in words]
    assert main(whole) == 0
    command, environment = [sys.executable, "-m", "crossbow_py.many", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        # With as many threads as here: on some machines sums of a product depend on their number.
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as child:
            begun = len(list(Path("study/members").glob("*.json"))) if Path("study/members").is_dir() else 0
            limit = time.monotonic() + 120
            while time.monotonic() < limit and child.poll() is None:
                if len(list(Path("study").glob("members/*.json"))) > begun:
                    os.kill(child.pid, signal.SIGKILL)
                    break
                time.sleep(0.005)
    assert 0 < len(list(Path("study/members").glob("*.json"))) <= 4
    assert main(words) == 0
    assert weights("study") == weights("whole") and len(weights("study")) == 4


@pytest.mark.parametrize(
    ("word", "message"),
    thinned(
        [
            ("num_learners=2", "num_learners means nothing to members, which are not averaged and end by themselves;"),
            ("averaging.averaging_period=2", "averaging.averaging_period means nothing to members"),
            ("resume=auto", "resume means nothing to members, which are not averaged and end by themselves; the s"),
            ("class_weights=balanced", "class_weights means nothing to members"),
            ("folds=1", "folds must be at least 2, got 1."),
            ("folds=2000", "folds must be between 2 and the 1501 training samples, got 2000."),
            (
                "members=none.yaml",
                "members=none.yaml is no file; name a YAML file with a list, or write the list itself.",
            ),
            ("members=[]", "members must be a list of mappings, such as [{optimizer.learning_rate: 0.1}], got []."),
            (
                "members=[{seed: 1}]",
                "members: seed is the same for all; what may differ are model, optimizer, schedule, b",
            ),
            ("members=[{optimizer.lr: 1}]", "unknown key optimizer.lr; did you mean 'optimizer.learning_rate'?"),
            (
                "members=[{batch_size: 16}, {batch_size: 16}]",
                "members has 2 of the name 'batch_size=16'; give each its",
            ),
            ("logger=[mlflow]", "logger of members is [tensorboard] or [], got ['mlflow']; leave others out."),
        ],
        quick=range(0, 12, 2),
        slow=range(12),
    ),
)
def test_what_cannot_be_is_refused_on_one_line(capsys: pytest.CaptureFixture[str], word: str, message: str) -> None:
    assert main(["+experiment=digits", word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_members_may_differ_in_lists_and_in_null() -> None:
    members = "members=[{model.hidden: [8]}, {optimizer.clip_norm: null}]"
    config = compose(["+experiment=digits", members], ManyConfig)
    assert config.variants() == [{"model.hidden": [8]}, {"optimizer.clip_norm": None}]
