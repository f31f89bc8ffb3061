"""The memory of simulated devices: torch's caching allocator in small, with every block overwritten that is reused.

Addresses are real ones, of memory that the process maps once and never returns. A block belongs to the stream it was
allocated on and goes back to that stream's list when it is freed: at once, or after every other stream that
`record_stream` named has passed. Who gets it next finds NaN in it, as floating point, and -1, as integers, written when
its stream gets there: under whoever still uses it on another stream. A graph that uses what was freed since its capture
is told of too.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from dataclasses import dataclass, field

from tests.simulated_cuda.scheduler import REUSE, Event, Work

_MOST = 1 << 36  # bytes of addresses a device has; only what is touched is real
_ROUND = 512
POISON = 0xFF  # NaN in every floating format


class Arena:
    """Addresses, handed out once."""

    def __init__(self):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, _MOST, flags=flags)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.end, self._next, self.starts = self.first + _MOST, self.first, []

    def take(self, size):
        at, self._next = self._next, self._next + size
        assert self._next <= self.end, "the simulated device has no addresses left"
        self.starts.append(at)
        return at

    def holds(self, at):
        return self.first <= at < self.end

    def block_of(self, at):
        """The start of what was handed out and holds an address."""
        return self.starts[bisect.bisect_right(self.starts, at) - 1]


@dataclass(eq=False)
class Block:
    """A piece of memory: of which stream and pool, and which other streams still use it."""

    at: int
    size: int
    pool: object
    stream: object
    asked: int = 0
    used_on: set = field(default_factory=set)
    waits_for: list = field(default_factory=list)


class Frees:
    """How often each block of an arena has been freed."""

    def __init__(self, arena):
        self._arena, self._counts = arena, {}

    def add(self, at):
        self._counts[at] = self._counts.get(at, 0) + 1

    def of_blocks_of(self, graph):
        """How often each block that a graph uses has been freed so far."""
        extents = [each for each in (*graph.reads, *graph.writes) if self._arena.holds(each[0])]
        return {at: self._counts.get(at, 0) for at in {self._arena.block_of(first) for first, _ in extents}}

    def since(self, held):
        """Whether any of the blocks was freed since `of_blocks_of`."""
        return any(self._counts.get(at, 0) != count for at, count in held.items())


@dataclass
class Statistics:
    """Bytes and blocks that tensors hold, and that the allocator has of the device; each with its peak."""

    allocated: int = 0
    reserved: int = 0
    blocks: int = 0
    segments: int = 0
    most_allocated: int = 0
    most_reserved: int = 0
    most_blocks: int = 0
    most_segments: int = 0
    num_retries: int = 0
    num_ooms: int = 0

    def move(self, allocated=0, reserved=0):
        self.allocated += allocated
        self.reserved += reserved
        self.blocks += (allocated > 0) - (allocated < 0)
        self.segments += (reserved > 0) - (reserved < 0)
        self.most_blocks = max(self.most_blocks, self.blocks)
        self.most_segments = max(self.most_segments, self.segments)
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def reset_peaks(self):
        self.most_allocated, self.most_reserved = self.allocated, self.reserved
        self.most_blocks, self.most_segments = self.blocks, self.segments


class OutOfMemoryError(Exception):
    """No memory is left, though everything cached was given back."""


class DeviceMemory:
    """The caching allocator of a device. Called under the scheduler's lock."""

    def __init__(self, device, scheduler, total_bytes):
        self.device, self.total_bytes, self.fraction = device, total_bytes, 1.0
        self._scheduler, self.arena = scheduler, Arena()
        self.blocks, self._free, self._limbo, self._returned = {}, {}, [], {}
        self._given = {}  # by pool and stream: blocks that came back to it since it last allocated
        self.frees, self.pool_of = Frees(self.arena), {}  # by where a block starts
        self.statistics = Statistics()
        self.pools = {}  # private pools by how many graphs and captures hold them
        self.underway = []  # pools of captures that have begun and, if one failed, never ended

    def allocate(self, num_bytes, stream):
        """Return the address of a block for work on `stream`."""
        size = -(-max(num_bytes, 1) // _ROUND) * _ROUND
        pool = stream.capture.pool if stream.capture is not None and stream.capture.pool in self.underway else None
        self._settle_limbo()
        for freed in self._given.pop((pool, stream), ()):  # torch divides and joins blocks: it may be any of them
            self._scheduler.reuse(stream, (freed.at, freed.at + freed.size))
        block = self._cached(size, pool, stream)
        if block is None:
            block = self._reserve(size, pool, stream)
        else:
            self._poison(block)
        block.asked = num_bytes
        self.blocks[block.at] = block
        self.statistics.move(allocated=block.size)
        return block.at

    def free(self, at):
        block = self.blocks.pop(at)
        self.statistics.move(allocated=-block.size)
        self.frees.add(at)
        if not block.used_on:
            self._give_to_its_stream(block)
            return
        block.waits_for = [self._now_on(stream) for stream in block.used_on if stream.capture is None]
        self._limbo.append(block)

    def _give_to_its_stream(self, block):
        self._free.setdefault((block.pool, block.stream), []).append(block)
        self._given.setdefault((block.pool, block.stream), []).append(block)

    def use_on(self, at, stream):
        """Keep a block, once it is freed, until `stream` has passed what it has to do by then."""
        block = self.block_at(at)
        if block is not None and block.stream is not stream:
            block.used_on.add(stream)

    def block_at(self, at):
        inside = (each for each in self.blocks.values() if each.at <= at < each.at + each.size)
        return self.blocks.get(at) or next(inside, None)

    def empty_cache(self):
        """Return free blocks to the device. As torch does, refuse for ever after a capture that failed."""
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED: a capture has not ended")
        self._settle_limbo(wait=True)
        self._scheduler.finish(self.device)  # cudaFree waits for the device
        self._given.clear()
        for (pool, _), blocks in self._free.items():
            if pool is not None and self.pools.get(pool):
                continue
            for block in blocks:
                self._returned.setdefault(block.size, []).append(block.at)
                self.statistics.move(reserved=-block.size)
            blocks.clear()

    def _now_on(self, stream):
        event = Event()
        self._scheduler.record(event, stream)
        return event

    def _settle_limbo(self, wait=False):
        if self.underway and not wait:
            return  # torch puts off events until no capture is under way
        for block in list(self._limbo):
            if wait:
                for event in block.waits_for:
                    self._scheduler.run_until(event)
            if all(event.done >= event.asked for event in block.waits_for):
                self._limbo.remove(block)
                block.used_on.clear()
                for event in block.waits_for:
                    self._scheduler.races.wait(block.stream, event.moment)
                self._give_to_its_stream(block)

    def _poison(self, block):
        """Overwrite a block that is reused, when its stream gets there."""
        at, size = block.at, block.size
        work = Work(REUSE, lambda: ctypes.memset(at, POISON, size), (), [(at, at + size)])
        if block.pool is None:
            self._scheduler.enqueue_outside(block.stream, work)
        else:
            self._scheduler.enqueue(block.stream, work)

    def held_by(self, graph, pool):
        """The blocks outside its pool that a graph uses, and how often each has been freed so far."""
        return {at: count for at, count in self.frees.of_blocks_of(graph).items() if self.pool_of[at] != pool}

    def _cached(self, size, pool, stream):
        free = self._free.get((pool, stream), [])
        fits = [block for block in free if size <= block.size <= 2 * size]
        if not fits:
            return None
        block = min(reversed(fits), key=lambda each: each.size)  # the one freed last of the smallest that fit
        free.remove(block)
        return block

    def _reserve(self, size, pool, stream):
        limit = int(self.fraction * self.total_bytes)
        if self.statistics.reserved + size > limit and not self.underway:
            self.statistics.num_retries += 1
            self.empty_cache()
        if self.statistics.reserved + size > limit:
            self.statistics.num_ooms += 1
            raise OutOfMemoryError
        returned = self._returned.get(size)
        at = returned.pop() if returned else self.arena.take(size)
        self.statistics.move(reserved=size)
        ctypes.memset(at, POISON, size)  # nobody has written it
        self.pool_of[at] = pool
        return Block(at, size, pool, stream)


class PinnedMemory:
    """Pinned memory of the host: a block is reused once the streams that copy from or to it have passed."""

    def __init__(self, scheduler):
        self._scheduler, self.arena = scheduler, Arena()
        self._used, self._free, self._limbo = {}, {}, []
        self.frees = Frees(self.arena)

    def allocate(self, num_bytes):
        size = 1 << max(9, (num_bytes - 1).bit_length())
        for block in list(self._limbo):
            if all(event.done >= event.asked for event in block.waits_for):
                self._limbo.remove(block)
                self._reuse(block)
        free = self._free.get(size)
        block = free.pop() if free else Block(self.arena.take(size), size, None, None)
        self._used[block.at] = block
        return block.at

    def free(self, at):
        block = self._used.pop(at)
        self.frees.add(at)
        if block.waits_for:
            self._limbo.append(block)
        else:
            self._reuse(block)

    def use_on(self, at, stream):
        block = self._used.get(at) or next((b for b in self._used.values() if b.at <= at < b.at + b.size), None)
        if block is None:
            return False
        event = Event()
        self._scheduler.record(event, stream)
        block.waits_for.append(event)
        return True

    def _reuse(self, block):
        block.waits_for = []
        self._scheduler.races.forget(block.at, block.at + block.size)
        ctypes.memset(block.at, POISON, block.size)
        self._free.setdefault(block.size, []).append(block)
