"""The examples of the guides: each runs, learns, and does what its first lines say."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from crossbow_py.models.gpt import GPT
from tests.pages.commands import EXAMPLES, IN_SHORT
from tests.pages.snippets import ROOT
from tests.unit.data.images.pictures import save


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: an empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
        del sys.modules[name]
    return module


def test_every_example_is_tested_and_shown_on_a_page() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"plain_loop"}  # which the others import
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert {name for name in names if f'--8<-- "docs/examples/{name}.py"' in pages} == names
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert {name for name in names if f'"{name}"' in tests} == names
    assert {name.removesuffix(".py") for name in IN_SHORT} <= names


@pytest.mark.timeout(300)
def test_plain_loop_and_trainer_reach_about_the_same_accuracy() -> None:
    plain, with_trainer = example("plain_script").main()
    assert plain > 0.93
    assert with_trainer == pytest.approx(plain, abs=0.04)


@pytest.mark.timeout(300)
def test_images_of_hugging_face_learn() -> None:
    pytest.importorskip("datasets")
    assert example("huggingface_dataset").main() > 0.9


@pytest.mark.timeout(300)
def test_model_of_a_factory_learns() -> None:
    assert example("timm_model").main() > 0.9


@pytest.mark.timeout(300)
def test_deep_ensemble_knows_more_than_one_of_its_models() -> None:
    one, together = example("deep_ensemble").main(count=300, epochs=20, num_models=6)
    assert together < one - 0.02


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "short", "least"),
    [
        ("tabular", {"count": 4000, "epochs": 4}, 0.8),  # 0.73 are not hired
        ("bert_classifier", {"count": 1200, "epochs": 6}, 0.9),
        ("segmentation", {"count": 200, "epochs": 3}, 0.87),  # 0.84 are ground
    ],
)
def test_learners_of_an_example_score_as_the_plain_loop(name: str, short: dict[str, int], least: float) -> None:
    (plain, _), (learners, _) = example(name).main(**short, num_learners=2, executor="serial")
    assert min(plain, learners) > least
    assert learners == pytest.approx(plain, abs=0.06)


@pytest.mark.timeout(300)
def test_fine_tuned_model_of_timm_learns_the_photographs_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSBOW_DATA_DIR", str(tmp_path))
    draw = np.random.default_rng(0)
    for part, per_class in (("train", 16), ("val", 8)):
        for channel, name in enumerate(("red", "green", "blue")):
            for number in range(per_class):
                pixels = draw.integers(0, 150, (40, 48, 3), dtype=np.uint8)
                pixels[..., channel] += 60
                save(tmp_path / "flowers_300" / part / name / f"{number}.png", pixels)
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=small_model))  # which has no weights to load
    (plain, _), (learners, _) = example("fine_tune").main(epochs=6, num_learners=1, executor="serial", num_workers=0)
    assert min(plain, learners) > 0.8  # of three classes


def small_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
    """Stands in for `timm.create_model`."""
    assert (name, pretrained) == ("resnet18", True)
    model = nn.Sequential()
    model.features = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model.fc = nn.Linear(32, num_classes)
    model.get_classifier = lambda: model.fc
    return model


@pytest.mark.timeout(300)
def test_char_gpt_learns_the_bytes_of_a_text_and_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 10_000, encoding="utf-8")
    module = example("char_gpt")
    scores = module.make_model()(torch.zeros(2, module.CONTEXT, dtype=torch.long))
    assert scores.shape == (2, module.CONTEXT, 256)
    monkeypatch.setattr(module, "CONTEXT", 32)
    monkeypatch.setattr(module, "make_model", lambda: GPT(depth=1, width=64, heads=2).build((32,), 256))
    (plain, _), (learners, _) = module.main(file="text.txt", epochs=0.5, num_learners=2, executor="serial")
    assert max(plain, learners) < 1.0  # of ln 256 = 5.5 at first; 2.1 knows how often each letter comes
    assert module.generate(module.make_model(), "abc", length=5).startswith("abc")


@pytest.mark.timeout(300)
def test_weights_of_a_run_are_the_same_model_without_the_trainer(folder: Path) -> None:
    module = example("load_weights")
    accuracy, loaded, exported = module.main()
    assert accuracy > 0.9
    assert loaded == exported == pytest.approx(accuracy, abs=1e-6)
    assert (folder / "runs" / "load_weights" / "model.pt2").is_file()
    weights = load_file(folder / "runs" / "load_weights" / "model.safetensors")
    assert weights.keys() == module.make_model().state_dict().keys()
    known = {"nn": nn, "load_file": load_file, "RUN": module.RUN}  # all that it takes
    exec(f"{inspect.getsource(module.make_model)}\n{inspect.getsource(module.load)}", known)
    assert torch.equal(known["load"]().state_dict()["5.weight"], weights["5.weight"])
