"""Ranks over torch.distributed, as torchrun starts them: one process a device, gloo on CPUs and NCCL on GPUs.

There are two groups, because the collective operations of a group must be in one order: the averaging stream sums
corrections in one, and the training loop exchanges reports over gloo in the other, on any device.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from crossbow_py.core.errors import CrossbowError, RankLostError, UserError, one_line
from crossbow_py.core.host import prepare_environment, read_host
from crossbow_py.distributed.collective import Collective, ProcessGroupCollective
from crossbow_py.distributed.launch import LAUNCHED, end_with_launcher, launched
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.distributed.watch import RankWatch

_START_S = 1800.0  # for all ranks to start and to connect
_LOADING_S = 7 * 24 * 3600.0  # before training, ranks wait while one of the host downloads data or fills a cache
_GRACE_S = 60.0  # the watch, which can say which rank hangs, comes before the process group's own timeout
_PAUSES_S = (0.005, 0.5)  # first and longest pause between two looks into the store; each doubles the last


@contextmanager
def joined(
    settings: DistributedSettings = DistributedSettings(), device: Literal["auto", "cpu", "cuda"] = "auto"
) -> Iterator[Ranks]:
    """Join the ranks that a launcher has started, or yield a single rank without one. Blocks until all have joined.

    On GPUs the process takes the GPU of its local rank.

    Raises:
        UserError: there are more ranks on this host than GPUs.
        RankLostError: some ranks did not join.
    """
    end_with_launcher()
    if not launched():
        yield Ranks()
        return
    ranks = ProcessGroupRanks(settings, on_gpus=device != "cpu" and torch.cuda.is_available())
    try:
        yield ranks
    except CrossbowError as error:
        error.after_joining = True
        raise
    finally:
        ranks.close()


class ProcessGroupRanks(Ranks):
    """A rank of several, described by the environment (RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK and so on)."""

    def __init__(self, settings: DistributedSettings, on_gpus: bool) -> None:
        super().__init__()
        self.rank, self.num_ranks = _number("RANK"), _number("WORLD_SIZE")
        self.local_rank, self.num_local = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", self.num_ranks)
        self.node, self.num_nodes = _number("GROUP_RANK"), _number("GROUP_WORLD_SIZE", 1)
        self._timeout_s = settings.timeout_s
        take_place(self.local_rank, self.num_local, on_gpu=on_gpus)
        self._keep_local()
        try:
            found = _launchers_store(tuple(os.environ[name] for name in LAUNCHED))
            self.token = agree_on_start(PrefixStore("crossbow", found), self.rank, self.num_ranks, _START_S)
            store = PrefixStore(f"crossbow/{self.token}", found)
            torch.distributed.init_process_group(
                "gloo", store=PrefixStore("decisions", store), rank=self.rank, world_size=self.num_ranks,
                timeout=timedelta(seconds=_START_S),
            )  # fmt: skip
            # A connection of its own, so that a call that blocks does not hold up other threads.
            own = store.clone()  # type: ignore[attr-defined]
            watch = RankWatch(own, self.rank, self.num_ranks, settings.timeout_s)
            watch.report()  # so that a rank that hangs before its first beat is found, too
        except Exception as error:
            raise RankLostError(f"not all {self.num_ranks} ranks have joined ({one_line(error)})") from error
        self.watch = watch
        # From the start of training on, the watch ends ranks that have waited for `timeout_s`.
        _set_pg_timeout(timedelta(seconds=max(_LOADING_S, self._timeout_s + _GRACE_S)))

    def _keep_local(self) -> None:
        """Use the loopback interface if all ranks are on one host, unless the user names another: no one can listen."""
        if sys.platform == "linux" and self.num_local == self.num_ranks:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")

    def collective(self, device: torch.device, apart: bool = False) -> Collective:
        world = self._new_group(device, list(range(self.num_ranks)))
        if not apart or self.num_nodes == 1:
            return ProcessGroupCollective(world, self.num_ranks, watch=self.watch)
        placed = [node for (node,) in self.gather([float(self.node)])]
        nodes = [[rank for rank, at in enumerate(placed) if at == node] for node in range(self.num_nodes)]
        groups = [(ranks, self._new_group(device, ranks)) for ranks in nodes]  # every rank makes every group
        own, group = next((ranks, group) for ranks, group in groups if self.rank in ranks)
        return ProcessGroupCollective(group, len(own), watch=self.watch, world=world, num_ranks=self.num_ranks)

    def _new_group(self, device: torch.device, ranks: list[int]) -> ProcessGroup:
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=self._timeout_s + _GRACE_S)
        try:
            with self.watch.waiting():
                group: ProcessGroup = torch.distributed.new_group(ranks, timeout=timeout, backend=backend)
        except Exception as error:
            raise RankLostError(f"not all of {len(ranks)} ranks have connected ({one_line(error)})") from error
        return group

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(list(values), dtype=torch.float64)
        return [each.tolist() for each in self._all_gather(own)]

    def gather_texts(self, text: str) -> list[str]:
        data = text.encode()
        lengths = [int(length) for (length,) in self.gather([float(len(data))])]
        if not any(lengths):
            return ["" for _ in lengths]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        every = self._all_gather(padded)
        return [bytes(each[:length].tolist()).decode() for each, length in zip(every, lengths, strict=True)]

    def add(self, values: Tensor) -> None:
        with self._waiting():
            torch.distributed.all_reduce(values)

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.num_ranks)]
        with self._waiting():
            torch.distributed.all_gather(found, own)
        return found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with self.watch.waiting():
                yield
        except RuntimeError as error:  # gloo's, torch.distributed's own included
            raise RankLostError from error

    def close(self) -> None:
        self.watch.close()
        with suppress(Exception):
            torch.distributed.destroy_process_group()


def take_place(index: int, number: int, *, on_gpu: bool) -> None:
    """Give this process its share of the host's cores as threads and, with `on_gpu`, a GPU as its current device.

    Args:
        index: the GPU, of those that the process sees.
        number: the processes that share the host.
        on_gpu: whether there are GPUs, and they are wanted.

    Raises UserError if the process sees fewer GPUs.
    """
    # torchrun sets one thread, unless the user set another number.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, read_host().cores // number))
    if not on_gpu:
        return
    prepare_environment()
    count = torch.cuda.device_count()
    if index >= count:
        found = f"there are {number} ranks on this host and {count} GPUs, and each rank needs its own"
        remedy = f"set --nproc-per-node={count}, as learners and packs share a GPU, or device=cpu"
        raise UserError(f"{found}; {remedy}.")
    torch.cuda.set_device(index)


@functools.cache
def _launchers_store(environment: tuple[str, ...]) -> Store:  # noqa: ARG001  which `rendezvous` reads itself
    """Return the store in which ranks find each other. Without torchrun the first rank holds it, for all its runs."""
    found: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=_START_S))))[0]
    return found


def agree_on_start(
    store: Store,
    rank: int,
    num_ranks: int,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return a name for this start of the ranks, the same on all and new for every start. Blocks until all have it.

    The store may hold entries of former starts, and torchrun's count of starts differs between hosts. So a rank says
    hello by a name it has just made, accepts only the answer to that, and confirms it under the start's name. The first
    rank answers all hellos, also those of processes that have ended, until all living ranks have confirmed.

    Raises:
        TimeoutError: ranks, which the message names, have not confirmed within `limit_s` seconds.
    """
    tries = _tries(limit_s, clock, sleep)
    if rank == 0:
        return _answer_all(store, set(range(1, num_ranks)), tries)
    own = _new_name()
    store.set(f"hello/{rank}", own)
    for _ in tries:
        if store.check([f"answer/{own}"]):
            name = store.get(f"answer/{own}").decode()
            store.set(f"{name}/taken/{rank}", own)
            return name
    raise TimeoutError("rank 0 did not answer")


def _answer_all(store: Store, awaited: set[int], tries: Iterator[None]) -> str:
    name = _new_name()
    for _ in tries:
        for rank in awaited:
            if store.check([f"hello/{rank}"]):
                store.set(f"answer/{store.get(f'hello/{rank}').decode()}", name)
        awaited = {rank for rank in awaited if not store.check([f"{name}/taken/{rank}"])}
        if not awaited:
            return name
    raise TimeoutError(f"nothing from rank {', '.join(map(str, sorted(awaited)))}")


def _tries(limit_s: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> Iterator[None]:
    end_s, (pause_s, longest_s) = clock() + limit_s, _PAUSES_S
    while clock() < end_s:
        yield
        sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _new_name() -> str:
    return uuid.uuid4().hex[:12]


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))
