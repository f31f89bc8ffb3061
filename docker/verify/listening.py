"""Fails where a process of this container listens on an address that other machines can reach.

torchrun itself does: its rendezvous has no setting for the address, and the network of a container is what keeps others
from it. Its ranks and all else may not.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

LISTENING = "0A"


def neighbours() -> Iterator[Path]:
    """The other processes with this one's root: where there are no namespaces, /proc shows all of the machine's."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            if process.name != str(os.getpid()) and Path("/").samefile(process / "root"):
                yield process


def sockets(process: Path) -> Iterator[str]:
    """The inodes of a process's sockets."""
    with suppress(OSError):
        targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
        yield from (target[8:-1] for target in targets if target.startswith("socket:["))


def listeners(table: str) -> Iterator[tuple[str, int, str]]:
    """Address, port and inode of what listens."""
    for line in Path(table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING:
            address, port = fields[1].split(":")
            words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
            yield str(ip_address(b"".join(words))), int(port, 16), fields[9]


def is_torchrun(process: Path) -> bool:
    """Whether it is the launcher, and not a rank."""
    return any(word.endswith(b"/torchrun") for word in (process / "cmdline").read_bytes().split(b"\0"))


processes = [process for process in neighbours() if not is_torchrun(process)]
own = {inode for process in processes for inode in sockets(process)}
found = [entry for table in ("/proc/net/tcp", "/proc/net/tcp6") for entry in listeners(table) if entry[2] in own]
public = [f"{address} port {port}" for address, port, _ in found if not ip_address(address).is_loopback]
print(f"{len(processes)} processes besides torchrun, {len(found)} listening sockets, public:", *(public or ["none"]))
sys.exit(bool(public) or not processes)
