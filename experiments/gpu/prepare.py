"""Makes what travels to a GPU machine without a network: wheels, compiled kernels, and CIFAR-10 in pieces, in .gpu/.

    python experiments/gpu/prepare.py [--data FOLDER] [--no-kernels] [--rehearse]

On an ordinary machine, with the work committed. It ends with the three calls, what each carries, and how large that is.
Run it again after every commit: it makes only what has changed. With --rehearse the calls then run here, on the CPU
with small models, by the GPU machine's versions, each from what it carries alone and without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.machine import ROOT, commit
from experiments.gpu.on_device import CARRIED, DATA, KERNELS, SITE, TORCH

# What the GPU machine lacks, all of Python alone. The last one is published as source only.
_WHEELS, _SOURCES = ("hydra-core", "omegaconf", "optuna", "colorlog"), ("antlr4-python3-runtime",)
_ALSO = (
    "numpy", "nvidia-ml-py", "tensorboard", "pytest", "pytest-timeout", "hypothesis", "safetensors", "rich", "pillow",
    "pyyaml",
)  # fmt: skip
_TRITON, _CAPABILITY = "3.6.0", 90
_LEFT_OUT = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # of a compiled kernel, what nothing reads
_ROOM_MIB = 62.0  # of the 64 that travel in a call
_NOTES: list[str] = []
_RUN = "python3 experiments/gpu/on_device.py --untried --seconds"
_CALLS = (  # with a start of two minutes, the slowest so far, they are a quarter of an hour
    (("always", "kernels", "data1"), 300, "285 env check+tests+tests.packs+smoke"),
    (("always", "data2"), 270, "255 rows update rows_compiled"),
    (("always", "data3"), 200, "185 learn.k8 learn.single memory packs mlps rows_more sanitize"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("CROSSBOW_DATA_DIR"), help="has CIFAR-10 (default: the variable)")
    add("--no-kernels", action="store_true", help="leave kernels to be compiled on the GPU machine")
    add("--venv", type=Path, default=Path("/tmp/crossbow_gpu_venv"), help="of the GPU machine's versions")
    add("--rehearse", action="store_true", help="then run the calls on the CPU, small and without a network")
    given = parser.parse_args(argv)
    at = commit()
    if at is None or shutil.which("git") is None:
        parser.error("it asks git which files travel: run it in a clone of the repository")
    if at.endswith("+"):
        note("commit first: results will not name a commit that has this code")
    (CARRIED / "always").mkdir(parents=True, exist_ok=True)
    (CARRIED / "always" / "commit").write_text(f"{at}\n")
    steps: dict[str, Callable[[], None]] = {"wheels": wheels}
    if not given.no_kernels:
        steps["kernels"] = partial(kernels, given.venv)
    for name, step in steps.items():
        try:
            step()
        except (OSError, subprocess.CalledProcessError) as error:
            note(f"{name}: {error}; the rest goes on without")
    data(given.data)
    return show_calls() or (rehearse(given.venv) if given.rehearse else 0)


def note(said: str) -> None:
    """Say at the end what a call will lack."""
    _NOTES.append(f"NOTE  {said}")


def wheels() -> None:
    """Download the wheels of constraints.txt that are not there yet."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {line.partition("==")[0]: line.partition(";")[0].strip() for line in lines if "==" in line}
    folder = CARRIED / "always"
    wanted = "\n".join(versions[name] for name in (*_WHEELS, *_SOURCES))
    listed = CARRIED / "wheels_of"
    if listed.exists() and listed.read_text() == wanted:
        return
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip"]
    only = ["-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", str(folder)]
    subprocess.run([*pip, "download", *only, *(versions[name] for name in _WHEELS)], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, *(versions[name] for name in _SOURCES)], check=True)
    listed.write_text(wanted)


def kernels(venv: Path) -> None:
    """Compile the kernels by the GPU machine's Triton, whose cache is known by source, options and compiler."""
    folder = CARRIED / "kernels"
    words = ["git", "rev-parse", "HEAD:crossbow_py"]
    code = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made_of = folder / "code"
    if made_of.exists() and made_of.read_text() == code:
        return
    python = str(venv / "bin" / "python")
    installed = venv / "installed"
    if not installed.exists():
        subprocess.run([python312(), "-m", "venv", str(venv)], check=True)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, f"torch=={TORCH}", f"triton=={_TRITON}", *_ALSO], check=True)
        subprocess.run([*install, "--no-deps", *map(str, (CARRIED / "always").glob("*.whl"))], check=True)
        installed.touch()
    if KERNELS.exists():
        shutil.rmtree(KERNELS)
    ahead = ["nice", python, "tests/integration/compile_ahead.py", "--capability", str(_CAPABILITY)]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(KERNELS)}
    if failed := subprocess.run(ahead, cwd=ROOT, env=own, check=False).returncode != 0:
        note("some kernels were not compiled, see above")
    if not KERNELS.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "cache.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(path for path in KERNELS.rglob("*") if path.is_file() and path.suffix not in _LEFT_OUT):
            archive.add(path, path.relative_to(KERNELS))
    (folder / "triton").write_text(_TRITON)
    if not failed:
        made_of.write_text(code)


def python312() -> str:
    """Return a Python 3.12: the one on the path, or one of pyenv's. Raises FileNotFoundError without any."""
    others = sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python"))
    for each in filter(None, [shutil.which("python3.12"), *map(str, others)]):
        if subprocess.run([each, "--version"], capture_output=True, check=False).returncode == 0:  # a shim may fail
            return each
    raise FileNotFoundError("there is no Python 3.12 here")


def data(folder: Path | None) -> None:
    """Pack CIFAR-10 into the room that is left in each call."""
    room = [_ROOM_MIB - mib(tree()) - sum(mib([CARRIED / name]) for name in names[:-1]) for names, *_ in _CALLS]
    pieces = [CARRIED / f"data{number}" for number in range(1, len(room) + 1)]
    if all(piece.exists() and mib([piece]) <= own for piece, own in zip(pieces, room, strict=True)):
        return
    for piece in pieces:
        shutil.rmtree(piece, ignore_errors=True)
    if folder is None:
        note("no data: give --data or set CROSSBOW_DATA_DIR; the learn stages will be skipped")
        return
    words = [str(ROOT / "experiments/gpu/data_pieces.py"), "pack", str(folder), *map(str, pieces)]
    if subprocess.run(["nice", sys.executable, *words, "--room-mib", *map(str, room)], check=False).returncode:
        note("CIFAR-10 was not packed; the learn stages will be skipped")
        for piece in pieces:
            shutil.rmtree(piece, ignore_errors=True)


def tree() -> list[Path]:
    """The files that travel in every call: those that git does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and not (ROOT / name).is_symlink()]


def mib(paths: Sequence[Path]) -> float:
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


def show_calls() -> int:
    always, fits = mib(tree()), True
    for number, (names, limit, words) in enumerate(_CALLS, 1):
        carried = [f".gpu/{name}" for name in names if (CARRIED / name).exists()]
        size = always + sum(mib([ROOT / name]) for name in carried)
        fits = fits and size <= _ROOM_MIB
        print(f"\ncall {number}, limit {limit} s, {size:.1f} MiB with the tree, carries {' '.join(carried)}")
        print(f"  {_RUN} {words}")
    print(*_NOTES, sep="\n")
    if not fits:
        print(f"error: a call has room for {_ROOM_MIB:g} MiB; take large files out of the tree", file=sys.stderr)
    return int(not fits)


def rehearse(venv: Path) -> int:
    """Run each call in a folder of what it carries; returns 1 if one did not come to its end."""
    ended = []
    for at in (SITE, DATA):
        shutil.rmtree(at, ignore_errors=True)  # a machine that is bare
    for names, limit, words in _CALLS:
        with tempfile.TemporaryDirectory() as folder:
            head = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=head, check=True)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copytree(CARRIED / name, Path(folder, ".gpu", name))
            own = {"OUT": f"{folder}/out", "PATH": os.environ["PATH"], "HOME": folder}
            alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]  # ranks meet on this host
            call = [*alone, str(venv / "bin" / "python"), "experiments/gpu/on_device.py", "--device", "cpu"]
            print(f"\n{words}")
            call += ["--tiny", "--untried", "--seconds", *words.split()]
            done = subprocess.run(call, cwd=folder, env=own, timeout=2 * limit, check=False)
            archives = sorted(path.name for path in Path(folder, "out").iterdir())
            print(f"exit code {done.returncode}; it brings back {', '.join(archives)}")
            ended.append("results.tar.gz" in archives)
    return int(not all(ended))


if __name__ == "__main__":
    raise SystemExit(main())
