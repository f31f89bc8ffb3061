"""What others wrote is never run: checkpoints, data, caches and run folders with code in them, through the command.

Every trap would make the folder `sprung`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from crossbow_py.core.measured import Remembered
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.records import read_summary
from crossbow_py.train.__main__ import main
from tests.caches import link_native
from tests.unit.data.files import cifar10_batches, cifar_archive, write_cifar, write_mnist
from tests.unit.data.images.pictures import write_part

ROOT = Path(__file__).resolve().parents[2]
SPRUNG = Path("sprung")
FAST = ["+debug=fast", "device=cpu", "precision=fp32", "executor=serial", "num_learners=2", "output_dir=run"]
DIGITS = [*FAST, "model.hidden=[8]"]
IMAGES = [*FAST, "data=image_folder", "data.folder=pictures", "data.size=16", "data.resize=16", "model.hidden=[8]",
          "batch_size=2"]  # fmt: skip


class Trap:
    """Makes the folder `sprung` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(SPRUNG),)


def small_model() -> nn.Module:
    """The user's own, named by `model.target`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


OWN_MODEL = [*FAST, "model=custom", f"model.target={__name__}.small_model"]


@pytest.fixture(autouse=True)
def in_a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    link_native(tmp_path / "home" / ".cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CROSSBOW_DATA_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield
    assert not (tmp_path / SPRUNG).exists(), "code of a file was run"


def trained(arguments: list[str], folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(arguments) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `DIGITS`, trained once."""
    return trained(DIGITS, tmp_path_factory.mktemp("digits"))


@pytest.fixture
def run(whole_run: Path) -> None:
    """A copy of that run in the current folder, to be harmed."""
    shutil.copytree(whole_run, "run")


@pytest.fixture(scope="module")
def whole_own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(OWN_MODEL, tmp_path_factory.mktemp("own"))


@pytest.fixture
def own_run(whole_own_run: Path) -> None:
    """As `run`, of `OWN_MODEL`."""
    shutil.copytree(whole_own_run, "run")


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says, which must be one line, and exit code 2."""
    capsys.readouterr()
    code, said = main(arguments), capsys.readouterr().err
    assert (code, said.count("\n"), said[:7]) == (2, 1, "error: "), said
    return said


def newest_checkpoint() -> Path:
    return max(Path("run/checkpoints").iterdir())


def replace_part(content: Callable[[Any], bytes]) -> None:
    """Change rank 0's part of the newest checkpoint, and put its hash into the manifest."""
    folder = newest_checkpoint()
    part, manifest = folder / "rank-0.pt", json.loads((folder / "manifest.json").read_text())
    part.write_bytes(content(torch.load(part, weights_only=True)))
    manifest["sha256"]["rank-0.pt"] = hashlib.sha256(part.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def saved(value: Any, **options: Any) -> bytes:
    torch.save(value, "part", **options)
    return Path("part").read_bytes()


def test_trap_springs_where_nothing_is_refused() -> None:
    pickle.loads(pickle.dumps(Trap()))
    assert SPRUNG.is_dir()
    SPRUNG.rmdir()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "poison",
    [
        lambda state: saved(Trap()),
        lambda state: saved({**state, "state": Trap()}),
        lambda state: saved({**state, "bank": {**state["bank"], "extra": [Trap()]}}),
        lambda state: saved(Trap(), _use_new_zipfile_serialization=False),
        lambda state: pickle.dumps(Trap()),
    ],
    ids=["whole", "counter", "beside tensors", "older format", "plain pickle"],
)
def test_checkpoint_with_code_and_a_right_hash_is_refused(
    poison: Callable[[Any], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    replace_part(poison)
    said = refusal([*DIGITS, "resume=auto"], capsys)
    assert str(newest_checkpoint()) in said


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("place", ["link", "pipe", "above", "absolute"])
def test_checkpoint_that_leads_out_of_its_folder_is_refused(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = newest_checkpoint()
    part, manifest = folder / "rank-0.pt", json.loads((folder / "manifest.json").read_text())
    if place in ("link", "pipe"):
        part.rename("outside.pt")
        part.symlink_to(Path("outside.pt").resolve()) if place == "link" else os.mkfifo(part)
    else:
        name = "../../../outside.pt" if place == "above" else str(Path("outside.pt").resolve())
        manifest["sha256"] = {name: manifest["sha256"].pop("rank-0.pt")}
        part.rename("outside.pt")
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert str(folder) in refusal([*DIGITS, "resume=auto"], capsys)


@pytest.mark.parametrize("archived", [True, False])
def test_cifar_with_code_in_a_batch_is_refused(archived: bool, capsys: pytest.CaptureFixture[str]) -> None:
    batches = {**cifar10_batches(), "data_batch_2": {b"data": Trap(), b"labels": [0, 1]}}
    if archived:
        Path("cifar-10-python.tar.gz").write_bytes(cifar_archive("cifar-10-batches-py", batches))
    else:
        write_cifar(Path("cifar-10-batches-py"), batches)
    assert "data_batch_2" in refusal([*FAST, "data=cifar10", "data.root=.", "model.hidden=[8]"], capsys)


@pytest.mark.slow
def test_cifar_archive_with_a_link_or_a_device_for_a_batch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, target in ((tarfile.SYMTYPE, "data_batch_1"), (tarfile.LNKTYPE, "/etc/passwd"), (tarfile.CHRTYPE, "")):
        with tarfile.open("cifar-10-python.tar.gz", "w:gz") as tar:
            member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            member.type, member.linkname = kind, target
            tar.addfile(member)
        assert "data_batch_1 is missing" in refusal([*FAST, "data=cifar10", "data.root=."], capsys)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_that_is_a_pickle_is_refused(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(Path(), packed=bool(suffix))
    Path(f"mnist/train-images-idx3-ubyte{suffix}").write_bytes(pickle.dumps(Trap()))
    assert "train-images-idx3-ubyte" in refusal([*FAST, "data=mnist", "data.root=."], capsys)


@pytest.mark.parametrize("name", ["mnist/train-images-idx3-ubyte", "pictures/train/ant/ant_0.png"])
def test_pipe_in_place_of_a_data_file_is_refused_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(Path(), packed=False)
    for part in ("train", "val"):
        write_part(Path("pictures") / part)
    Path(name).unlink()
    os.mkfifo(name)
    arguments = IMAGES if name.startswith("pictures") else [*FAST, "data=mnist"]
    assert name in refusal([*arguments, "data.root=."], capsys)


def test_image_that_is_a_pickle_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "val"):
        write_part(Path("pictures") / part)
    for image in Path("pictures/train/ant").iterdir():
        image.write_bytes(pickle.dumps(Trap()))
    said = refusal([*IMAGES, "data.root=.", "num_workers=0"], capsys)
    assert "pictures/train/ant/" in said


@pytest.mark.slow
def test_image_cache_with_code_in_its_index_is_filled_anew() -> None:
    for part in ("train", "val"):
        write_part(Path("pictures") / part)
    arguments = [*IMAGES, "data.root=.", "data.cache=true", "data.cache_dir=cache", "num_workers=0"]
    assert main([*arguments, "max_rounds=1"]) == 0
    indices = sorted(Path("cache").glob("*/index.npy"))
    assert len(indices) == 2
    for index in indices:
        np.save(index, np.array([[Trap()] * 3] * 9, dtype=object), allow_pickle=True)
    assert main([*arguments, "max_rounds=2", "resume=auto"]) == 0
    assert [np.load(index, allow_pickle=False).shape for index in indices] == [(9, 3), (9, 3)]


@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b'{"key": {"name": "os.system"}}', b'["key"]', b"{"])
def test_remembered_choices_that_are_no_choices_are_forgotten(content: bytes) -> None:
    Path("executors.json").write_bytes(content)
    assert Remembered("executors.json", Path("executors.json")).recall("key") is None


def test_initial_weights_that_are_a_pickle_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number, content in enumerate((saved({"weight": Trap()}), pickle.dumps(Trap()))):
        Path(f"{number}.safetensors").write_bytes(content)
        assert f"init_from={number}.safetensors" in refusal([*DIGITS, f"init_from={number}.safetensors"], capsys)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("tag", ["apply:os.mkdir [sprung]", "new:os.mkdir [sprung]", "name:os.mkdir ''"])
def test_config_of_a_run_with_code_in_it_is_refused(tag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("run/config.yaml").open("a") as file:
        file.write(f"more: !!python/object/{tag}\n" if not tag.startswith("name") else f"more: !!python/{tag}\n")
    assert "run/config.yaml" in refusal([*DIGITS, "resume=auto"], capsys)


def plant_target() -> str:
    """A module whose import springs, in the current folder, where targets are looked for."""
    Path("planted.py").write_text(f"import os\nos.mkdir({str(SPRUNG)!r})\ndef make(**_): pass\n")
    return "planted.make"


def test_target_on_the_command_line_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert "must return a torch.nn.Module" in refusal([*FAST, "model=custom", f"model.target={plant_target()}"], capsys)
    sys.modules.pop("planted")
    SPRUNG.rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize(
    ("key", "resume"),
    [("model", "auto"), ("model", "run"), ("model", "run/checkpoints"), ("data", "auto"), ("data", "run")],
)
def test_target_that_a_run_folder_names_is_a_difference_and_not_imported(
    key: str, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, target = Path("run/config.yaml"), plant_target()
    named = f"{__name__}.small_model" if key == "model" else "name: digits"
    instead = target if key == "model" else f"name: custom\n  target: {target}"
    config.write_text(config.read_text().replace(named, instead))
    said = refusal([*OWN_MODEL, f"resume={resume}"], capsys)
    assert "planted.make" in said or f"{key}.name: custom → digits" in said
    assert "planted" not in sys.modules


def test_target_that_the_newest_run_names_is_not_taken_by_resume_auto(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for argument in OWN_MODEL if argument != "output_dir=run"]
    assert main([*arguments, "max_rounds=1"]) == 0
    (config,) = Path("runs/custom").glob("*/config.yaml")
    (config.parent / "summary.json").unlink()
    config.write_text(config.read_text().replace(f"{__name__}.small_model", plant_target()))
    assert main([*arguments, "resume=auto"]) == 0
    assert "starting afresh" in capsys.readouterr().out
    assert "planted" not in sys.modules


@pytest.mark.usefixtures("own_run")
@pytest.mark.parametrize(
    "tamper",
    [
        lambda identity, target: {**identity, "model": {"name": "custom", "target": target}},
        pytest.param(lambda identity, target: {**identity, "target": target}, marks=pytest.mark.slow),
        pytest.param(lambda identity, target: {**identity, "model": target}, marks=pytest.mark.slow),
        pytest.param(
            lambda identity, target: {**identity, "optimizer": {"_target_": target, "name": target}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_target_that_a_checkpoint_names_is_a_difference_and_not_imported(
    tamper: Callable[[dict[str, Any], str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    target = plant_target()
    replace_part(lambda state: saved({**state, "identity": tamper(state["identity"], target)}))
    assert "is of another run" in refusal([*OWN_MODEL, "resume=auto"], capsys)
    assert "planted" not in sys.modules


@pytest.mark.parametrize("averaging", ["sma", pytest.param("independent", marks=pytest.mark.slow)])
def test_exports_are_safetensors_and_nothing_else(averaging: str, whole_run: Path) -> None:
    if averaging == "sma":
        shutil.copytree(whole_run, "run")
    else:
        assert main([*DIGITS, f"averaging={averaging}"]) == 0
    exports = sorted(Path("run").glob("*.safetensors"))
    assert len(exports) == (1 if averaging == "sma" else 2)
    assert not [path for path in Path("run").iterdir() if path.suffix in (".pt", ".pth", ".pkl", ".bin")]
    for export in exports:
        content, tensors = export.read_bytes(), load_file(export)
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        assert header.keys() - {"__metadata__"} == tensors.keys()
        # Text in JSON, numbers to the last byte: there is no room for a pickle.
        assert len(content) == 8 + length + sum(tensor.nbytes for tensor in tensors.values())


def listeners(process_ids: list[int]) -> list[str]:
    """Addresses (as /proc has them) of the sockets of these processes that take connections or datagrams."""
    held = set()
    for process in process_ids:
        with suppress(OSError):  # ended meanwhile
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    held.add(str(descriptor.readlink()))
    found = []
    for protocol, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        table = Path("/proc/net") / protocol
        for row in map(str.split, table.read_text().splitlines()[1:] if table.exists() else []):
            if row[3] == state and f"socket:[{row[9]}]" in held:
                found.append(row[1])
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.0/8, ::1, or 127.0.0.0/8 as IPv6 has it; words are little-endian."""
    host = address.partition(":")[0]
    if len(host) == 8:
        return host.endswith("7F")
    return host == "0" * 24 + "01000000" or (host.startswith("0" * 16 + "FFFF0000") and host.endswith("7F"))


def own_processes() -> list[int]:
    """This one and all beneath it."""
    found = [os.getpid()]
    for process in found:
        with suppress(OSError):  # ended meanwhile
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
    return found


@pytest.mark.parametrize(("host", "public"), [("127.0.0.1", False), ("0.0.0.0", True), ("::1", False), ("::", True)])
def test_listener_is_found_and_told_from_one_on_loopback(host: str, public: bool) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("needs IPv6")
        server.listen()
        (address,) = listeners([os.getpid()])
        assert is_loopback(address) is not public


@pytest.mark.slow
def test_training_with_data_workers_listens_on_no_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "val"):
        write_part(Path("pictures") / part)
    seen: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(
        ConsoleListener,
        "on_epoch",
        lambda *_: seen.append((len(own_processes()), listeners(own_processes()))),
    )
    # Epochs of two rounds: at the end of the first ones workers are busy with the next.
    assert main([*IMAGES, "data.root=.", "num_workers=2", "data.cache=true", "max_rounds=8"]) == 0
    assert read_summary(Path("run"))["status"] == "finished"
    assert max(num_processes for num_processes, _ in seen) >= 3
    for _, addresses in seen:
        assert not [address for address in addresses if not is_loopback(address)]


def test_no_page_or_makefile_tells_anyone_to_listen_on_all_addresses() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/README.md")]
    for page in pages:
        assert not re.search(r"bind_all|0\.0\.0\.0|--host[ =]\*", page.read_text()), page


RECORDS = ["console.log", ".lock", "metrics.jsonl", "summary.json", "confusion_test.csv", "config.yaml"]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", *RECORDS])
def test_link_in_a_folder_that_is_resumed_is_refused_and_not_followed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run", name).rename("theirs")
    Path("run", name).symlink_to(Path("theirs").resolve())

    def theirs() -> list[tuple[Path, bytes]]:
        paths = [Path("theirs"), *Path("theirs").rglob("*")]
        return [(path, path.read_bytes() if path.is_file() else b"") for path in paths]

    before = theirs()
    assert f"run/{name} is a link" in refusal([*DIGITS, "resume=auto", "max_rounds=4"], capsys)
    assert theirs() == before


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", RECORDS)
def test_pipe_in_a_folder_that_is_resumed_is_refused_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run", name).unlink(missing_ok=True)
    os.mkfifo(Path("run", name))
    assert f"run/{name} is a pipe" in refusal([*DIGITS, "resume=auto", "max_rounds=4"], capsys)


@pytest.mark.usefixtures("run")
def test_folder_of_a_run_that_is_itself_a_link_is_resumed() -> None:
    Path("run").rename("disk")
    Path("run").symlink_to("disk")
    assert main([*DIGITS, "resume=auto", "max_rounds=4"]) == 0
    assert read_summary(Path("disk"))["status"] == "finished"
