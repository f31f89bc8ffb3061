"""Where parameters live in the bank."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.engine.layout import Rows, parameter_layout
from tests.support import CPU, norm_model


def test_layout_orders_decayed_before_norm_and_bias_before_frozen():
    layout = parameter_layout(norm_model(), channels_last=True)
    assert [(block.name, block.kind) for block in layout.blocks] == [
        ("0.weight", "decayed"),
        ("5.weight", "decayed"),
        ("1.weight", "undecayed"),
        ("1.bias", "undecayed"),
        ("5.bias", "frozen"),
    ]


def test_rows_blocks_start_on_128_bytes_and_do_not_overlap():
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 3, torch.float32, CPU)
    assert all(view.data_ptr() % 128 == 0 for view in rows.flat(0))
    for row in range(3):
        for index, view in enumerate(rows.flat(row)):
            view.fill_(10 * row + index)
    for row in range(3):
        assert [set(view.tolist()) for view in rows.flat(row)] == [{10.0 * row + index} for index in range(5)]


def test_rows_stacked_prefix_is_one_channels_last_grouped_weight_without_a_copy():
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 4, torch.float32, CPU)
    grouped = rows.stacked(3)["0.weight"].flatten(0, 1)
    assert grouped.shape == (24, 3, 3, 3)
    assert grouped.data_ptr() == rows.storage.data_ptr()
    assert grouped.is_contiguous(memory_format=torch.channels_last)


def test_rows_shaped_and_stacked_show_the_same_values():
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 3, torch.float32, CPU)
    rows.storage.copy_(torch.arange(float(len(rows.storage))))
    for name, stacked in rows.stacked(3).items():
        for row in range(3):
            assert torch.equal(stacked[row], rows.shaped(row)[name])


def test_layout_of_tied_parameters_stores_them_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert parameter_layout(model, channels_last=True).names == ("a.weight", "a.bias", "b.bias")


def test_rows_in_order_of_learners_keep_a_learner_in_one_piece_and_line_up_across_formats():
    layout = parameter_layout(norm_model(), channels_last=True)
    single, half = (Rows(layout, 3, dtype, CPU, "rows") for dtype in (torch.float32, torch.bfloat16))
    (first,), *_ = single.tiles(1)
    assert first.data_ptr() == single.flat(1)[0].data_ptr()
    assert single.flat(2)[0].data_ptr() - single.flat(1)[0].data_ptr() == 4 * single.storage.numel() // 3
    assert [len(tile[0]) for tile in single.tiles(0)] == [len(tile[0]) for tile in half.tiles(0)]
    assert all(view.data_ptr() % 128 == 0 for rows in (single, half) for row in range(3) for view in rows.flat(row))


def test_tiles_cover_the_trained_blocks_once_and_say_which_are_decayed():
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500))  # 150,000 decayed values: three tiles
    layout = parameter_layout(model, channels_last=True)
    in_rows, in_blocks = (Rows(layout, 2, torch.float32, CPU, order) for order in ("rows", "blocks"))
    for rows in (in_rows, in_blocks):
        for tile in rows.tiles(1):
            torch._foreach_add_(tile, 1.0)
        assert all(view.unique().tolist() == [1.0] for view in rows.flat(1))
        assert not any(view.any() for view in rows.flat(0))
    assert [in_rows.num_decayed(index) for index in range(len(in_rows.tiles()))] == [1, 1, 1, 0]
    assert [in_blocks.num_decayed(index) for index in range(len(in_blocks.tiles()))] == [1]


def test_tiles_leave_frozen_blocks_out():
    model = norm_model()
    rows = Rows(parameter_layout(model, channels_last=True), 1, torch.float32, CPU, "rows")
    for tile in rows.tiles():
        torch._foreach_add_(tile, 1.0)
    assert not rows.shaped()["5.bias"].any()
