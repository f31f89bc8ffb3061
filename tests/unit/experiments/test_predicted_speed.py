"""The prediction for GPUs: work and times worked out by hand, machine code that is read, one learner more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py.core.triton_launch import Launch
from experiments.predicted_speed import report, run
from experiments.predicted_speed.counting import count_fused
from experiments.predicted_speed.launches import Node, OperatorNodes, compiled_form, node_of_launch
from experiments.predicted_speed.model import (
    FAST,
    GROUPS,
    SLOW,
    Assumptions,
    Gpu,
    Predictor,
    kernel_time,
    mixtures,
    programs_at_once,
)
from tests.triton_version import has_interpreter

_PEAKS = {"bf16": 1000.0, "tf32": 500.0, "ieee": 50.0}
GPU = Gpu("small", 100.0, _PEAKS, multiprocessors=10, clock_hz=10.0, cache_bytes=80)
PLAIN = Assumptions(
    node_s=2.0, bandwidth_share=0.5, flops_share=0.5, issue_share=0.5, clock_share=1.0, cache_bytes_per_s=400.0,
    cached_share=0.5, latency_s=0.001, products_at_once=2, others_at_once=4, fills=False, most_launches=False,
    dispatch_s=0.5, operator_s=3.0, replay_s=7.0, event_s=0.25,
)  # fmt: skip
CUBIN = {"registers": 32, "shared_bytes": 0, "warps": 4, "loop": 30, "outside": 100, "asynchronous": True}


def node(**values: Any) -> dict[str, Any]:
    return {**Node("any", 1000, 20).plain(), "count": 1, **values}


@pytest.mark.parametrize(
    ("values", "cubin", "seconds", "limit"),
    # Two tiles of a product fit a multiprocessor at once, and four programs of other operators.
    [
        ({}, None, 20.0, "memory"),  # half of 100 bytes/s
        ({"num_bytes": 40}, None, 0.1, "memory"),  # which fit the cache: at 400 bytes/s
        ({"loaded_bytes": 40_000}, None, 100.0, "cache"),
        ({"tile_flops": 20_000}, None, 40.0, "products"),  # half of 1000 FLOP/s
        ({"tile_flops": 20_000, "programs": 21}, None, 40.0 * 30 / 21, "products"),  # the last is alone in a third turn
        ({"num_bytes": 40, "turns": 10}, CUBIN, (20 * 100 + 10 * 30) * 4 / (10 * 4 * 5), "issue"),
        ({"num_bytes": 0, "programs": 200, "chain": 3, "steps": 4, "turns": 800}, None, 10 * 0.005, "latency"),
        ({"num_bytes": 0, "programs": 200, "chain": 3, "steps": 200, "turns": 800}, None, 0.103, "latency"),
        ({"num_bytes": 0, "programs": 200, "chain": 3}, None, 5 * 0.003, "latency"),
        ({"programs": 1, "num_bytes": 64_000}, None, 1280.0, "memory"),
    ],
)
def test_kernel_takes_the_longest_of_what_was_worked_out_by_hand(values, cubin, seconds, limit) -> None:
    found = kernel_time(node(**values), cubin, "bf16", GPU, PLAIN)
    assert (found.seconds, found.limit) == (pytest.approx(seconds), limit)


def test_latency_of_loads_that_do_not_run_ahead_is_a_turns_own() -> None:
    given = node(num_bytes=0, programs=1, chain=2, steps=6)
    cubin = {**CUBIN, "outside": 0}
    ahead, waits = (kernel_time(given, {**cubin, "asynchronous": way}, "bf16", GPU, PLAIN) for way in (True, False))
    assert (ahead.seconds, waits.seconds) == (pytest.approx(0.005), pytest.approx(0.008))


@pytest.mark.parametrize(
    ("changed", "programs"),
    [
        ({}, 16),  # threads: 2048 / 128
        ({"registers": 72}, 7),  # 65536 / (72 · 128)
        ({"registers": 65}, 7),  # registers come in eights
        ({"shared_bytes": 56 * 1024}, 4),  # 228 / (56 + 1) KiB
        ({"warps": 1, "registers": 8}, 32),
    ],
)
def test_programs_at_once_are_the_fewest_that_a_resource_allows(changed, programs) -> None:
    assert programs_at_once({**CUBIN, **changed}, GPU) == programs


def test_graph_is_a_chain_of_kernels_and_what_nodes_cost() -> None:
    part = {"name": "round", "in_graph": True, "nodes": [node(count=3), node(fewest=2, most=5, num_bytes=50)]}
    sums = Predictor(GPU, PLAIN, "bf16", {}).sums([part])
    assert (sums.launches, sums.num_bytes) == (5, 3050)
    assert sums.nodes_s == 10.0
    assert sums.chain_s == pytest.approx(10 + 3 * 20 + 1)
    assert sums.by_limit["memory"] == pytest.approx(61)
    worst = Predictor(GPU, replace(PLAIN, most_launches=True), "bf16", {}).sums([part])
    assert worst.launches == 8


def test_host_binds_a_round_when_it_enqueues_longer_than_the_device_runs() -> None:
    load = {"name": "load", "in_graph": False, "nodes": [node(num_bytes=0, chain=0, count=4)]}
    counted = {"parts": [load], "calls": {"replays": 1, "records": 2, "waits": 2}}
    predictor = Predictor(GPU, PLAIN, "bf16", {})
    assert predictor.host_s(counted) == 4 * 3 + 7 + 4 * 0.25
    assert predictor.one_stream_s(counted) == 20


def test_streams_of_many_learners_follow_from_two_and_three() -> None:
    learner = [{"name": "learning(0)", "in_graph": True, "nodes": [node(count=2, programs=5)]},
               {"name": "load(0)", "in_graph": False, "nodes": [node(num_bytes=0, chain=0)]}]  # fmt: skip
    few, more = (
        {"parts": [*learner, {"name": "averaging", "in_graph": True, "nodes": [node(num_bytes=100 * k)] * k}],
         "calls": {"replays": 2 * k + 1, "records": 0, "waits": 2 * k}}
        for k in (2, 3)
    )  # fmt: skip
    found = Predictor(GPU, PLAIN, "bf16", {}).streams(few, more, 5)
    # Averaging has 2 nodes with 400 bytes for two learners, and 3 with 900 for three: 1900 for five.
    assert (found["launches"], found["num_bytes"]) == (5 * 3 + 5, 5 * 2000 + 1900)
    assert found["chain"] == pytest.approx(2 * 20 + 3 * 2)
    assert found["dispatch"] == pytest.approx(20 * 0.5)
    assert found["memory"] == pytest.approx(11_900 / 50)
    assert found["work"] == pytest.approx(5 * 40 * 0.5 + (8 + 3 * 10))  # five of ten multiprocessors are busy
    assert found["host"] == pytest.approx(5 * 3 + 11 * 7 + 10 * 0.25)
    alone = {"parts": learner, "calls": {"replays": 2}}
    assert Predictor(GPU, PLAIN, "bf16", {}).streams(alone, alone, 1)["launches"] == 3


def test_mixtures_hold_every_assumption_of_both_sides_once() -> None:
    named = [name for group in GROUPS for name in group]
    assert sorted(named) == sorted(vars(SLOW))
    found = list(mixtures())
    assert len(set(found)) == 2 ** len(GROUPS)
    assert {SLOW, FAST} <= set(found)


def launch(kernel: str, grid: tuple[int, ...], values: dict[str, Any], **constants: Any) -> Launch:
    return Launch(kernel, grid, tuple(values.values()), constants, "a.module", (*values, *constants))


def convolution(**changed: Any) -> Launch:
    """Two learners' 3x3 convolutions of 4 to 8 channels, over 2 images of 4x4, in tiles of 16x16x16."""
    images, out = torch.zeros(2, 8, 4, 4, dtype=torch.bfloat16), torch.zeros(2, 16, 4, 4, dtype=torch.bfloat16)
    values = {"inputs": images, "filters": torch.zeros(16, 4, 3, 3, dtype=torch.bfloat16), "bias": None, "out": out,
              "partials": torch.zeros(2, 2, 16), "rows": 32}  # fmt: skip
    constants = {"groups": 2, "C": 4, "O": 8, "KH": 3, "KW": 3, "BM": 16, "BN": 16, "BK": 16, "LANES": 128}
    return launch("_forward", (2, 2), values, **{**constants, "PRECISION": "widened", **changed})


def test_work_of_a_convolution_kernel_is_what_was_worked_out_by_hand() -> None:
    found = node_of_launch(convolution(), "key")
    assert found.programs == 4
    assert found.num_bytes == 2 * (256 + 576 + 512) + 2 * 4 * 64
    assert found.flops == 2 * 32 * 8 * 36 * 2
    assert (found.steps, found.turns) == (3, 12)  # 36 values of depth
    assert found.tile_flops == 2 * 4 * 16 * 16 * 48
    assert found.loaded_bytes == 4 * 32 * 36 * 2 + 2 * 512 + 2 * 4 * 64
    assert (found.grouped, found.cubin) == (2, "key")


def test_work_of_an_update_names_every_value_that_it_moves() -> None:
    rows, row = torch.zeros(20), torch.zeros(10)
    values = {"w": rows, "g": rows, "s0": rows, "s1": rows, "shadow": rows.bfloat16(), "z": row, "z_prev": row,
              "total": row, "tiles": torch.zeros(1, 4, dtype=torch.int64), "num_learners": 2}  # fmt: skip
    flags = {"STATES": 1, "ADAMW": False, "SHADOW": True, "AVERAGES": True, "MOVES": True, "KEEPS_TOTAL": False}
    found = node_of_launch(launch("_update", (1,), values, **flags), "")
    assert found.num_bytes == 22 * 20 + 16 * 10 + 32


def test_kernels_are_compiled_for_what_triton_tells_apart() -> None:
    values = {"x": torch.zeros(2), "none": None, "one": 1, "even": 32, "odd": 33, "rate": 1.0}
    form = compiled_form(launch("_any", (1,), values, PRECISION="widened", num_warps=4))
    assert form["arguments"] == {"x": "*fp32", "none": None, "one": 1, "even": "i32, 16", "odd": "i32", "rate": "fp32"}
    assert form["constants"] == {"PRECISION": "ieee", "num_warps": 4}


def test_operators_of_a_step_are_nodes_with_the_flops_of_its_products() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(48, 5))
    with OperatorNodes() as operators:
        torch.autograd.grad(module(torch.ones(7, 2, 6, 6)).sum(), list(module.parameters()))
    flops = {each.name: each.flops for each in operators.nodes if each.flops}
    assert flops["convolution"] == flops["convolution_backward"] == 2 * 7 * 16 * 3 * 18
    assert flops["addmm"] == 2 * 7 * 48 * 5
    assert all(each.programs >= 1 and each.fewest <= each.most for each in operators.nodes)


LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;               /* 0x0 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R17], desc[UR22][R10.64], P4 ;    /* 0x0 */
        /*0020*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24 ;         /* 0x0 */
        /*0030*/                   IADD3 R1, R1, 0x1, RZ ;          /* 0x0 */
        /*0040*/              @!P0 BRA 0x20 ;                       /* 0x0 */
        /*0050*/                   FFMA R1, R1, R2, R3 ;            /* 0x0 */
        /*0060*/               @P1 BRA 0x50 ;                       /* 0x0 */
        /*0070*/                   EXIT ;                           /* 0x0 */
        /*0080*/                   NOP;                             /* 0x0 */
"""


def test_instructions_of_main_loops_are_those_around_products() -> None:
    cubins = pytest.importorskip("experiments.predicted_speed.cubins", reason="Triton is not installed")
    assert cubins.instructions(LISTING) == {"loop": 3, "outside": 5, "product": "HGMMA", "asynchronous": True}
    assert cubins.instructions(LISTING.replace("HGMMA", "IMAD"), 2)["outside"] == 4
    unrolled = "\n".join(line for line in LISTING.splitlines() if "BRA 0x20" not in line)
    assert cubins.instructions(unrolled)["loop"] == 0


def side(images_per_s: float, **values: Any) -> dict[str, Any]:
    limits = dict.fromkeys(("memory", "cache", "products", "issue", "latency"), 1e-3)
    common = {"images_per_s": images_per_s, "round_s": 8e-3, "host_s": 1e-4, "nodes_s": 3e-3, "by_limit_s": limits,
              "launches": 100, "chain_launches": 50, "bytes": 2e6, "flops": 3e9}  # fmt: skip
    return {**common, **values}


def result() -> dict[str, Any]:
    cells = [{"model": "lenet", "precision": "bf16", "gpu": "H100", "num_learners": k} for k in (1, 4)]
    sides = {"fused": side(1000, launches_grouped=120), "streams": side(900, binds="chain"), "plain": side(800)}
    faster = {**sides, "fused": side(2500, launches_grouped=120)}
    rows = [{**cell, "assumed": name, **(sides if name == "slow" else faster)}
            for cell in cells for name in ("slow", "fast")]  # fmt: skip
    kernel = {"kernel": "_forward bf16", "variants": 2, "products": ["HGMMA"], "asynchronous": 1, "registers": [32, 64],
              "spilled_bytes": [0, 0], "shared_bytes": [1024, 2048], "at_once": [4, 8]}  # fmt: skip
    ratios = [{**cell, "fused ÷ its first": [1.0, 1.0], "fused ÷ plain": [0.5, 2.0]} for cell in cells]
    return {"batch_size": 16, "triton": "3.9.0", "gpus": [{"name": "H100"}], "rows": rows, "ratios": ratios,
            "kernels": [kernel]}  # fmt: skip


def test_tables_show_bands_and_say_that_nothing_was_measured() -> None:
    text = report.result_text(result())
    assert "No figure was measured." in text
    (line,) = (line for line in text.splitlines() if line.startswith("| lenet bf16 H100 |   1 |") and "2.5" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][2:] == ["1–2.5", "0.9", "0.8", "1.00", "0.50–2.00"]
    assert "| 32–64 |" in " ".join(text.split())


def test_measurement_on_a_gpu_is_laid_beside_its_prediction(monkeypatch) -> None:
    row = {"model": "lenet", "side": "fused", "num_learners": 4, "precision": "bf16", "images_per_s": 1000.0 * 10**0.5}
    rows = [{**row, "batch_size": 16}, {**row, "batch_size": 32}, {**row, "batch_size": 16, "side": "serial"}]
    found = {"suite_cuda": {"machine": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "rows": rows},
             "suite_cpu": {"machine": {"gpus": []}, "rows": rows}}  # fmt: skip
    cells = {"fused:4:16:sma": 3162.3, "fused:4:16:none": 9.0, "serial:4:16:sma": 9.0, "tuned:1:32:none": 9.0}
    cells |= {"fused:4:16:sma:fp32": 9.0, "fused:4:64:sma": 9.0}
    rows = {cell: {"precision": (*cell.split(":")[4:], "bf16")[0], "images_per_s": [own - 1, own, own + 1]}
            for cell, own in cells.items()}  # fmt: skip
    rows["fused:8:16:sma"] = {"precision": "bf16", "images_per_s": []}
    of_gpu = {"rows": {"machine": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "model": "lenet", "rows": rows}}
    monkeypatch.setattr(report, "read_results", lambda question: of_gpu if question == "gpu" else found)
    lines = report.measured_text({"hopper": result()}).splitlines()[2:]
    expected = ["lenet bf16 H100, fused", "4", "3.16", "1–2.5", "2.00"]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [expected] * 2
    found.clear()
    of_gpu.clear()
    assert report.measured_text({"hopper": result()}) == "Nothing of it has been measured yet."


def test_products_of_float32_are_compiled_as_asked_for() -> None:
    key = '{"constants": {"PRECISION": "tf32"}, "kernel": "_forward"}'
    counted = {"cubins": {key: {"kernel": "_forward", "constants": {"PRECISION": "tf32", "groups": 2}}},
               "parts": [{"name": "round", "nodes": [{"cubin": key}, {"cubin": ""}]}]}  # fmt: skip
    found = run._with_products(counted, "ieee")
    (changed,) = found["cubins"]
    assert found["cubins"][changed]["constants"] == {"PRECISION": "ieee", "groups": 2}
    assert [each["cubin"] for each in found["parts"][0]["nodes"]] == [changed, ""]
    assert run._with_products(counted, "bf16") is counted


@pytest.mark.slow
@pytest.mark.skipif(not has_interpreter(), reason="Triton's interpreter is needed")
def test_fused_round_of_one_and_of_two_learners_has_the_same_kernels() -> None:
    counts = [count_fused("lenet", 4, learners, "fp32") for learners in (1, 2)]
    names = [{each["name"]: each["count"] for part in counted.parts for each in part["nodes"] if each["cubin"]}
             for counted in counts]  # fmt: skip
    assert names[0] == names[1]
    assert names[0]["_update"] == 1
    flops = [sum(each["flops"] * each["count"] for part in counted.parts for each in part["nodes"])
             for counted in counts]  # fmt: skip
    assert flops[1] == 2 * flops[0]
