"""The examples for clusters: the Slurm script, run with stand-ins for Slurm, and the TrainJob, read by its schema."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SCRIPT = DOCKER / "slurm.sbatch"
JOB = 123_456

# Options of sbatch that are used here, and what their values look like (man sbatch).
SBATCH_OPTIONS = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"B:USR1@\d+",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"(%[xj]|[\w.-])+",
}

SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$STUBS/srun.args"
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >"$STUBS/shutdown_s"
for ((waited = 0; waited < 300; waited++)); do
    [[ ! -e $STUBS/stop ]] || exit 1
    [[ ! -e $STUBS/done ]] || exit 0
    sleep 0.1
done
exit 99
"""
SCONTROL = """#!/bin/bash
echo "$*" >>"$STUBS/scontrol.calls"
if [[ "$1 $2" == "show hostnames" ]]; then printf '%s\\n' node-a node-b; fi
"""
SCANCEL = """#!/bin/bash
echo "$*" >>"$STUBS/scancel.calls"
touch "$STUBS/stop"
"""


class SlurmJob:
    """The batch script as Slurm runs it on the first node; torchrun ends with 1 after SIGTERM, else with 0."""

    def __init__(self, stubs: Path, *arguments: str) -> None:
        self._stubs = stubs
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        values = {
            **os.environ,
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "STUBS": str(stubs),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_GPUS_ON_NODE": "8",
        }
        self._process = subprocess.Popen(["bash", str(SCRIPT), *arguments], env=values, cwd=stubs)
        self._wait_for("shutdown_s")

    def _wait_for(self, name: str) -> None:
        for _ in range(1000):
            if (self._stubs / name).exists():
                return
            time.sleep(0.02)
        self.end()
        raise AssertionError(f"the script did not come to {name}")

    def send(self, number: signal.Signals) -> None:
        """Signal the batch shell alone, as Slurm does."""
        self._process.send_signal(number)

    def end(self, by: str = "done") -> int:
        """Let srun end, if it has not; returns the script's exit code."""
        (self._stubs / by).touch()
        return self._process.wait(timeout=30)

    def said(self, name: str) -> list[str]:
        path = self._stubs / name
        return path.read_text().splitlines() if path.exists() else []


def sbatch_options() -> dict[str, str | None]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE)
    return {name: value or None for name, value in found}


def test_slurm_script_has_only_options_of_sbatch_and_none_after_the_first_command() -> None:
    text = SCRIPT.read_text()
    options = sbatch_options()
    assert text.count("\n#SBATCH") == len(options)
    assert "#SBATCH" not in text[text.index("set -euo pipefail") :]
    assert options.keys() == SBATCH_OPTIONS.keys()
    for name, pattern in SBATCH_OPTIONS.items():
        value = options[name]
        assert value is None if pattern is None else re.fullmatch(pattern, value or ""), name
    assert options["ntasks-per-node"] == "1"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [SCRIPT, DOCKER / "verify.sh", *sorted((DOCKER / "verify").glob("*.sh"))]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_script_starts_one_torchrun_a_node_that_meet_at_the_first(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, "+experiment=digits", "batch_size=8")
    assert job.end() == 0
    assert job.said("scontrol.calls") == ["show hostnames node-[a-b]"]
    assert job.said("srun.args") == [
        "--wait=150", "torchrun", "--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=node-a:{20_000 + JOB % 10_000}", f"--rdzv-id={JOB}", "-m", "crossbow_py.train",
        "+experiment=digits", "batch_size=8", f"output_dir=runs/slurm-{JOB}", "resume=auto",
    ]  # fmt: skip


def test_slurm_script_searches_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSBOW_COMMAND", "search")
    job = SlurmJob(tmp_path, "+experiment=search_lenet")
    assert job.end() == 0
    words = job.said("srun.args")
    assert words[words.index("-m") + 1 :][:2] == ["crossbow_py.search", "+experiment=search_lenet"]


def test_slurm_script_starts_torchrun_with_options_that_it_has(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path)
    job.end()
    words = job.said("srun.args")
    assert "+experiment=resnet32" in words
    get_args_parser().parse_args(words[words.index("torchrun") + 1 :])  # which ends the process for an unknown one


def test_slurm_script_near_the_time_limit_stops_the_trainer_and_queues_the_job_again(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path)
    job.send(signal.SIGUSR1)
    assert job.end(by="stop") == 1
    assert job.said("scancel.calls") == [f"--signal=TERM {JOB}"]
    assert job.said("scontrol.calls")[1:] == [f"requeue {JOB}"]


@pytest.mark.parametrize(
    ("number", "by", "code"),
    [(signal.SIGTERM, "stop", 1), (signal.SIGUSR1, "done", 0)],
    ids=["cancelled or failed", "finished near the limit"],
)
def test_slurm_script_that_has_ended_otherwise_is_not_queued_again(
    number: signal.Signals, by: str, code: int, tmp_path: Path
) -> None:
    job = SlurmJob(tmp_path)
    (tmp_path / "scancel").write_text("#!/bin/bash\n")  # which comes too late
    job.send(number)
    assert job.end(by=by) == code
    assert len(job.said("scontrol.calls")) == 1


def test_slurm_script_tells_of_the_limit_early_enough_for_a_checkpoint(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path)
    job.end()
    (shutdown_s,) = map(int, job.said("shutdown_s"))
    (srun_waits_s,) = [int(word.removeprefix("--wait=")) for word in job.said("srun.args") if "--wait=" in word]
    assert shutdown_s < srun_waits_s < int(str(sbatch_options()["signal"]).split("@")[1])


def trainjob() -> Any:
    return yaml.safe_load((DOCKER / "trainjob.yaml").read_text())


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """What a schema's model dropped or changed: models ignore fields that they do not know."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [found for key, value in given.items() for found in lost(value, kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [found for number, (a, b) in pairs for found in lost(a, b, f"{path}[{number}]")]
    return [] if given == kept else [path]


@pytest.mark.slow
def test_trainjob_is_one_by_its_schema_to_the_last_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    given = trainjob()
    assert (given["apiVersion"], given["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert lost(given, models.TrainerV1alpha1TrainJob.from_dict(given).to_dict()) == []


def test_trainjob_starts_the_images_trainer_by_torchrun_and_resumes() -> None:
    trainer = trainjob()["spec"]["trainer"]
    assert trainer["command"][:4] == ["tini", "-s", "--", "torchrun"]
    assert trainer["command"][-2:] == ["-m", "crossbow_py.train"]
    assert "resume=auto" in trainer["args"]
    assert str(trainer["numProcPerNode"]) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_trainjob_waits_longer_for_a_checkpoint_than_torchrun_does_and_keeps_the_runs() -> None:
    (patch,) = trainjob()["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    ranks_s = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", (DOCKER / "Dockerfile").read_text())
    assert ranks_s and pod["terminationGracePeriodSeconds"] >= int(ranks_s[1]) + 30
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"runs": "/workspace/runs", "data": "/data", "shared-memory": "/dev/shm"}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
