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
