"""The ladder on one device: its rungs in child processes, and what is remembered of them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.file_locks import locked
from crossbow_py.core.measured import digest, user_cache
from crossbow_py.core.triton_launch import unavailable
from crossbow_py.core.version import PACKAGE
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.modules.precision import Precision, has_fast_bf16
from crossbow_py.engine.trust import Outcome, RememberedOutcomes, facts
from crossbow_py.train.ladder.children import Ended, ReadyChildren, outcome_of
from crossbow_py.train.ladder.compile_ahead import compiling
from crossbow_py.train.ladder.rungs import RUNGS, Rung, climb, untried

_CHILD = [sys.executable, "-X", "faulthandler", "-m", "crossbow_py.train.ladder.child"]
_VISIBLE = "CUDA_VISIBLE_DEVICES"
RunChild = Callable[[Sequence[str], dict[str, str], Path, float], Ended]
Report = Callable[[Rung, Outcome, bool], None]


class Ladder:
    """The rungs that there are for a device.

    Args:
        device: the device.
        folder: for what the children write: NAME.log, NAME.json, and a cache of their own, so that they measure anew.
        limit_s: seconds a child may take; None is what each rung says.
        rungs: the rungs, of which those for the device are taken.
        run: runs a command, as `run_child`; None has Python start ahead, see `ReadyChildren`.

    Attributes:
        is_kept: whether all outcomes so far could be written to the user's cache.

    Raises UserError if the device does not answer.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        limit_s: float | None = None,
        rungs: Sequence[Rung] = RUNGS,
        run: RunChild | None = None,
    ) -> None:
        self.device, self.folder, self._limit_s = device, folder, limit_s
        self._children = ReadyChildren(_CHILD)
        self._run: RunChild = run or self._children
        self.is_kept = True
        fitting = [rung for rung in rungs if device.type in rung.devices]
        self.rungs = [replace(rung, title=rung.title.format(backend=self._backend)) for rung in fitting]
        self.facts = _facts(device)

    def lacks(self, rung: Rung) -> str | None:
        """Return what this machine lacks to try a rung; None if it has all."""
        return next(filter(None, map(self._lacks, rung.needs)), None)

    def _lacks(self, need: str) -> str | None:
        on_cuda = self.device.type == "cuda"
        if need == "bf16":
            return None if has_fast_bf16(self.device) else "bf16 has no instructions of its own here"
        if need == "triton":
            return unavailable(self.device)
        if need == "devices":
            return None if self._num_ranks > 1 else "there is one GPU"
        available = torch.distributed.is_nccl_available() if on_cuda else torch.distributed.is_gloo_available()
        return None if available else f"this build of torch has no {self._backend}"

    @property
    def _backend(self) -> str:
        return "NCCL" if self.device.type == "cuda" else "gloo"

    @property
    def _num_ranks(self) -> int:
        return torch.cuda.device_count() if self.device.type == "cuda" else 2

    def climb(
        self, known: Mapping[str, Outcome], tell: Report, begin: Callable[[Rung], None] = lambda _: None
    ) -> dict[str, Outcome]:
        """Try the rungs that are not known, and remember each outcome at once; see `climb`.

        `begin` is called with each rung before it is tried.
        """
        remembered = RememberedOutcomes()

        def told(rung: Rung, outcome: Outcome, is_known: bool) -> None:
            if not is_known:
                self.is_kept = remembered.keep(self.device, {rung.name: outcome}) and self.is_kept
            tell(rung, outcome, is_known)

        def attempt(rung: Rung, has: frozenset[str]) -> Outcome:
            begin(rung)
            return self.attempt(rung, has)

        with contextlib.closing(self._children), self._compiling(untried(self.rungs, self.lacks, known)):
            return climb(self.rungs, attempt, self.lacks, known, told)

    def _compiling(self, rungs: Sequence[Rung]) -> contextlib.AbstractContextManager[None]:
        """Have the kernels of rungs be compiled while those before them are tried."""
        kernels = [each for rung in rungs for each in rung.kernels]
        precisions = ["fp32"] if self._lacks("bf16") else ["fp32", "bf16"]
        return compiling(kernels, precisions, self.facts["capability"], _this_package())

    def attempt(self, rung: Rung, has: frozenset[str]) -> Outcome:
        """Try a rung in a child process, where the features `has` are proven."""
        log, result = self.folder / f"{rung.name}.log", self.folder / f"{rung.name}.json"
        result.unlink(missing_ok=True)
        kept = str(self.folder / "cache")
        command = [*_CHILD, json.dumps(asdict(rung.task(self.device.type, has, kept))), str(result)]
        if rung.job == "ranks":
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1",
                f"--nproc-per-node={self._num_ranks}", *command[3:],
            ]  # fmt: skip
        environment = {
            **rung.switches(has).environment(),
            "XDG_CACHE_HOME": kept,
            # Threads that share the work of a small model wait for each other wherever other processes are busy.
            **({"OMP_NUM_THREADS": "1"} if self.device.type == "cuda" else {}),
            **_this_package(),
            **({} if rung.job == "ranks" else self._one_device()),
        }
        ended = self._run(command, environment, log, self._limit_s or rung.limit_s)
        outcome = outcome_of(ended, result, log, rung.proves)
        if ended.code is None and self._limit_s is not None and self._limit_s < rung.limit_s:
            return replace(outcome, may_change=True)  # more time may be all that it needs
        return outcome

    def _one_device(self) -> dict[str, str]:
        """Return the variables that let a child see this device first."""
        index = self.device.index or 0
        if self.device.type != "cuda" or index == 0:
            return {}
        visible = os.environ.get(_VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
        return {_VISIBLE: visible.split(",")[index]}


def _facts(device: torch.device) -> dict[str, str]:
    try:
        return facts(device)
    except RuntimeError as error:
        raise UserError(
            f"device=cuda does not answer ({one_line(error)[:200]}); set device=cpu, or look at it by nvidia-smi."
        ) from error


def _this_package() -> dict[str, str]:
    """Return the variable by which a child imports the package that this process has, installed or not."""
    if str(PACKAGE.parent) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))}


def line(title: str, outcome: Outcome, is_known: bool = False) -> str:
    """Return a rung's line: PASS, FAIL or SKIP, its time, and why."""
    status = {"passed": "PASS", "failed": "FAIL", "skipped": "SKIP"}[outcome.status]
    took = f"{outcome.seconds:.1f} s" if outcome.seconds else ""
    remark = ": ".join(filter(None, ("remembered" if is_known else "", outcome.reason)))
    return f"{status}  {title:27} {took:>8}  {remark}".rstrip()


@contextlib.contextmanager
def one_at_a_time(announce: Callable[[str], None]) -> Iterator[None]:
    """Have one process of this user climb at a time, if there is a cache to say so in."""
    waiting = "Another process tries the device already; waiting for it."
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            user_cache().mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(user_cache() / "ladder.lock", lambda: announce(waiting)))
        yield


def try_once(
    device: torch.device, announce: Callable[[str], None], rungs: Sequence[Rung] = RUNGS, run: RunChild | None = None
) -> dict[str, Outcome]:
    """Find out what `executor=auto` may take on a CUDA device, in child processes, unless it is remembered.

    Takes minutes the first time on a device and with a version of torch, Triton or this package, and says so, and also
    if it cannot be remembered. On other devices there is nothing to find out, and no outcome.
    """
    if device.type != "cuda":
        return {}
    with tempfile.TemporaryDirectory(prefix="crossbow_check_") as folder:
        ladder = Ladder(device, Path(folder), rungs=[rung for rung in rungs if rung.serves_auto], run=run)
        known = RememberedOutcomes().of(device)
        if not untried(ladder.rungs, ladder.lacks, known):
            return known
        with one_at_a_time(announce):
            known = RememberedOutcomes().of(device)  # another process may have climbed meanwhile
            if count := len(untried(ladder.rungs, ladder.lacks, known)):
                announce(
                    f"Trying {ladder.facts['device']} in {count} child processes: executor=auto takes only what gives "
                    "the numbers of serial. It takes some minutes, the first time."
                )

            def tell(rung: Rung, outcome: Outcome, is_known: bool) -> None:
                if not is_known:
                    announce(line(rung.title, outcome))

            outcomes = ladder.climb(known, tell)
        if not ladder.is_kept:
            announce(forgotten(device))
        return outcomes


def try_on_ranks(device: torch.device, ranks: Ranks, announce: Callable[[str], None]) -> dict[str, Outcome]:
    """Find out, as `try_once`, what may be used on this rank's device. Blocks until all ranks have called it.

    Of the ranks on a host whose devices are equal the first tries it, and tells the others.
    """
    if device.type != "cuda":
        return {}
    with ranks.together():
        place = f"{ranks.node} {digest(_facts(device))}"
    places = ranks.gather_texts(place)
    first, known = places.index(place), ""
    with ranks.together():
        if ranks.rank == first:
            try_once(device, announce)
            known = RememberedOutcomes().known(device)
    RememberedOutcomes().share(device, ranks.gather_texts(known)[first])
    return RememberedOutcomes().of(device)


def forgotten(device: torch.device) -> str:
    """Return the remedy for outcomes that only this process knows."""
    try:
        where = str(RememberedOutcomes().path)
    except OSError as error:
        where = f"the user's cache ({error})"
    again = ", so every start tries it again" if device.type == "cuda" else ""
    return (
        f"What was tried cannot be remembered, as {where} cannot be written{again}; set XDG_CACHE_HOME to a "
        "folder that can be."
    )


def has_failed(name: str, outcomes: Mapping[str, Outcome]) -> bool:
    """Return whether a rung failed; for something that passes, such as memory that others hold, says nothing."""
    outcome = outcomes.get(name)
    return outcome is not None and outcome.status == "failed" and not outcome.may_change


def check_trusted(outcomes: Mapping[str, Outcome], precision: Precision) -> None:
    """Raise UserError if `serial` itself does not hold on the device, by outcomes of `try_once`, in this precision."""
    for name, where, remedy in (("serial", "fp32", "device=cpu"), ("bf16", "bf16", "precision=fp32")):
        if name in ("serial", precision.name) and has_failed(name, outcomes):
            raise UserError(
                f"device=cuda failed when it was tried, by serial rounds in {where} "
                f"({outcomes[name].reason.rstrip('.')}); "
                f"set {remedy}, or try it anew: python -m crossbow_py.check again=true."
            )
