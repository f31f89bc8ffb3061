"""The commands as users type them, on a simulated CUDA device: what they give is what a CPU gives.

    python -m tests.simulated_cuda pytest -m gpu tests/simulated_cuda
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.caches import trust_cuda, use_cache
from tests.trainers import weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("SIMULATED_CUDA_LIBRARY" not in os.environ, reason="run by python -m tests.simulated_cuda"),
]

DIGITS = ["+experiment=digits", "model.hidden=[16]", "precision=fp32", "max_rounds=40", "schedule=constant"]
IN_FLOAT64 = """
import runpy
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.train import run_settings
run_settings.choose_precision = lambda name, device: FP64
runpy.run_module("crossbow_py.train", run_name="__main__")
"""
RULES = [
    "crossbow", "elastic", "independent", "local_sgd", "diloco", "snoo", "slowmo", "papa", "synchronous_sgd",
    "grouped_sma",
]  # fmt: skip


@pytest.fixture(autouse=True)
def proven(tmp_path, monkeypatch):
    """Everything has passed on this device, as far as commands know; kernels are for TRITON_INTERPRET=1.

    A command in which accesses raced ends with exit code 86.
    """
    monkeypatch.setenv("SIMULATED_CUDA_STRICT", "1")
    use_cache(tmp_path / "cache", monkeypatch)
    trust_cuda(monkeypatch)
    if os.environ.get("TRITON_INTERPRET") != "1":
        monkeypatch.setenv("CROSSBOW_KERNELS", "none")


def command(module, *options):
    return [sys.executable, "-m", f"crossbow_py.{module}", *options]


def run(module, *options, code=0):
    """The output of a command that ends with this exit code."""
    done = subprocess.run(command(module, *options), capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def distance(folder, other):
    """How far the models of two runs are apart, relative to their length."""
    ours, theirs = (
        torch.cat(
            [
                values.double().flatten()
                for file in sorted(each.glob("model*.safetensors"))
                for _, values in sorted(load_file(file).items())
            ]
        )
        for each in (folder, other)
    )
    return (ours - theirs).norm().item() / theirs.norm().item()


def kill_after_checkpoint(process, folder):
    """Kill a run with -9 as soon as it has a checkpoint; returns the name of its last one."""
    deadline = time.monotonic() + 200
    while not (found := sorted((folder / "checkpoints").glob("samples-*"))):
        assert process.poll() is None and time.monotonic() < deadline, "it ended before its first checkpoint"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return found[-1].name


def trained(folder, device, *options):
    chosen = {word.partition("=")[0] for word in options}
    digits = [word for word in DIGITS if word.partition("=")[0] not in chosen]
    run("train", *digits, f"device={device}", f"output_dir={folder}", *options)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "fused", "streams"])
def test_run_ends_with_the_weights_of_serial_on_a_cpu(executor, tmp_path):
    options = ["num_learners=3", "optimizer.momentum=0.9"]
    ours = trained(tmp_path / "cuda", "cuda", f"executor={executor}", *options)
    assert distance(ours, trained(tmp_path / "cpu", "cpu", "executor=serial", *options)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_muon_ends_with_the_weights_of_serial_on_a_cpu(executor, tmp_path):
    options = ["num_learners=3", "optimizer=muon", "model.hidden=[16,16]"]
    ours = trained(tmp_path / "cuda", "cuda", f"executor={executor}", *options)
    assert distance(ours, trained(tmp_path / "cpu", "cpu", "executor=serial", *options)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "executor"), [
    pytest.param(rule, executor, marks=[] if (n + m) % 2 else pytest.mark.long)  # each rule, and each executor
    for n, rule in enumerate(RULES) for m, executor in enumerate(("fused", "streams"))
])  # fmt: skip
def test_every_averaging_rule_ends_as_on_a_cpu(rule, executor, tmp_path):
    options = [f"averaging={rule}", "num_learners=4"]
    ours = trained(tmp_path / "cuda", "cuda", f"executor={executor}", *options)
    assert distance(ours, trained(tmp_path / "cpu", "cpu", "executor=serial", *options)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_learners_that_come_end_as_on_a_cpu(executor, tmp_path):
    options = ["averaging=snoo", "averaging.averaging_period=5", "num_learners=seesaw", "max_learners=4"]
    options += ["schedule=cosine", "schedule.epochs=0.7"]  # 40 rounds are more
    ours = trained(tmp_path / "cuda", "cuda", f"executor={executor}", *options)
    assert distance(ours, trained(tmp_path / "cpu", "cpu", "executor=serial", *options)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fused", pytest.param("streams", marks=pytest.mark.slow)])
def test_run_killed_and_resumed_ends_with_the_same_bits(executor, tmp_path):
    options = [*DIGITS, "max_rounds=150", "device=cuda", f"executor={executor}", "checkpoint_every_s=0.05"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run("train", *options, f"output_dir={whole}")
    process = subprocess.Popen(
        command("train", *options, f"output_dir={broken}"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kill_after_checkpoint(process, broken)
    assert not (broken / "model.safetensors").exists(), "it was killed before its end"
    run("train", *options, f"output_dir={broken}", "resume=auto")
    assert weights(broken) == weights(whole)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", ["fused", "streams"])
def test_resnet32_killed_and_resumed_is_serial_on_a_cpu_in_float64(executor, tmp_path):
    """On CIFAR-10 if it is there, and in CUDA graphs; at a rate at which rounds multiply roundings little."""
    options = ["+experiment=resnet32", "max_rounds=20", "batch_size=4", "max_evaluation_batches=1"]
    options += ["checkpoint_every_s=0.2", "optimizer.learning_rate=0.01"]
    if "CROSSBOW_DATA_DIR" not in os.environ:
        options += ["data=synthetic", "data.num_train=200", "data.num_test=100"]

    def started(folder, *others):
        words = [sys.executable, "-c", IN_FLOAT64, *options, f"output_dir={folder}", *others]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    ours, reference = tmp_path / "cuda", tmp_path / "cpu"
    process = started(ours, "device=cuda", f"executor={executor}")
    killed = kill_after_checkpoint(process, ours)
    resumed = started(ours, "device=cuda", f"executor={executor}", "resume=auto")
    said = resumed.communicate()[0]
    assert resumed.returncode == 0, said
    assert "starting afresh" not in said and "CUDA graphs are not used" not in said, said
    expected = started(reference, "device=cpu", "executor=serial")
    said = expected.communicate()[0]
    assert expected.returncode == 0, said
    apart = distance(ours, reference)
    print(f"{executor}: killed after {killed}, relative distance to serial {apart:.1e}")
    assert apart < 1e-8  # 1e-16 in one round, and twice that in the next


@pytest.mark.slow
def test_number_of_learners_grows_and_the_run_goes_on(tmp_path):
    said = run(
        "train", *DIGITS, "max_rounds=400", "device=cuda", "executor=fused", "num_learners=auto", "max_learners=3",
        f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert "learners" in said and "finished" in said


@pytest.mark.slow
def test_auto_measures_what_has_passed_and_takes_one_of_it(tmp_path):
    said = run("train", *DIGITS, "device=cuda", f"output_dir={tmp_path / 'run'}")
    assert "was the fastest here" in said
    assert all(name in said for name in ("serial", "fused", "streams"))


@pytest.mark.slow
def test_trace_has_rows_for_every_stream(tmp_path):
    run("train", *DIGITS, "device=cuda", "executor=streams", "trace=true", f"output_dir={tmp_path / 'run'}")
    assert "averaging" in (tmp_path / "run" / "trace.json").read_text()


def test_learner_that_diverges_is_told_and_reseeded(tmp_path):
    options = ["optimizer.learning_rate=1e30", "on_nonfinite=reseed", "device=cuda", "executor=fused"]
    said = run("train", *DIGITS, *options, f"output_dir={tmp_path / 'run'}", code=1)
    assert "finite" in said and "Traceback" not in said


@pytest.mark.slow
def test_full_gpu_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMULATED_CUDA_GIB", "0.0003")
    said = run("train", *DIGITS, "device=cuda", "executor=serial", f"output_dir={tmp_path / 'run'}", code=1)
    assert "Traceback" not in said and "memory" in said


@pytest.mark.slow
def test_search_in_packs_and_prediction_by_its_best_models(tmp_path):
    folder = tmp_path / "search"
    options = ["+experiment=search_digits", "device=cuda", "executor=fused", "num_trials=4", "max_epochs=2"]
    said = run("search", *options, f"output_dir={folder}")
    assert "finished" in said
    said = run("predict", f"models=[{folder}]", "data=digits", "device=cuda", "executor=fused")
    assert "accuracy" in said


@pytest.mark.slow
def test_ranks_of_a_search_have_a_gpu_each_and_share_the_trials(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMULATED_CUDA_DEVICES", "2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["+experiment=search_digits", "model.hidden=[16]", "precision=fp32", "executor=serial", "packing=none"]
    short = ["method=none", "num_trials=4", "max_epochs=0.1", "min_epochs=0.1", "device=cuda", "output_dir=search"]
    command = [*launcher, "-m", "crossbow_py.search", *options, *short]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "search" / "console.log").read_text()
    assert " · cuda:0 · fp32 · " in log and " · cuda:1 · fp32 · " in log
    trials = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 4
    assert len({trial["worker"] for trial in trials}) == 2
