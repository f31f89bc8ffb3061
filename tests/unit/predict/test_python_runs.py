"""`load_models(folder, model=...)`: runs from Python, whose folders do not say how their model is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from crossbow_py import SGD, Independent, Member, UserError, load_models, train_many
from crossbow_py.errors import CheckpointError
from crossbow_py.predict.__main__ import main
from tests.support import linear_model
from tests.trainers import blobs, equal_states, image_model, image_trainer, make_trainer


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_models_of_a_run_from_python_are_those_that_fit_returned():
    result = image_trainer(output_dir="mine").fit(max_epochs=1)
    for path in ("mine", "mine/model.safetensors"):
        (model,) = load_models(path, model=image_model)
        assert equal_states(model, result.model) and not model.training
    own = make_trainer(output_dir="own", averaging=Independent(), optimizer=SGD(learning_rate=(0.01, 0.1)))
    results = own.fit(max_epochs=1).models
    assert all(map(equal_states, load_models("own", model=linear_model), results))


def test_what_no_function_can_open_is_refused_in_one_line(capsys):
    make_trainer(output_dir="mine").fit(max_epochs=1)
    with pytest.raises(UserError, match=r"trained from Python .* by load_models\('mine', model=\.\.\.\) with"):
        load_models("mine")
    assert main(["models=[mine]"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(CheckpointError, match="does not fit this model: .* give the function that the run was given"):
        load_models("mine", model=lambda: nn.Linear(9, 9))
    with pytest.raises(UserError, match="model must be a function that returns an nn.Module"):
        load_models("mine", model=linear_model())
    with pytest.raises(UserError, match="mine is given twice, also as mine/model"):
        load_models("mine/model.safetensors", "mine", model=linear_model)
    Path("empty").mkdir()
    with pytest.raises(UserError, match="empty has no model and is no run"):
        load_models("empty", model=linear_model)


def test_folder_of_many_models_says_how_they_are_had():
    train_many(linear_model, blobs(40), members=[Member(seed=0)], batch_size=4, max_epochs=1, output_dir="many")
    for model in (None, linear_model):
        with pytest.raises(UserError, match="many is a folder of train_many.* take results.models"):
            load_models("many", model=model)
