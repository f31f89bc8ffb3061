"""What makes a release: workflows whose parts are there, and versions that they, the metadata and the image share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from crossbow_py.core.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = ("checks", "release")
# GitHub's own actions, Docker's, and those of Python's packaging authority.
OFFICIAL = re.compile(r"(actions|docker|pypa)/[\w-]+@v\d+(\.\d+\.\d+)?")
EVENTS = True  # the key `on`, as YAML 1.1 reads it


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yaml").read_text())


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", [])]


def using(name: str, action: str) -> list[dict[str, Any]]:
    return [step for step in steps(name) if step.get("uses", "").startswith(f"{action}@")]


def matrix() -> list[dict[str, str]]:
    found: list[dict[str, str]] = workflow("checks")["jobs"]["tests"]["strategy"]["matrix"]["include"]
    return found


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def base_of_the_image() -> str:
    found = re.search(r"^ARG BASE=(\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert found
    return found[1]


def run_step(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A step as GitHub runs it."""
    values = {"PATH": os.environ["PATH"], **environment}
    command = ["bash", "-e", "-c", script]
    return subprocess.run(command, cwd=folder, env=values, capture_output=True, text=True, timeout=30, check=False)


def test_actions_of_workflows_are_official_and_pinned_by_a_version() -> None:
    used = [step["uses"] for name in WORKFLOWS for step in steps(name) if "uses" in step]
    assert used and [action for action in used if not OFFICIAL.fullmatch(action)] == []
    assert {path.stem for path in (ROOT / ".github" / "workflows").iterdir()} == set(WORKFLOWS)


def test_workflows_call_targets_and_scripts_that_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [line.split() for name in WORKFLOWS for step in steps(name) for line in step.get("run", "").splitlines()]
    called = {target for words in commands if words[:1] == ["make"] for target in words[1:]}
    assert {"lint", "types", "imports", "test", "test-more"} <= called <= targets
    assert ["docker/verify.sh"] in commands and os.access(ROOT / "docker" / "verify.sh", os.X_OK)


def test_tests_run_on_the_oldest_torch_that_is_taken_and_on_the_newest_there_is() -> None:
    (torch,) = [need for need in map(Requirement, project()["dependencies"]) if need.name == "torch"]
    bounds = {each.operator: each.version for each in torch.specifier}
    assert bounds.keys() == {">=", "<"}
    packages = {entry["torch"]: entry["packages"].split() for entry in matrix()}
    assert packages.keys() == {"oldest", "pinned", "newest"}
    assert f"torch=={bounds['>=']}.*" in packages["oldest"]
    assert packages["pinned"] == [] and "torch" in packages["newest"]


def test_every_python_of_the_metadata_is_tested_and_the_image_has_one_of_them() -> None:
    tested = {entry["python"] for entry in matrix() if entry["torch"] == "pinned"}
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    named = {found[1] for line in project()["classifiers"] if (found := re.fullmatch(pattern, line))}
    assert named == tested
    assert project()["requires-python"] == f">={min(tested, key=Version)}"
    assert base_of_the_image().removeprefix("python:").split("-")[0] in tested


def test_only_a_tag_whose_checks_have_passed_is_published() -> None:
    release, jobs = workflow("release"), workflow("release")["jobs"]
    assert release[EVENTS] == {"push": {"tags": ["v*"]}} and "workflow_call" in workflow("checks")[EVENTS]
    assert jobs["checks"] == {"needs": "tag", "uses": "./.github/workflows/checks.yaml"}
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "tag": None, "checks": "tag", "pypi": "checks", "image": "checks",
    }  # fmt: skip


def test_pypi_gets_what_was_checked_and_no_other_job_may_publish_there() -> None:
    built, published = using("checks", "actions/upload-artifact"), using("release", "actions/download-artifact")
    assert [step["with"]["name"] for step in built] == [step["with"]["name"] for step in published] == ["distribution"]
    assert workflow("release")["permissions"] == workflow("checks")["permissions"] == {"contents": "read"}
    allowed = {name: job.get("permissions", {}) for name, job in workflow("release")["jobs"].items()}
    assert {name for name, each in allowed.items() if "id-token" in each} == {"pypi"}
    assert workflow("release")["jobs"]["pypi"]["environment"] == "pypi"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("tag", "section", "said"),
    [
        (f"v{__version__}", f"## [{__version__}] - 2026-12-01", ""),
        (f"v{__version__}1", f"## [{__version__}] - 2026-12-01", "the tag is"),
        (f"v{__version__}", "## [Unreleased]", "CHANGELOG.md has no section"),
    ],
)
def test_tag_without_its_version_or_its_changelog_is_refused(
    tag: str, section: str, said: str, tmp_path: Path
) -> None:
    (script,) = [step["run"] for step in workflow("release")["jobs"]["tag"]["steps"] if "run" in step]
    version = Path("crossbow_py", "core", "version.py")
    (tmp_path / version).parent.mkdir(parents=True)
    shutil.copy(ROOT / version, tmp_path / version)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{section}\n")
    done = run_step(script, tmp_path, GITHUB_REF_NAME=tag)
    assert done.returncode == bool(said), done.stderr
    assert said in done.stdout and bool(done.stdout) == bool(said)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_released_image_is_built_on_the_digest_of_its_base(tmp_path: Path) -> None:
    (script,) = [step["run"] for step in steps("release") if step.get("id") == "names"]
    base, digest, output = base_of_the_image(), f"sha256:{'0f' * 32}", tmp_path / "output"
    docker = tmp_path / "docker"
    listing = f"Name: {base}\\nMediaType: an index\\nDigest:    {digest}\\n\\nManifests:\\n"
    docker.write_text(f'#!/bin/sh\n[ "$4" = {base} ] && printf "{listing}"\n')
    docker.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    values = {"GITHUB_REPOSITORY": "Some-One/Crossbow", "GITHUB_REF_NAME": "v1.2.3", "GITHUB_OUTPUT": str(output)}
    done = run_step(script, ROOT, **values, PATH=path)
    assert done.returncode == 0, done.stdout
    assert output.read_text().splitlines() == [
        f"base={base.split('@')[0]}@{digest}", "image=ghcr.io/some-one/crossbow:v1.2.3",
    ]  # fmt: skip
    docker.write_text("#!/bin/sh\necho 'not found' >&2\nexit 1\n")
    assert run_step(script, ROOT, **values, PATH=path).returncode == 1
    (build,) = using("release", "docker/build-push-action")
    assert "BASE=${{ steps.names.outputs.base }}" in build["with"]["build-args"].splitlines()
