"""Every kernel under the sanitizer, and what it finds in kernels that were harmed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.unit.engine.kernels.sanitizer import Violation, sanitized
from tests.unit.engine.kernels.workloads import WORKLOADS

# The interpreter computes in numpy, which warns of inf - inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

PLACES = dict.fromkeys(WORKLOADS, "crossbow_py.engine.kernels") | {"image_kernels": "crossbow_py.data.resident"}
CASES = [(name, dtype) for name in WORKLOADS for dtype in (torch.float32, torch.bfloat16)]
CASES += [pytest.param(name, torch.float64, marks=pytest.mark.slow) for name in WORKLOADS if name != "convolution"]


def copy_of(name, folder, old="", new=""):
    """A module of kernels, in which a text is replaced at its only place, loaded from a file of its own."""
    place = f"{PLACES.get(name, 'crossbow_py.engine.kernels')}.{name}"
    source = inspect.getsource(importlib.import_module(place))
    assert source.count(old) == 1 or not old, f"{source.count(old)} places of {old!r} in {name}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new) if old else source)
    spec = importlib.util.spec_from_file_location(f"copies.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_kernels_neither_stray_nor_race_nor_read_unwritten_memory_in_any_order(name, dtype, tmp_path):
    kernels, found = copy_of(name, tmp_path), []
    for seed in (None, 1):
        torch.manual_seed(0)
        with sanitized(seed) as watch:
            found.append(WORKLOADS[name](kernels, dtype))
        assert watch.launches > 3 and watch.programs > 2 * watch.launches
    assert all(torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)) for one, other in zip(*found, strict=True))


# (module, text, its replacement); a change of `statistics` is seen in the module named last.
STRAY = [
    ("statistics", "(tiles < num_tiles)[:, None]", "(tiles <= num_tiles)[:, None]", "batch_norm"),
    ("batch_norm", "present = first + rows < M", "present = first + rows <= M"),
    ("batch_norm", "tl.load(bias + columns, mask=column_mask, other=0.0)", "tl.load(bias + columns)"),
    ("convolution", "columns, column_mask, row_mask = group * O + o, o < O, m < rows",
     "columns, column_mask, row_mask = group * O + o, o < O, m <= rows"),
    ("convolution", "(y >= 0) & (y < H) & (x >= 0) & (x < W) & (m < rows)[:, None] & (k < KH * KW * C)",
     "(y < H) & (x >= 0) & (x < W) & (m < rows)[:, None] & (k < KH * KW * C)"),
    ("convolution", "mask=(k < KH * KW * O)[:, None] & (c < C)[None, :]", "mask=(k < KH * KW * O)[:, None]"),
    ("convolution", "(x < OW) & (m < rows)[:, None]", "(x <= OW) & (m < rows)[:, None]"),
    ("cross_entropy", "inside = (sample < batch)[:, None] & (column < CLASSES)", "inside = (sample < batch)[:, None]"),
    ("cross_entropy", "mask=place < batch", "mask=place <= batch"),
    ("image_kernels", "WIDTH - 1 - x, x)", "WIDTH - x, x)"),
    ("image_kernels", "mine = entry < learners * TARGET", "mine = entry <= learners * TARGET"),
    ("update", "inside = at < count", "inside = at <= count"),
    ("update", "inside = at < numel", "inside = at < numel + 4096"),
    ("update", "mask=tile < num_tiles", "mask=tile <= num_tiles"),
]  # fmt: skip
RACES = [
    ("statistics", "tl.debug_barrier()", "pass", "batch_norm"),
    ("statistics", 'sem="acq_rel"', 'sem="relaxed"', "batch_norm"),
    ("statistics", 'scope="gpu"', 'scope="cta"', "batch_norm"),
    ("statistics", "partials + tile_index * 2 * N + columns", "partials + tile_index * N + columns", "batch_norm"),
    ("statistics", "tl.debug_barrier()", "pass", "convolution"),
    ("batch_norm", "columns, columns < N", "columns, columns <= N"),
    ("batch_norm", "tl.store(y + at, value, mask=mask)", "tl.store(y + at, value)"),
    ("batch_norm", "block * COLUMNS + tl.arange", "block * (COLUMNS // 2) + tl.arange"),
    ("batch_norm", "if hand_in(plain, weighted, columns, column_mask, tile, num_tiles, N, partials, counters + block):",
     "if hand_in(plain, weighted, columns, column_mask, tile, num_tiles, N, partials, counters + block) or True:"),
    ("convolution", "tl.debug_barrier()", "pass"),
    ("convolution", 'sem="acq_rel"', 'sem="release"'),
    ("convolution", "tl.store(partials + split * size + to", "tl.store(partials + to"),
    ("convolution", "m = row_tile * BM + tl.arange(0, BM)", "m = row_tile * (BM // 2) + tl.arange(0, BM)"),
    ("cross_entropy", "tl.store(losses + learner, ", "tl.store(losses, "),
    ("cross_entropy", "gradient += learner * gradient_learner", "pass"),
    ("image_kernels", "inside = at < size", "inside = at < size + 1"),
    ("image_kernels", "at = block * BLOCK + tl.arange(0, BLOCK)", "at = block * (BLOCK // 2) + tl.arange(0, BLOCK)"),
    ("image_kernels", "slot = row + entry // TARGET * rows", "slot = row // 2 + entry // TARGET * rows"),
    ("update", "tl.store(out + tile * num_learners + learner", "tl.store(out + learner"),
    ("update", "out = values + learner * VALUES", "out = values + learner * (VALUES // 4)"),
    ("update", "at = (place // 4) * TILE +", "at = (place // 4) * (TILE // 2) +"),
    ("update", "at = tl.program_id(0) * TILE", "at = tl.program_id(0) * (TILE // 2)"),
    ("update", "tl.store(w + row, weights, mask=mine)",
     "tl.store(w + row, weights, mask=mine); tl.store(w + row + 1, weights, mask=mine & (at + 1 < numel))"),
]  # fmt: skip
UNWRITTEN = [
    ("statistics", "== num_tiles - 1", ">= num_tiles - 2", "batch_norm"),
    ("statistics", "tl.store(row + N, second, mask=column_mask)", "pass", "batch_norm"),
    ("statistics", "tl.store(mean + columns, pooled, mask=column_mask)", "pass", "convolution"),
    ("batch_norm", "tl.store(y + at, value, mask=mask)", "tl.store(y + at, value, mask=mask & (at > 0))"),
    ("batch_norm", "tl.store(d_bias + columns, tl.sum(plain_lanes, axis=0), mask=column_mask)", "pass"),
    ("convolution", "mask=row_mask[:, None] & column_mask", "mask=(row_mask & (m > 0))[:, None] & column_mask"),
    ("convolution", "counter = counters + group * tiles + tile", "counter = counters + tile"),
    ("convolution", "tl.store(partials + split * size + to, total, mask=mask)", "pass"),
    ("cross_entropy", "targets += learner * target_learner", "targets += learner * target_learner; tl.load(losses)"),
    ("image_kernels", "value = tl.load(values + found", "tl.load(inputs)\n    value = tl.load(values + found"),
    ("update", "tl.store(out + tile * num", "if tile > 0: tl.store(out + tile * num"),
]  # fmt: skip
KINDS = {"stray": STRAY, "race": RACES, "unwritten": UNWRITTEN}
HARMED = [(kind, *each) for kind, cases in KINDS.items() for each in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "old", "new", "seen_in"), [(*each, each[1])[:5] for each in HARMED])
def test_harmed_kernel_is_found(kind, name, old, new, seen_in, tmp_path, monkeypatch):
    harmed = copy_of(name, tmp_path, old, new)
    if seen_in != name:
        monkeypatch.setitem(sys.modules, "crossbow_py.engine.kernels.statistics", harmed)
        harmed = copy_of(seen_in, tmp_path)
    with pytest.raises(Violation, match=rf"^{kind}: ") as found, sanitized():
        for written in WORKLOADS[seen_in](harmed, torch.float32):
            written.sum()
    assert "torch's" in str(found.value) or ".py:" in str(found.value)


@triton.jit
def _neighbour(x, y, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count)
    tl.store(y + at + SHIFT, value, mask=at + SHIFT < count)


def test_message_names_line_program_and_value():
    x, y = torch.zeros(40), torch.zeros(40)
    with sanitized():
        _neighbour[(3,)](x, y, 40, SHIFT=0, BLOCK=16)
        with pytest.raises(Violation, match=r"stray: test_sanitizer.py:\d+ \(_neighbour\), program 2: value 40 of x"):
            _neighbour[(3,)](x, y, 41, SHIFT=0, BLOCK=16)


def test_value_read_by_one_program_and_written_by_the_next_is_a_race_in_either_order():
    x = torch.zeros(40)
    for seed in range(4):
        with pytest.raises(Violation, match="race"), sanitized(seed):
            _neighbour[(3,)](x, x, 40, SHIFT=1, BLOCK=16)


def test_value_beside_a_view_is_stray_though_it_is_allocated():
    whole = torch.zeros(80)
    with pytest.raises(Violation, match="stray"), sanitized():
        _neighbour[(3,)](whole[:40], whole[40:], 41, SHIFT=0, BLOCK=16)
    with pytest.raises(Violation, match="stray"), sanitized():
        _neighbour[(3,)](whole[::2], torch.zeros(40), 40, SHIFT=0, BLOCK=16)


def test_unwritten_memory_is_found_in_operators_and_forgotten_once_written():
    with sanitized():
        x = torch.empty(40)
        x[:20] = 1
        assert x[:20].sum() == 20
        with pytest.raises(Violation, match="torch's sum reads 80 bytes that nobody wrote"):
            x.sum()
        with pytest.raises(Violation, match="unwritten: .* program 1: reads x where nobody wrote"):
            _neighbour[(3,)](x, torch.zeros(40), 40, SHIFT=0, BLOCK=16)
        x.normal_()
        _neighbour[(3,)](x, torch.zeros(40), 40, SHIFT=0, BLOCK=16)


def test_interpreter_is_left_as_it_was():
    x, y = torch.ones(40), torch.zeros(41)
    with sanitized():
        pass
    _neighbour[(3,)](x, y, 40, SHIFT=0, BLOCK=16)
    assert y.sum() == 40
