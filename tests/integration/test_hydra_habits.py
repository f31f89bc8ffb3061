"""Flags and keys of Hydra on our command lines: what they show, the folders they name, and its launchers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import crossbow_py.estimate.__main__
import crossbow_py.predict.__main__
import crossbow_py.search.__main__
from crossbow_py.cli.configuration import compose
from crossbow_py.cli.hydra_app import end_with_sweep
from crossbow_py.search.config import SearchConfig
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.__main__ import main
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests.said import error_line

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
DIGITS = ["+experiment=digits", "model.hidden=[32]", "device=cpu", "precision=fp32"]
# Hydra's own launcher, which starts jobs in this process, chosen as a plugin is.
HERE = "_target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher\n"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*DIGITS, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and list(Path().iterdir()) == []
    return captured.out


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.slow
def test_cfg_job_is_the_whole_configuration_that_a_run_would_record(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--cfg", "job", "seed=3")
    assert yaml.safe_load(text) == config_to_mapping(compose([*DIGITS, "seed=3"], TrainConfig))
    Path("mine.yaml").write_text(text)
    assert main(["config=mine.yaml", "--cfg=job"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_cfg_of_a_package_is_what_is_beneath_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "-c", "job", "-p", "schedule", "schedule=step")
    assert text.startswith("# @package schedule\nname: step\n")
    assert yaml.safe_load(text) == {"name": "step", "warmup_epochs": 0.0, "every_epochs": 20.0, "gamma": 0.5}
    assert shown(capsys, "--cfg", "job", "--package", "model.hidden") == "# @package model.hidden\n- 32\n"
    assert shown(capsys, "--cfg", "job", "-p", "resume") == "null\n"
    assert shown(capsys, "--cfg", "job", "-p", "_global_") == shown(capsys, "--cfg", "job")


@pytest.mark.slow
def test_cfg_shows_interpolations_unless_they_are_to_be_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["seed=3", "order_seed=${seed}", "model.hidden=[8,${batch_size}]", "--cfg", "job"]
    for package, written, value in (("order_seed", "${seed}", "3"), ("batch_size", "16", "16")):
        assert shown(capsys, *asked, "-p", package) == f"{written}\n"
        assert shown(capsys, *asked, "-p", package, "--resolve") == f"{value}\n"
    assert yaml.safe_load(shown(capsys, *asked, "-p", "model"))["hidden"] == [8, "${batch_size}"]
    assert yaml.safe_load(shown(capsys, *asked, "-p", "model", "--resolve"))["hidden"] == [8, 16]


@pytest.mark.slow
def test_cfg_hydra_says_where_a_run_is_and_who_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    hydra = yaml.safe_load(shown(capsys, "--cfg", "hydra"))["hydra"]
    assert hydra["launcher"]["_target_"].endswith(".BasicLauncher")
    assert hydra["run"] == {"dir": "runs/digits/${now:%Y-%m-%d_%H-%M-%S}"}
    assert (hydra["output_subdir"], hydra["job"]["chdir"]) == (None, False)
    assert hydra["overrides"]["task"] == DIGITS
    named = shown(capsys, "--cfg", "hydra", "-p", "hydra.run.dir", "hydra.run.dir=runs/${seed}", "seed=3")
    assert named == "runs/${seed}\n"
    named = shown(capsys, "--cfg", "hydra", "-p", "hydra.run.dir", "hydra.run.dir=runs/${seed}", "seed=3", "--resolve")
    assert named == "runs/3\n"
    both = yaml.safe_load(shown(capsys, "--cfg", "all", "--resolve"))
    job = yaml.safe_load(shown(capsys, "--cfg", "job"))
    assert {key: value for key, value in both.items() if key != "hydra"} == job


@pytest.mark.slow
def test_text_that_looks_like_an_interpolation_stays_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    resolved = ["--cfg", "hydra", "-p", "hydra.run.dir", "--resolve"]
    write("recorded.yaml", shown(capsys, "--cfg", "job").replace("init_from: null", "init_from: ${oc.env:SECRET}"))
    assert main(["config=recorded.yaml", "hydra.run.dir=${init_from}_${batch_size}", *resolved]) == 0
    assert capsys.readouterr().out == "${oc.env:SECRET}_16\n"
    write("conf/mine.yaml", "defaults: [train, _self_]\nexperiment: \\${oc.env:SECRET}\ndata: {name: digits}\n")
    words = ["-cn", "mine", "device=cpu", "batch_size=8"]
    assert main([*words, *resolved]) == 0
    assert capsys.readouterr().out.startswith("runs/${oc.env:SECRET}/")
    assert main([*words, "-m", "+debug=fast", "seed=1,2", "hydra.sweep.dir=swept/${experiment}_${batch_size}"]) == 0
    assert names("swept") == ["${oc.env:SECRET}_8"]


def test_cfg_of_a_search_and_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=search_digits", "+space.batch_size=[8,16]"]
    assert crossbow_py.search.__main__.main([*words, "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == config_to_mapping(compose(words, SearchConfig))
    assert crossbow_py.predict.__main__.main(["--cfg", "job", "-p", "models", "somewhere", "data=digits"]) == 0
    assert capsys.readouterr().out == "# @package models\n- somewhere\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (["--info"], ["Installed Hydra Plugins", "Config search path", "Defaults List", "max_epochs: 20.0"]),
        (["--info", "all"], ["Hydra 1.", "Installed Hydra Plugins"]),
        (["--info", "config"], ["experiment: digits", "order_seed: 7"]),
        (["-i", "defaults"], ["| optimizer/sgd ", "| experiment/digits "]),
        (["--info", "defaults-tree"], ["experiment: digits"]),
        (["--info=plugins"], ["BasicLauncher", "BasicSweeper"]),
        (["--info", "searchpath"], ["| Provider ", "| main "]),
    ],
)
def test_info_is_what_hydra_knows(what: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    text = shown(capsys, *what, "order_seed=7")
    for words in said:
        assert words in text
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before


def test_config_dir_adds_options_as_conf_does(capsys: pytest.CaptureFixture[str]) -> None:
    write("more/optimizer/gentle.yaml", "# A small rate.\nname: sgd\nlearning_rate: 0.02\n")
    words = ["--cfg", "job", "-p", "optimizer.learning_rate", "optimizer=gentle"]
    assert main([*words, "-cd", "more"]) == 0
    assert capsys.readouterr().out == "0.02\n"
    assert main(["--list", "--config-dir=more"]) == 0
    assert "gentle A small rate." in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert main(words) == 2
    assert "unknown optimizer 'gentle'" in error_line(capsys)
    write("conf/optimizer/gentle.yaml", "name: sgd\n")
    assert main([*words, "-cd", "more"]) == 2
    assert "gentle is both conf/optimizer/gentle.yaml and more/optimizer/gentle.yaml; rename it" in error_line(capsys)
    assert main([*words, "-cd", "nowhere"]) == 2
    assert "--config-dir must be a folder, got 'nowhere'" in error_line(capsys)


def test_search_finds_the_options_of_an_added_folder_in_its_trials(capsys: pytest.CaptureFixture[str]) -> None:
    write("more/optimizer/gentle.yaml", "name: sgd\nlearning_rate: 0.02\n")
    space = ["space={optimizer:[sgd,gentle]}"]
    assert crossbow_py.search.__main__.main([*space, "-cd", "more", "--cfg", "job", "-p", "space"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"optimizer": ["sgd", "gentle"]}
    assert crossbow_py.search.__main__.main([*space, "--cfg", "job"]) == 2


MINE = "defaults:\n  - train\n  - _self_\n  - override /model: lenet\n  - override /data: mnist\nmax_epochs: 3\n"


@pytest.mark.parametrize("name", ["mine", "mine.yaml"])
def test_config_name_is_the_file_to_begin_with(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("conf/mine.yaml", MINE)
    assert main(["-cn", name, "seed=2", "--cfg", "job"]) == 0
    expected = compose(["model=lenet", "data=mnist", "max_epochs=3", "seed=2"], TrainConfig)
    assert yaml.safe_load(capsys.readouterr().out) == config_to_mapping(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-cn", "nowhere"], "--config-name must be a file in a folder of options, got 'nowhere'; known: choosing, "),
        (["-cn", "digits"], "takes a file, and 'digits' is a recipe; write +experiment=digits."),
        (["-cn", "../conf/mine"], "--config-name must be a file in a folder of options"),
        (["-cn", "mine", "-cd", "twice"], "twice/train.yaml apart, which have one name; rename one."),
        (["-cn", "search"], "--config-name search is the file of another command; write python -m crossbow_py.search."),
        (["-cn", "mine", "config=run"], "config=run begins with a run, and -cn with a file"),
        (["-cn", "launching"], "launching.yaml sets hydra, which counts on the command line alone"),
        (["-cn", "choosing"], "chooses hydra/job_logging=disabled, which counts on the command line alone"),
        (["+experiment=choosing"], "experiment choosing chooses hydra/launcher=joblib, which counts on the command"),
        (["+experiment=launching"], "experiment launching sets hydra, which counts on the command line alone"),
        (["--cfg", "job", "-p", "modle"], "--package 'modle' is no key of this configuration; did you mean 'model'?"),
        (["--cfg", "job", "nun_learners=2"], "did you mean 'num_learners'?"),
        (["--cfg", "job", "seed=1,2"], "lists several values; add -m"),
        (["--cfg", "hydra", "hydra/launcher=jobblib"], "unknown hydra/launcher 'jobblib'; did you mean 'joblib'?"),
        (["-m", "seed=1,2", "hydra/launcher=rq"], "Others are plugins, such as hydra-joblib-launcher"),
        (["-m", "experiment=digits,lenet"], "with a leading plus: write +experiment=digits,lenet."),
        (["-m", "+model=mlp,lenet"], "without a plus: write model=mlp,lenet."),
        (["-m", "seed=1,2", "hydra/launcher=here", "hydra.launcher.x=1"], "--cfg hydra -p hydra.launcher with"),
        (["-m", "seed=1,2", "hydra/launcher=here", "+hydra.launcher.nodes=2"], "hydra.launcher.nodes must be 1, got 2"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=same"], "must name each run, got 'runs/"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=${nothing}"], "keys of a run, hydra.job.num"),
        (["-m", "model=glob(x*)"], "matches no option of model"),
        (["model=glob(res*)"], "lists several values; add -m"),
    ],
)  # fmt: skip
def test_mistake_is_one_line_with_the_remedy(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("conf/mine.yaml", MINE)
    write("twice/train.yaml", MINE)
    write("conf/launching.yaml", f"{MINE}hydra:\n  launcher:\n    n_jobs: 2\n")
    write("conf/choosing.yaml", MINE.replace("max_epochs", "  - override /hydra/job_logging: disabled\nmax_epochs"))
    choice = "defaults:\n  - override /hydra/launcher: joblib\n"
    write("conf/experiment/choosing.yaml", f"# @package _global_\n{choice}max_epochs: 1\n")
    write("conf/experiment/launching.yaml", "# @package _global_\nhydra:\n  verbose: true\n")
    write("conf/hydra/launcher/here.yaml", HERE)
    assert main(arguments) == 2
    assert said in error_line(capsys)
    assert names(".") == ["conf", "twice"]


def test_launcher_of_hydra_and_torchrun_are_one_too_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", "hydra/launcher=joblib", "seed=1,2"]) == 2
    assert "starts processes, and so does torchrun" in error_line(capsys)


def test_folder_of_a_run_may_be_named_as_in_hydra() -> None:
    assert main([*DIGITS, "+debug=fast", "hydra.run.dir='runs/${experiment}, ${seed}'", "seed=3"]) == 0
    assert read_summary(Path("runs/digits, 3"))["seed"] == 3


@pytest.mark.slow
def test_folders_of_a_sweep_may_be_named_as_in_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    within = ["hydra.sweep.dir=swept/${now:%S%f}", "hydra.sweep.subdir=${hydra.job.num}_${schedule.name}"]
    assert main(["-m", *DIGITS, "+debug=fast", "schedule=constant,cosine", *within]) == 0
    (folder,) = Path("swept").iterdir()
    assert names(str(folder)) == ["0_constant", "1_cosine"]
    assert "run 2 of 2: 1_cosine (schedule=cosine)\n" in capsys.readouterr().out
    assert main(["-m", *DIGITS, "+debug=fast", "seed=1,2", "hydra.sweep.dir=only"]) == 0
    assert names("only") == ["seed=1", "seed=2"]
    words = ["device=cpu", "+debug=fast", "seed=3"]
    assert main(["-m", *words, "hydra.sweep.dir=one", "hydra.sweep.subdir=${hydra.job.override_dirname}"]) == 0
    assert names("one") == ["+debug=fast,device=cpu,seed=3"]


def swept(launcher: str, *words: str) -> int:
    """A sweep of which the second run is refused when it starts."""
    arguments = [*DIGITS, "+debug=fast", "executor=serial", "batch_size=16,5000,8", *words]
    return main(["-m", f"hydra/launcher={launcher}", *arguments])


def without_places(folder: str, measured: bool = True) -> dict[str, Any]:
    """The files and records of a sweep's runs, without where and when; and what threads change, only if `measured`."""
    found = {}
    for run in sorted(Path(folder).iterdir()):
        plain = yaml.safe_load((run / "config.yaml").read_text())
        summary = read_summary(run)
        keys = ["status", "samples_seen", "num_learners", *(["test_accuracy", "model_sha256"] if measured else [])]
        kept = {key: summary[key] for key in keys}
        found[run.name] = (names(str(run)), {**plain, "output_dir": Path(plain["output_dir"]).name}, kept)
    return found


@pytest.mark.slow
def test_launcher_has_the_folders_files_codes_and_lines_of_a_plain_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    write("conf/hydra/launcher/here.yaml", HERE)
    assert swept("basic", "output_dir=plain") == 2
    plain = capsys.readouterr()
    assert swept("here", "output_dir=launched") == 2
    launched = capsys.readouterr()
    assert names("launched") == names("plain") == ["batch_size=16", "batch_size=8"]
    assert without_places("launched") == without_places("plain")
    assert launched.err == plain.err and "batch_size" in plain.err
    first, rest = launched.out.split("\n", 1)
    assert first == "hydra/launcher=here starts 3 runs"
    for number, name in enumerate(["batch_size=16", "batch_size=5000", "batch_size=8"], start=1):
        assert f"run {number} of 3: {name}\n" in rest
    assert rest.endswith("compare them: python -m crossbow_py.report launched\n")


@pytest.mark.slow
def test_launched_runs_take_the_added_folder_and_file_and_words_with_odd_characters() -> None:
    write("conf/hydra/launcher/here.yaml", HERE)
    write("more/mine.yaml", "defaults:\n  - train\n  - _self_\nmax_rounds: 2\n")
    odd = 'a b,"c" it\'s {x}'
    words = ["-cd", "more", "-cn", "mine", "device=cpu", "model.hidden=[8]", "hydra/launcher=here", "seed=1,2"]
    words += ["averaging=synchronous_sgd", "executor=serial", r"""output_dir="a b,\"c\" it's {x}" """.strip()]
    assert main(["-m", *words]) == 0
    folder = Path(odd)
    assert names(odd) == ["seed=1", "seed=2"]
    assert read_summary(folder / "seed=2")["samples_seen"] > 0
    assert yaml.safe_load((folder / "seed=2" / "config.yaml").read_text())["max_rounds"] == 2


@pytest.mark.slow
def test_launcher_starts_estimates_and_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write("conf/hydra/launcher/here.yaml", HERE)
    arguments = ["-m", "hydra/launcher=here", "memory=1GiB", "num_learners=1,2", "device=cpu"]
    assert crossbow_py.estimate.__main__.main(arguments) == 0
    assert "run 2 of 2" in capsys.readouterr().out
    assert names(".") == ["conf", "runs"] and names("runs/custom") == []


@pytest.mark.slow
def test_launcher_starts_searches() -> None:
    pytest.importorskip("optuna")
    write("conf/hydra/launcher/here.yaml", HERE)
    launcher = ["-m", "hydra/launcher=here", "output_dir=searched"]
    words = ["+experiment=search_digits", "+debug=search_fast", "device=cpu", "seed=1,2"]
    assert crossbow_py.search.__main__.main([*launcher, *words]) == 0
    assert names("searched") == ["seed=1", "seed=2"]


def test_launcher_that_fails_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    write("conf/hydra/launcher/broken.yaml", f"{HERE}nothing_like_this: 1\n")
    assert main(["-m", "hydra/launcher=broken", "seed=1,2", "output_dir=swept"]) == 1
    assert "error: hydra/launcher=broken failed (" in error_line(capsys)
    assert not Path("swept").exists()


@pytest.mark.slow
def test_launcher_that_runs_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", "hydra/launcher=joblib", "seed=1,2", "output_dir=swept"]
    assert main([*words, "hydra.launcher.pre_dispatch=0"]) == 1
    assert "error: hydra/launcher=joblib failed (RuntimeError: it has ended 0 of 2 runs)" in error_line(capsys)


def _runs_in_a_process_of_a_sweep(pids: Any, of_the_sweep: bool) -> None:
    """A sweep's process, which starts another as joblib does, or which has been started by another."""

    def job(sweep: int) -> None:
        end_with_sweep(sweep)
        pids.send(os.getpid())
        time.sleep(60)

    multiprocessing.get_context("fork").Process(target=job, args=(os.getpid() if of_the_sweep else 1,)).start()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("of_the_sweep", [True, False])
def test_job_ends_with_the_process_of_the_sweep_that_has_started_it_and_with_no_other(of_the_sweep: bool) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    sweep = context.Process(target=_runs_in_a_process_of_a_sweep, args=(there, of_the_sweep))
    sweep.start()
    job = here.recv()
    assert sweep.pid is not None
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.join()
    there.close()
    try:
        # The pipe ends when nobody else has it open any more.
        assert here.poll(10 if of_the_sweep else 0.3) is of_the_sweep
    finally:
        if not of_the_sweep:
            os.kill(job, signal.SIGKILL)


@pytest.fixture
def loky_ends() -> Iterator[None]:
    """joblib keeps its processes for the next call; their folder and variables are those of the first."""
    joblib = pytest.importorskip("joblib")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    before = dict(os.environ)
    yield
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
@pytest.mark.usefixtures("loky_ends")
def test_joblib_runs_a_sweep_in_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("joblib", "hydra.launcher.n_jobs=2", "output_dir=launched") == 2
    assert names("launched") == ["batch_size=16", "batch_size=8"]
    for size in (16, 8):
        run = Path(f"launched/batch_size={size}")
        assert (read_summary(run)["status"], read_summary(run)["samples_seen"]) == ("finished", 2 * 2 * size)
        assert yaml.safe_load((run / "config.yaml").read_text())["output_dir"] == str(run)
    said = capsys.readouterr().out
    assert "hydra/launcher=joblib starts 3 runs\n" in said and "compare them: " in said


@pytest.mark.slow
def test_submitit_runs_a_sweep_as_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert swept("submitit_local", "output_dir=launched") == 2
    said = capsys.readouterr().out
    assert swept("basic", "output_dir=plain") == 2
    written = next(Path("launched/.submitit").glob("*/*_log.out")).read_text()
    assert "of 3: batch_size=" in written
    for path in Path("launched").glob(".submitit"):
        path.rename("submitit")
    assert without_places("launched", measured=False) == without_places("plain", measured=False)
    assert "compare them: " in said
