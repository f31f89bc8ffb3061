"""The image: what Dockerfile, compose file and .dockerignore promise; where it can be built, the image itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined, comments dropped."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for line in joined.splitlines() if line for word, rest in [line.split(maxsplit=1)]]


def last_stage() -> list[tuple[str, str]]:
    """What makes the image, after the last FROM."""
    found = instructions()
    return found[max(number for number, (word, _) in enumerate(found) if word == "FROM") + 1 :]


def only(word: str) -> str:
    """The argument of the one instruction of that name in the last stage."""
    (argument,) = [rest for name, rest in last_stage() if name == word]
    return argument


def environment() -> dict[str, str]:
    pairs = " ".join(rest for word, rest in last_stage() if word == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", pairs))


def compose() -> Any:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def kept_for_the_build(path: str) -> bool:
    """Docker's rule for .dockerignore: the last pattern that matches the path or a folder above it decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            parts = path.split("/")
            above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            tails = [name.rsplit("/", 1)[-1] for name in above] if pattern.startswith("**/") else []
            names = tails or [name for name in above if name.count("/") == pattern.count("/")]
            if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
                kept = line.startswith("!")
    return kept


def test_every_stage_of_the_dockerfile_starts_from_one_base_pinned_by_its_tag() -> None:
    (base,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:3\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)
    assert {rest.split()[0] for word, rest in instructions() if word == "FROM"} == {"${BASE}"}


def test_entrypoint_is_a_list_so_that_sigterm_reaches_the_trainer() -> None:
    words = yaml.safe_load(only("ENTRYPOINT"))
    assert words == ["tini", "-s", "--", "python", "-m", "crossbow_py.train"]
    assert " tini " in " ".join(rest for word, rest in last_stage() if word == "RUN")


def test_user_is_a_fixed_number_other_than_root_and_owns_every_volume() -> None:
    assert only("USER") == "1000:1000"
    owned = next(rest for word, rest in last_stage() if word == "RUN" and "useradd --uid 1000 " in rest)
    folders = owned[owned.index("install --directory --owner=crossbow") :].split()
    volumes = yaml.safe_load(only("VOLUME"))
    assert set(volumes) <= set(folders)
    assert environment()["CROSSBOW_DATA_DIR"] in volumes
    assert f"{only('WORKDIR')}/runs" in volumes


def test_environment_asks_for_compute_and_nvml_only_and_keeps_caches_in_their_volume() -> None:
    values = environment()
    assert (values["NVIDIA_DRIVER_CAPABILITIES"], values["NVIDIA_VISIBLE_DEVICES"]) == ("compute,utility", "all")
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path("/cache") in [Path(values[name]), *Path(values[name]).parents]


def test_pip_keeps_no_cache_in_a_layer_and_installs_what_is_pinned() -> None:
    for command in (rest for word, rest in instructions() if word == "RUN" and "python -m pip" in rest):
        assert "--mount=type=cache" in command or "--no-cache-dir" in command
        pinned = "--constraint /opt/crossbow_py/constraints.txt" in command
        assert pinned or "--no-deps" in command


def test_image_has_what_reports_and_searches_need(tmp_path: Path) -> None:
    (command,) = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("[")]
    python, flag, code = json.loads(command)
    assert (python, flag) == ("python", "-c")
    places = {"/pyproject.toml": ROOT / "pyproject.toml", "/requirements.txt": tmp_path / "requirements.txt"}
    for written, here in places.items():
        assert f"'{written}'" in code
        code = code.replace(f"'{written}'", repr(str(here)))
    subprocess.run([sys.executable, "-c", code], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["jpeg"], *extras["plots"], *extras["search"]}
    assert set((tmp_path / "requirements.txt").read_text().splitlines()) == wanted


def test_compose_runs_torchrun_on_all_gpus_and_the_plain_image_on_any_machine() -> None:
    services = compose()["services"]
    gpu, cpu = services["train"], services["train-cpu"]
    assert (gpu["profiles"], cpu["profiles"]) == (["gpu"], ["cpu"])
    assert gpu["entrypoint"][0] == "torchrun"
    assert {"--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=${GPUS:-gpu}"} <= set(gpu["entrypoint"])
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert not {"entrypoint", "deploy"} & cpu.keys()
    for service in (gpu, cpu):
        assert "resume=auto" in service["command"]
        assert service["restart"] == "on-failure:3"
        assert service["shm_size"] == "8gb"
        assert (service["cap_drop"], "cap_add" in service) == (["ALL"], False)
    assert gpu["ulimits"] == services["search"]["ulimits"] == {"memlock": -1}  # what NCCL needs beside /dev/shm


def test_compose_searches_on_all_gpus_once_its_data_base_answers() -> None:
    services = compose()["services"]
    search, database = services["search"], services["database"]
    assert (search["profiles"], database["profiles"]) == (["search"], ["search"])
    train = services["train"]
    assert search["entrypoint"] == [*train["entrypoint"][:-1], "crossbow_py.search"]
    assert search["deploy"] == train["deploy"]
    assert search["depends_on"] == {"database": {"condition": "service_healthy"}}
    test = database["healthcheck"]["test"]
    user, name = database["environment"]["POSTGRES_USER"], database["environment"]["POSTGRES_DB"]
    assert test[:2] == ["CMD", "pg_isready"] and {f"--username={user}", f"--dbname={name}"} <= set(test)
    (storage,) = [word for word in search["command"] if word.startswith("storage=")]
    assert storage == f"storage=postgresql://{user}@database/{name}"  # without the password, which is recorded
    assert search["environment"]["PGPASSWORD"] == database["environment"]["POSTGRES_PASSWORD"]
    assert database["volumes"] == ["database:/var/lib/postgresql/data"]
    assert re.fullmatch(r"postgres:\d+", database["image"])


def test_compose_waits_longer_for_a_checkpoint_than_torchrun_waits_for_its_ranks() -> None:
    ranks_s = int(environment()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    for name in ("train", "train-cpu", "search"):
        minutes = re.fullmatch(r"(\d+)m", compose()["services"][name]["stop_grace_period"])
        assert minutes and int(minutes[1]) * 60 >= ranks_s + 30


def test_compose_shows_tensorboard_on_loopback_only_and_lets_it_read_only() -> None:
    services = compose()["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["tensorboard"]
    assert services["tensorboard"]["ports"] == ["127.0.0.1:6006:6006"]
    assert services["tensorboard"]["volumes"] == ["runs:/workspace/runs:ro"]
    assert services["tensorboard"]["read_only"] is True


def test_compose_asks_tensorboard_for_its_page_to_see_whether_it_is_healthy() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    service = compose()["services"]["tensorboard"]
    kind, python, flag, code = service["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python", "-c")
    assert "--port=6006" in service["entrypoint"] and "//127.0.0.1:6006/" in code
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        server.timeout = 30
        command = [sys.executable, "-c", code.replace(":6006/", f":{server.server_port}/")]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        healthy = subprocess.run(command, check=False).returncode
        thread.join()
    gone = subprocess.run(command, capture_output=True, check=False).returncode
    assert (healthy, gone) == (0, 1)


def test_compose_names_every_volume_and_mounts_it_where_the_image_has_one() -> None:
    found = compose()
    mounted = dict(volume.split(":")[:2] for service in found["services"].values() for volume in service["volumes"])
    assert mounted.pop("database") == "/var/lib/postgresql/data"  # another image's
    assert mounted.keys() == found["volumes"].keys() - {"database"} == {"runs", "data", "cache"}
    assert set(mounted.values()) == set(yaml.safe_load(only("VOLUME")))


def test_dockerignore_lets_in_what_the_image_is_made_of_and_nothing_else() -> None:
    allowed = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "conf", "crossbow_py"}
    assert {path.name for path in ROOT.iterdir() if kept_for_the_build(path.name)} == allowed
    lines = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    copied = [path for paths in lines for path in paths]
    assert copied
    sources = [str(path.relative_to(ROOT)) for path in (ROOT / "crossbow_py").rglob("*.py")]
    for path in [*copied, *sources, "conf/train.yaml"]:
        assert (ROOT / path).exists() and kept_for_the_build(path), path
    for path in (
        ".git/config", "runs/digits/model.safetensors", "data/mnist/x.gz", "tests/conftest.py", ".env",
        "crossbow_py/__pycache__/train.cpython-311.pyc", "crossbow_py/engine/tasks.pyc",
    ):  # fmt: skip
        assert not kept_for_the_build(path), path


def test_size_of_torch_counts_what_the_extras_it_asks_for_bring(tmp_path: Path) -> None:
    requirements = {
        "torch": ["toolkit[blas,rand]==13.0; sys_platform == 'linux'", "sympy", "absent", "optree; extra == 'optree'"],
        "toolkit": ['n_blas; os_name and extra == "blas"', 'n_fft; extra == "fft"', "n-rand; extra == 'rand'"],
        "n-blas": ["n-jit", "toolkit[rand]"],
        "sympy": [], "optree": [], "n-fft": [], "n-rand": [], "n-jit": [],
    }  # fmt: skip
    for name, needs in requirements.items():
        folder = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
        (folder / "METADATA").write_text("\n".join(lines))
    code = "import measure; print(*sorted(measure.needed_by('torch')))"
    values = {"PYTHONPATH": f"{tmp_path}:{DOCKER / 'verify'}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=values, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["n-blas", "n-jit", "n-rand", "sympy", "toolkit", "torch"]


def test_verify_without_an_engine_says_so_and_ends_with_code_2(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "sed", "mktemp", "id"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tmp_path / "bash"), str(DOCKER / "verify.sh")]
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=bare, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("docker/verify.sh: neither a Docker engine answers")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def can_build() -> bool:
    """Whether there is an engine, or what verify.sh does without."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        return True
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("buildah", "debootstrap"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_verify_builds_the_image_trains_stops_and_resumes_in_it(tmp_path: Path) -> None:
    if not can_build():
        pytest.skip("needs a Docker engine, or root with buildah and debootstrap")
    values = {**os.environ, "CROSSBOW_VERIFY_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([str(DOCKER / "verify.sh")], capture_output=True, text=True, env=values, check=False)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # some 3 GB, and pytest keeps the folders of three runs
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == "docker/verify.sh: passed"
