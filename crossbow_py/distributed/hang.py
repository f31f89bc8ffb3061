"""The records that ranks leave in the run's folder when one of them hangs: stacks, and what NCCL was doing.

Torch's record of NCCL's operations is a private function, `_dump_nccl_trace`, tried with torch 2.13.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import cast

from torch._C import _distributed_c10d

from crossbow_py.core.errors import is_users_code
from crossbow_py.core.files import own_file
from crossbow_py.core.hanging_rank import HangingRank

_MOST_NAMED = 4  # ranks of a sentence


def stacks_file(rank: int) -> str:
    """Return the name of the file with the stacks of a rank's threads."""
    return f"hang_rank{rank}.txt"


def write_stacks(path: Path, lines: Sequence[str]) -> None:
    """Write lines, and then the names and the stacks of this process's threads. Raises OSError."""
    named = [f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate()]
    with open(path, "w", encoding="utf-8", opener=own_file) as file:
        file.write("\n".join([*lines, "", *named, "", ""]))
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def write_nccl_trace(folder: Path, rank: int) -> None:
    """Write torch's record of this process's NCCL operations, as `torchfrtrace --prefix hang_nccl_rank_` reads it.

    Does nothing if this build of torch has no such record. It may wait for the device, and keeps Python's lock
    meanwhile, so that no thread runs. Raises OSError.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is not None:
        trace = dump()
        with open(folder / f"hang_nccl_rank_{rank}", "wb", opener=own_file) as file:
            file.write(trace)


def innermost(threads: Collection[int]) -> str | None:
    """Return where threads are, as "function, FILE:LINE"; None if they have ended.

    That is the innermost line, and the innermost one of the user's code that called it. Reads no file, as a disk may be
    what a thread hangs at.
    """
    frames = sys._current_frames()
    places = [_place(frames[thread]) for thread in threads if thread in frames]
    return "; ".join(dict.fromkeys(places)) or None


def _place(innermost_frame: FrameType) -> str:
    frames, frame = list[FrameType](), cast("FrameType | None", innermost_frame)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    users = next((each for each in frames if is_users_code(each.f_code.co_filename)), innermost_frame)
    called_by = "" if users is innermost_frame else f", called by {_line(users)}"
    return _line(innermost_frame) + called_by


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Make a call that may block or fail, on a thread of its own, and go on after so many seconds. Does not raise.

    Returns whether it was over by then, without an exception.
    """
    done = threading.Event()

    def quietly() -> None:
        with suppress(Exception):
            call()
            done.set()

    thread = threading.Thread(target=quietly, name="crossbow records", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def described(hanging: Sequence[HangingRank], gone_hosts: Collection[str]) -> str:
    """Return half a sentence on ranks that hang, in rank order; `gone_hosts` are those of which no rank answers."""
    parts = []
    for host in sorted(gone_hosts):
        ranks = [each for each in hanging if each.host == host]
        named = ", ".join(str(each.rank) for each in ranks)
        heard_s = min(each.heard_s for each in ranks)
        parts.append(
            f"every rank of {host} ({named}), last heard of {heard_s:.0f} s ago: the host is gone, or the network to it"
        )
    single = [each for each in hanging if each.host not in gone_hosts]
    parts += [_described(each) for each in single[:_MOST_NAMED]]
    if len(single) > _MOST_NAMED:
        parts.append(f"and {len(single) - _MOST_NAMED} more ranks")
    return "; ".join(parts)


def _described(rank: HangingRank) -> str:
    where = "" if rank.function is None else f" in {rank.function}"
    stacks = "" if rank.stacks is None else f" ({rank.stacks} has its stacks)"
    return (
        f"rank {rank.rank} ({rank.host}, process {rank.pid}), which appears to hang{where}: its last task was "
        f"{rank.doing}, since {rank.since}, last heard of {rank.heard_s:.0f} s ago{stacks}"
    )
