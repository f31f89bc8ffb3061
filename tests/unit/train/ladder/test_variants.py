"""The variants of kernels that children launch: they are those of runs, and one that is wrong fails by its name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py import data
from crossbow_py.core.triton_launch import Launch, recorded
from crossbow_py.engine.kernels import checks, convolution, update
from crossbow_py.engine.kernels.geometry import (
    Blocking,
    Geometry,
    Tiles,
    blocking,
    every_blocking,
    every_split_blocking,
    split_blocking,
    tiles_of,
)
from crossbow_py.engine.modules.precision import BF16, FP32, Precision
from crossbow_py.engine.update.optimizers import SGD, AdamW, Optimizer
from crossbow_py.models import MODELS
from crossbow_py.train.ladder import variants as ladder_variants
from crossbow_py.train.ladder.child import tried
from crossbow_py.train.ladder.rungs import RUNGS, Task
from crossbow_py.train.ladder.variants import failure_of, variants
from tests.integration import compile_kernels
from tests.unit.engine.kernels.test_sanitizer import copy_of

CPU = torch.device("cpu")
KERNELS = {name for rung in RUNGS for name in rung.proves} & {"update", "loss", "batches", "layers", "convolutions"}
Form = tuple[Any, ...]
# Constants that every layer, or every data set, has of its own; tiles follow from them.
SIZES = {
    "C", "O", "H", "W", "OH", "OW", "KH", "KW", "SY", "SX", "PY", "PX", "DY", "DX", "CHANNELS", "HEIGHT", "WIDTH",
    "TARGET", "BLOCK", "CLASSES", "COLUMNS", "SAMPLES", "TARGETS", "MOMENTUM", "EPS",
}  # fmt: skip


class Launches:
    """In place of launches: keeps them."""

    num_learners = 2

    def __init__(self) -> None:
        self.made: list[Launch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self.made.append(Launch(kernel.__name__, grid, arguments, {"enable_fp_fusion": True, **constants}))


def forms(made: Launch) -> Iterator[Form]:
    """What a launch is compiled for, but for sizes; both parts of a backward convolution on their own."""
    constants = dict(made.constants)
    kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else None for a in made.arguments)
    if made.kernel == "_backward":
        if constants["DATA"]:
            yield ("inputs", *(constants[name] for name in ("BM", "BN", "BK", "PRECISION")))
        if constants["FILTERS"]:
            yield ("filters", *(constants[name] for name in ("FM", "FN", "FK", "SPLIT", "PRECISION")))
    elif made.kernel == "_forward":
        yield ("forward", *(constants[name] for name in ("BM", "BN", "BK", "PRECISION")))
        yield ("forward", *kinds[:4], *(kind is None for kind in kinds[4:10]))
    else:
        left_out = SIZES - ({"COLUMNS"} if "ROWS" in constants else set())
        yield (made.kernel, kinds, *sorted((k, v) for k, v in constants.items() if k not in left_out and k != "KIND"))


@pytest.fixture(scope="module", params=[FP32, BF16], ids=lambda each: each.name)
def launched(request: pytest.FixtureRequest) -> tuple[Precision, set[Form]]:
    """The forms of all launches that children make in a precision."""
    found: set[Form] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_compare", lambda *_: None)
        patch.setattr("crossbow_py.train.ladder.variants._has_tf32", lambda: True)
        for kernels in sorted(KERNELS):
            # Those that would end at the first numbers that nobody has computed run.
            with recorded(runs=kernels in ("update", "batches")) as launches:
                for variant in variants(kernels, CPU, request.param):
                    failure_of(variant)
            found |= {form for made in launches for form in forms(made)}
    return request.param, found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.0), SGD(momentum=0.9), AdamW()], ids=["plain", "SGD", "AdamW"])
def test_whatever_a_round_of_resnet20_launches_was_launched(
    optimizer: Optimizer, launched: tuple[Precision, set[Form]]
) -> None:
    precision, before = launched
    launches = Launches()
    with compile_kernels.launches_go_to(launches):
        compile_kernels.run_round("resnet20", 2, precision, optimizer)
    made = {form for launch in launches.made for form in forms(launch)}
    assert {name for name, *_ in made} >= {"_update", "_cross_entropy", "_gather", "forward", "inputs", "filters"}
    missed = made - before
    assert not missed
    if precision is FP32:
        assert any("tf32" in form for form in made)  # as runs do unless they are told otherwise


@pytest.mark.slow
def test_erasing_and_several_ranks_were_launched(launched: tuple[Precision, set[Form]]) -> None:
    _, before = launched
    gathers = [dict(form[2:]) for form in before if form[0] == "_gather"]
    made = {(each["ERASES"], each["INTERLEAVED"]) for each in gathers}
    assert made == set(itertools.product((False, True), repeat=2))
    updates = [dict(form[2:]) for form in before if form[0] == "_update"]
    assert {(each["ADAMW"], each["STATES"]) for each in updates} == {(False, 0), (False, 1), (True, 2)}
    assert {(each["AVERAGES"], each["MOVES"]) for each in updates} == {(True, True), (True, False), (False, False)}
    assert "_move" in {form[0] for form in before}


@functools.cache
def geometries(name: str) -> list[Geometry]:
    """The sizes of the convolutions of a model of the package, for one learner with two samples."""
    shape, found = (3, 224, 224) if name == "resnet50" else (3, 32, 32), []
    with torch.device("meta"):
        model = MODELS[name]().build(shape, 10)

    def seen(layer: nn.Conv2d, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        out, channels, *kernel = layer.weight.shape
        options = (layer.stride, layer.padding, layer.dilation)
        found.append(Geometry(2, 1, channels, out, *inputs[0].shape[2:], tuple(kernel), *options))  # type: ignore[arg-type]

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(seen)  # type: ignore[arg-type]
    model(torch.zeros(2, *shape, device="meta"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet32", "resnet50", "vgg16"])
def test_tiles_of_models_were_launched(name: str, launched: tuple[Precision, set[Form]]) -> None:
    precision, before = launched
    multiplied = ("tf32", "ieee") if precision is FP32 else (convolution.precision_of(torch.bfloat16),)
    needed: set[Form] = set()
    for num_learners, batch in itertools.product((1, 4, 16), (4, 16, 64)):
        own = {dataclasses.replace(each, batch=batch, groups=num_learners) for each in geometries(name)}
        for tiles, how in itertools.product(map(tiles_of, own), multiplied):
            needed |= {("forward", *shape(tiles.forward), how), ("inputs", *shape(tiles.inputs), how)}
            needed.add(("filters", *shape(tiles.filters), tiles.filters.splits > 1, how))
    assert len(needed) >= 10 * len(multiplied)
    assert needed <= before


def shape(tile: Blocking) -> tuple[int, int, int]:
    return tile.rows, tile.columns, tile.depth


def test_every_tile_is_one_that_some_size_takes_and_no_size_takes_another() -> None:
    sizes = (1, 16, 17, 33, 65, 300, 512, 5000, 200_000)
    asked = list(itertools.product(sizes, sizes, sizes, (1, 64)))
    assert {blocking(*each) for each in asked} == set(every_blocking())
    split = {(shape(tile), tile.splits > 1) for tile in (split_blocking(*each) for each in asked)}
    assert split == {(shape(tile), tile.splits > 1) for tile in every_split_blocking()}


def test_every_tile_is_launched_on_gpus_at_sizes_of_resnets_with_the_one_that_was_miscompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder_variants, "interprets", lambda: False)
    found = [(case.geometry, case.tiles) for _, case in ladder_variants._cases() if case.tiles is not None]
    sizes = {(g.in_channels, g.height, tiles.filters.splits > 1) for g, tiles in found}
    assert sizes == {(16, 32, True), (32, 16, True), (64, 8, True), (16, 28, False), (32, 14, False), (128, 7, False)}
    on_an_h100 = tiles_of(Geometry(16, 8, 16, 16, 32, 32, (3, 3), padding=(1, 1))).filters
    assert (shape(on_an_h100), on_an_h100.splits > 1) == ((16, 64, 64), True)
    assert [g.height for g, tiles in found if shape(tiles.filters) == (16, 64, 64)] == [28, 32]
    assert all(g.out_channels == g.in_channels and g.in_channels % tiles.forward.columns == 0 for g, tiles in found)


def rung(kernels: str) -> Task:
    return Task("train", "cpu", "serial", {"fp32": 1e-4}, dropout=False, kernels=[kernels])


@pytest.mark.slow
def test_rung_of_a_tile_that_gives_other_numbers_fails_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = convolution.forward

    def harmed(*own: Any) -> Any:
        out, moments = forward(*own)
        tiles: Tiles = own[-1]
        return out + 1e-3 * out.abs().max() * (shape(tiles.forward) == (16, 16, 64)), moments

    monkeypatch.setattr(convolution, "forward", harmed)
    assert tried(rung("convolutions")) == (
        "convolution 16x16x64, filters' gradient 16x16x32 split in fp32 without TF32: "
        "the kernels of convolution give other numbers than torch's operators"
    )
    monkeypatch.setattr("crossbow_py.train.ladder.variants._has_tf32", lambda: True)
    found = {each.name: each for each in variants("convolutions", CPU, FP32)}
    name = "convolution 16x16x64, filters' gradient 16x16x32 split in fp32 with TF32"
    assert failure_of(found[name]) == ""  # within the 10 bits of TF32, which alone are allowed for
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_rung_of_an_optimizer_that_gives_other_numbers_fails_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = update.adamw_settings
    monkeypatch.setattr(update, "adamw_settings", lambda beta1, *own: settings(0.5, *own))
    reason = tried(rung("update"))
    assert reason.startswith("update by AdamW on one device in fp32: the update kernel's results differ")


def test_rung_of_erasing_that_is_wrong_fails_by_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    harmed = copy_of("image_kernels", tmp_path, "(x >= right)", "(x > right)")
    monkeypatch.setattr(data.resident, "image_kernels", harmed)
    reason = tried(rung("batches"))
    assert reason.startswith("batches of 3x32x32, with and without erasing, in fp32: the image kernel's batches differ")
