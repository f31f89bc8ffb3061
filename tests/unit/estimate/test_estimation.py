"""`python -m crossbow_py.estimate`: answers, files, and mistakes in one line each."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.data.datasets import as_pair
from crossbow_py.engine.sizing.memory import Sample
from crossbow_py.estimate.__main__ import main
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.estimate.estimation import _made_up, estimate
from crossbow_py.estimate.report import as_text
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_settings import RunSettings

GIB = 2**30


def plain(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    assert main([*overrides, f"output_dir={tmp_path}"]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "estimate.json").read_text())
    return found


def custom_data() -> tuple[Any, Any]:
    """Token sequences, and 5 classes."""
    return tuple((torch.zeros(n, 12, dtype=torch.int64), torch.arange(n) % 5) for n in (40, 10))


class Rows(Dataset[Any]):
    """Two inputs a sample, one of them a list, as Hugging Face has them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": [index % 7] * 12, "weights": torch.ones(12), "labels": index % 5}


def rows() -> tuple[Any, Any]:
    return Rows(), Rows()


class EmbedsWeighted(nn.Module):
    """For those."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(100, 16), nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.linear((self.embedding(tokens) * weights[..., None]).mean(1))}


class Embeds(nn.Module):
    """For those."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(100, 16), nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(self.embedding(tokens).mean(1))
        return scores


def test_adapters_that_fit_over_one_base_are_counted_and_said_in_a_sentence() -> None:
    words = ["model=mlp", "model.hidden=[256,256]", "data=mnist", "memory=64MiB", "held_back=0", "precision=fp32"]
    words += ["optimizer=adamw", "batch_size=2", "executor=serial"]
    found = estimate(compose([*words, "model.lora={rank: 2, targets: ['1', '3']}"], EstimateConfig))
    count, base = found.fitting_adapters, 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert count is not None
    needed = [found.model.predicted_bytes(2, k, 1) for k in (count, count + 1)]
    assert needed[0] <= 64 * 2**20 < needed[1]
    each = (needed[0] - found.model.predicted_bytes(2, 1, 1)) / (count - 1)
    own = 2 * (784 + 256 + 256 + 256) * 4 * 5  # weights, gradients, corrections and two moments
    assert each == pytest.approx(own, rel=0.02)
    assert (
        f"\nIn crossbow_py.many {count:,} adapters fit over one base of {base:,} values, 1.03 MiB, with batch_size=2; "
        in as_text(found)
    )
    plain = estimate(compose(words, EstimateConfig))
    assert plain.fitting_adapters is None and "adapters" not in as_text(plain)


@pytest.mark.slow
def test_estimate_writes_an_answer_that_fits_and_the_next_larger_does_not(tmp_path: Path) -> None:
    found = plain(tmp_path, "+experiment=resnet20", "memory=2GiB", "num_learners=3", "held_back=0", "precision=fp32")
    assert found["method"] == "counted"
    assert found["limit_bytes"] == found["memory_bytes"] == 2 * GIB
    rows = {row["num_learners"]: row for row in found["table"]}
    assert list(rows) == [1, 2, 3, 4, 6, 8]
    best = found["recommendation"]
    assert best["batch_size"] == rows[3]["batch_size"]
    assert best["num_workers"] == 0
    model = estimate(
        compose(["+experiment=resnet20", "memory=2GiB", "held_back=0", "precision=fp32"], EstimateConfig)
    ).model
    for k, row in rows.items():
        assert row["predicted_bytes"] == model.predicted_bytes(row["batch_size"], k, k) <= 2 * GIB
        assert model.predicted_bytes(row["batch_size"] + 1, k, k) > 2 * GIB
    assert sum(found["breakdown_bytes"].values()) == found["predicted_bytes"]
    assert found["config"]["experiment"] == "resnet20"


@pytest.mark.slow
def test_estimate_counts_the_velocity_and_the_ema_that_the_averaging_rule_keeps() -> None:
    def needed(*options: str) -> int:
        model = estimate(compose(["model=lenet", "data=mnist", "memory=1GiB", *options], EstimateConfig)).model
        return model.predicted_bytes(16, 2, 2) // model.learner(16).weights

    plain = needed("averaging=sma")
    assert needed("averaging=sma", "averaging.average_ema=2") == plain + 1
    assert needed("averaging=slowmo", "averaging.average_ema=2") == plain + 2


@pytest.mark.slow
def test_estimate_of_images_that_are_not_there_assumes_imagenet_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = ["model=resnet18", "data=image_folder", "data.size=32", "data.resize=32", f"data.root={tmp_path}"]
    assert main([*overrides, "memory=4GiB", "num_learners=2"]) == 0
    said = capsys.readouterr().out
    assert "1000 classes are assumed" in said
    assert "With 2 learners: batch_size=" in said
    assert "training not measured" in said


@pytest.mark.slow
def test_estimate_without_output_dir_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory=1GiB"]) == 0
    assert main(["-m", "memory=1GiB", "batch_size=16,32"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_estimate_draws_a_picture_where_it_can(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain(tmp_path, "memory=1GiB")
    assert (tmp_path / "estimate.png").read_bytes().startswith(b"\x89PNG")


def test_estimate_without_matplotlib_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plain(tmp_path, "memory=1GiB")
    assert "No picture: matplotlib is not there" in capsys.readouterr().out
    assert not (tmp_path / "estimate.png").exists()


def test_estimate_on_this_machine_is_held_against_its_free_memory(tmp_path: Path) -> None:
    found = plain(tmp_path, "device=cpu", "max_learners=2")
    assert found["host"]["memory_bytes"] > found["limit_bytes"] > 0
    assert "workspaces inside operators" in found["held_back"]


def test_estimate_of_the_users_own_model_and_data_reads_the_data(tmp_path: Path) -> None:
    here = f"{__name__}"
    found = plain(
        tmp_path, "model=custom", f"model.target={here}.Embeds", "data=custom", f"data.target={here}.custom_data",
        "memory=1GiB", "held_back=0",
    )  # fmt: skip
    assert found["resident"] is True
    assert found["sample_bytes"] == 12 * 8
    assert found["recommendation"]["batch_size"] == 40  # all samples
    assert found["recommendation"]["limits"] == ["samples"]


def test_estimate_of_items_with_several_inputs(tmp_path: Path) -> None:
    found = plain(
        tmp_path, "model=custom", f"model.target={__name__}.EmbedsWeighted", "data=custom",
        f"data.target={__name__}.rows", "memory=1GiB", "held_back=0",
    )  # fmt: skip
    assert found["resident"] is False
    assert found["sample_bytes"] == 12 * 8 + 12 * 4
    assert found["recommendation"]["batch_size"] == 40  # all samples


@pytest.mark.slow
def test_estimate_with_one_learner_at_a_time_counts_one_pass() -> None:
    at_once, in_turn = (
        estimate(compose(["+experiment=resnet20", "memory=1GiB", "num_learners=4", *extra], EstimateConfig))
        for extra in ([], ["executor=serial"])
    )
    assert at_once.recommendation is not None and in_turn.recommendation is not None
    assert in_turn.recommendation.batch_size > 3.9 * at_once.recommendation.batch_size


@pytest.mark.slow
def test_estimate_where_nothing_fits_says_how_much_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=vgg16", "data=cifar10", "memory=100MB", "num_learners=2", "held_back=0"]) == 0
    assert "Nothing fits: 2 learners need" in capsys.readouterr().out


@pytest.mark.slow
def test_answer_says_at_least_only_where_all_learners_that_were_asked_about_fit() -> None:
    found = estimate(compose(["+experiment=resnet20", "memory=1GiB", "num_learners=3"], EstimateConfig))
    table = dict.fromkeys((1, 2, 3, 4, 6), 10)  # 8 are asked about, and do not fit
    assert "configured: 6 learners fit" in as_text(dataclasses.replace(found, table=table, fitting_learners=6))
    assert "configured: at least 8 learners fit" in as_text(dataclasses.replace(found, fitting_learners=8))


@pytest.mark.slow
def test_estimate_takes_the_users_speed_of_the_device() -> None:
    overrides = ["model=resnet18", "data=image_folder", "data.size=32", "data.resize=32", "data.root=/nowhere"]
    found = estimate(compose([*overrides, "memory=1GiB", "images_per_s=500"], EstimateConfig))
    assert found.loading.step_s == 1 / 500
    assert not found.loading.through_shared  # images have memory of their own
    assert found.loading.fetch_s is None


class MadeUpDevice:
    """Stands in for rounds on a GPU: they take `scale` times what is counted, and an executor may refuse the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scale: float, refused: str = "") -> None:
        self.scale, self.refused, self.limit = scale, refused, 0
        self.ran: dict[int, bool] = {}
        self.executors: set[str] = set()
        monkeypatch.setattr("crossbow_py.estimate.estimation.choose_device", lambda _: torch.device("cuda", 0))
        monkeypatch.setattr("crossbow_py.estimate.estimation.free_bytes", lambda _: 2 * GIB)
        monkeypatch.setattr("crossbow_py.estimate.estimation.within", self.within)
        monkeypatch.setattr("crossbow_py.estimate.estimation.reserved_bytes", self.reserved)
        plain = compose(["+experiment=resnet20", "memory=2GiB", "precision=fp32"], EstimateConfig)
        self.model = estimate(plain).model

    @contextmanager
    def within(self, limit_bytes: int, device: torch.device) -> Iterator[None]:
        self.limit = limit_bytes
        yield

    def reserved(self, make_model: Any, sample: Sample, classes: Any, settings: RunSettings, *_: Any) -> int | None:
        assert sample.input_dtype == torch.uint8  # CIFAR's images
        self.executors.add(settings.executor)
        if settings.executor == self.refused:
            raise UserError("executor=fused cannot run this model: for a reason; set executor=auto.")
        k = settings.first_learners
        needed = self.model.predicted_bytes(settings.batch_size, k, 1 if settings.executor == "serial" else k)
        taken = int(self.scale * (needed - self.model.fixed_bytes))  # samples are made up there
        self.ran[settings.batch_size] = taken <= self.limit
        return taken if taken <= self.limit else None


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.8, 1.3])
def test_estimate_with_a_gpu_recommends_what_was_run_and_fits_the_table_to_it(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = MadeUpDevice(monkeypatch, scale)
    found = estimate(compose(["+experiment=resnet20", "num_learners=3", "precision=fp32"], EstimateConfig))
    assert found.method == "measured" and found.recommendation is not None and found.measured is not None
    best = found.recommendation.batch_size
    assert device.ran[best]
    assert device.executors == {"fused"}
    assert not device.ran.get(int(1.03 * best) + 1, False)
    truth = max(
        b
        for b in range(1, 4000)
        if scale * (device.model.predicted_bytes(b, 3, 3) - device.model.fixed_bytes) <= device.limit
    )
    assert 0.97 * truth <= best <= truth
    assert found.table[3] == pytest.approx(best, abs=1)  # the model's own answer, in the measure of what was run
    assert found.table[1] > 2.9 * best


@pytest.mark.slow
def test_estimate_with_a_gpu_that_the_data_set_fills_says_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = MadeUpDevice(monkeypatch, 1.0)
    # CIFAR-10 with padding takes 269 MB.
    monkeypatch.setattr("crossbow_py.estimate.estimation.free_bytes", lambda _: 300 * 2**20)
    found = estimate(compose(["+experiment=resnet20", "num_learners=3", "precision=fp32"], EstimateConfig))
    assert found.recommendation is None and device.ran == {} and device.limit == 0
    assert "Nothing fits: 3 learners need" in as_text(found)


@pytest.mark.slow
def test_estimate_with_a_gpu_measures_a_model_that_does_not_fuse_one_learner_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = MadeUpDevice(monkeypatch, 1.0, refused="fused")
    found = estimate(compose(["+experiment=resnet20", "num_learners=3", "precision=fp32"], EstimateConfig))
    assert device.executors == {"fused", "serial"}
    assert found.in_turn
    assert found.table[3] > 0.9 * found.table[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [(["memory=abc"], "memory must be an amount of memory above 0"),
     (["memory=-1"], "memory must be an amount of memory above 0"),
     (["memory=8GiB", "held_back=some"], "held_back must be"),
     (["memory=8GiB", "images_per_s=0"], "images_per_s must be greater than 0"),
     (["memmory=8GiB"], "did you mean 'memory'"),
     (["+experiment=resnet33", "memory=8GiB"], "unknown experiment"),
     (["model=resnet18", "data=digits", "memory=8GiB"], "needs images")],
)  # fmt: skip
def test_estimate_with_a_mistake_is_one_line_and_code_2(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert words in said


def test_estimate_into_a_place_that_cannot_be_written_is_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["memory=1GiB", f"output_dir={tmp_path / 'file'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_estimate_into_a_closed_pipe_ends_quietly() -> None:
    code = "import sys; from crossbow_py.estimate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    shell = f"'{sys.executable}' -c '{code}' +experiment=digits memory=1GiB | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


SETTINGS = RunSettings(num_learners=3, batch_size=2)
COUNT = 4 * 2 * 3  # batches that are there, of 2 samples, for 3 learners


def pair(data: DataSets) -> tuple[Tensor, Tensor]:
    found = as_pair(data.train)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 8, 8), torch.uint8), ((3, 4, 8, 8), torch.uint8), ((7,), torch.float32), ((12,), torch.int64)],
)
def test_made_up_samples_are_stored_as_the_data_set_stores_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    data = _made_up(Sample(shape, dtype), 5, SETTINGS)
    inputs, targets = pair(data)
    assert (inputs.shape, inputs.dtype) == ((COUNT, *shape), dtype)
    assert targets.tolist() == [*range(5), *range(5), *range(5), *range(5), *range(4)]
    assert data.num_classes == 5


def test_made_up_targets_of_a_regression_are_zeros_of_their_shape_and_no_classes() -> None:
    data = _made_up(Sample((7,), torch.float32, (2,), torch.float32), 0, SETTINGS)
    assert torch.equal(pair(data)[1], torch.zeros(COUNT, 2))
    assert data.num_classes is None


def test_help_says_what_memory_and_output_dir_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m crossbow_py.estimate +experiment=resnet50 memory=16GiB" in said
    assert "estimate.json and estimate.png" in said
    assert "held_back=null" in said


def test_estimate_where_the_configured_batch_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=resnet20", "data=cifar10", "memory=1GiB", "batch_size=20000", "num_learners=1"]) == 0
    said = capsys.readouterr().out
    assert "With batch_size=20000 as configured: 0 learners fit" in said
    assert "does not fit." in said
