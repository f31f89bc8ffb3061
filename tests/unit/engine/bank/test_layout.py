"""Where parameters live in the bank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.bank.layout import Rows, parameter_layout
from tests.support import CPU, norm_model


def test_layout_orders_decayed_before_norm_and_bias_and_leaves_out_what_is_frozen():
    layout = parameter_layout(norm_model(), channels_last=True)
    assert [(block.name, block.kind) for block in layout.blocks] == [
        ("0.weight", "decayed"),
        ("5.weight", "decayed"),
        ("1.weight", "undecayed"),
        ("1.bias", "undecayed"),
    ]


def test_rows_blocks_start_on_128_bytes_and_do_not_overlap():
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 3, torch.float32, CPU)
    assert all(view.data_ptr() % 128 == 0 for view in rows.flat(0))
    for row in range(3):
        for index, view in enumerate(rows.flat(row)):
            view.fill_(10 * row + index)
    for row in range(3):
        assert [set(view.tolist()) for view in rows.flat(row)] == [{10.0 * row + index} for index in range(4)]


def test_rows_stacked_prefix_is_one_channels_last_grouped_weight_without_a_copy():
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 4, torch.float32, CPU)
    grouped = rows.stacked(3)["0.weight"].flatten(0, 1)
    assert grouped.shape == (24, 3, 3, 3)
    assert grouped.data_ptr() == rows.storage.data_ptr()
    assert grouped.is_contiguous(memory_format=torch.channels_last)


def test_layout_of_tied_parameters_stores_them_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert parameter_layout(model, channels_last=True).names == ("a.weight", "a.bias", "b.bias")


def test_rows_in_order_of_learners_keep_a_learner_in_one_piece_and_line_up_across_formats():
    layout = parameter_layout(norm_model(), channels_last=True)
    single, half = (Rows(layout, 3, dtype, CPU, "rows") for dtype in (torch.float32, torch.bfloat16))
    assert single.trained(1)[0].data_ptr() == single.flat(1)[0].data_ptr()
    assert single.flat(2)[0].data_ptr() - single.flat(1)[0].data_ptr() == 4 * single.storage.numel() // 3
    assert [len(vector) for vector in single.trained(0)] == [len(vector) for vector in half.trained(0)]
    assert all(view.data_ptr() % 128 == 0 for rows in (single, half) for row in range(3) for view in rows.flat(row))


@pytest.mark.parametrize(("order", "vectors", "decayed"), [("rows", 2, 1), ("blocks", 4, 2)])
def test_trained_vectors_cover_the_blocks_of_their_row_and_no_other(order, vectors, decayed):
    rows = Rows(parameter_layout(norm_model(), channels_last=True), 2, torch.float32, CPU, order)
    torch._foreach_add_(rows.trained(1), 1.0)
    assert (len(rows.trained(1)), rows.num_decayed) == (vectors, decayed)
    assert [view.unique().tolist() for view in rows.flat(1)] == [[1.0]] * 4
    assert not any(view.any() for view in rows.flat(0))
    torch._foreach_add_(rows.trained(1)[: rows.num_decayed], 1.0)
    assert [view.unique().tolist() for view in rows.flat(1)] == [[2.0]] * 2 + [[1.0]] * 2
