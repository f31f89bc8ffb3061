"""Number formats: what auto takes, what stays in float32, and devices that are not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules import precision
from crossbow_py.engine.modules.precision import (
    BF16,
    FP32,
    FP64,
    cast_module,
    check_precision,
    choose_device,
    choose_precision,
    full_precision_parameters,
)
from crossbow_py.train.run_settings import RunSettings
from tests.support import CPU, norm_model


@pytest.mark.parametrize(("fast", "expected"), [(True, BF16), (False, FP32)])
def test_auto_takes_bf16_only_where_it_is_fast(monkeypatch, fast, expected):
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: fast)
    assert choose_precision("auto", CPU) is expected
    assert choose_precision("bf16", CPU) is BF16
    assert choose_precision("fp32", CPU) is FP32


@pytest.mark.parametrize("instructions", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_bf16_on_cpu_is_fast_with_either_kind_of_instructions(monkeypatch, instructions):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == instructions)
    assert precision.has_fast_bf16(CPU)
    monkeypatch.setattr(torch.cpu, instructions, lambda: False)
    assert not precision.has_fast_bf16(CPU)


@pytest.mark.parametrize("name", ["float16", "fp16", "16"])
def test_float16_is_refused_with_what_to_set_instead(name):
    with pytest.raises(UserError, match=f"got '{name}': gradients below .* set precision=bf16"):
        check_precision(name)
    with pytest.raises(UserError, match="set precision=bf16"):
        RunSettings(precision=name)


def test_masters_are_never_below_float32_and_only_bf16_has_a_shadow():
    assert [kind.master for kind in (FP32, BF16, FP64)] == [torch.float32, torch.float32, torch.float64]
    assert [kind.has_shadow for kind in (FP32, BF16, FP64)] == [False, True, False]


@pytest.mark.parametrize(("version", "cause"), [(None, "is built without CUDA"), ("13.0", "nvidia-smi says .* one")])
def test_device_cuda_without_cuda_is_refused_with_the_remedy(version, cause, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=rf"^device=cuda, but no CUDA .* \(.*{cause}\); set device=cpu"):
        choose_device("cuda")
    assert choose_device("auto") == choose_device("cpu") == CPU


def test_device_by_its_number_is_refused_with_another_remedy_for_several_ranks(monkeypatch):
    with pytest.raises(UserError, match="and choose the GPU by the environment: CUDA_VISIBLE_DEVICES=1.$"):
        choose_device("cuda:1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="and each rank takes the GPU of its own number on the host, of those"):
        choose_device("cuda:1")


def test_full_precision_parameters_are_batch_norms_and_no_others():
    assert full_precision_parameters(norm_model()) == {"1.weight", "1.bias"}
    assert full_precision_parameters(nn.BatchNorm1d(2)) == {"weight", "bias"}
    assert full_precision_parameters(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))) == set()


def test_cast_module_to_bf16_leaves_batch_norm_and_its_statistics_in_float32():
    model = cast_module(norm_model(), BF16)
    kinds = {name: value.dtype for name, value in model.state_dict().items()}
    assert kinds == {
        "0.weight": torch.bfloat16,
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "1.running_mean": torch.float32,
        "1.running_var": torch.float32,
        "1.num_batches_tracked": torch.int64,
        "5.weight": torch.bfloat16,
        "5.bias": torch.bfloat16,
    }


def test_cast_module_keeps_tied_parameters_tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    cast_module(model, BF16)
    assert model[1].weight is model[0].weight
