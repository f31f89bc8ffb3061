"""Finds accesses to the same memory that no stream, event or wait of the host orders, whatever order they ran in.

Every stream has a clock that counts its work, and knows how far it has waited for the others (vector clocks, as Lamport
and Mattern describe them). What the host enqueues after it has waited is ordered by that wait as well. An access races
with an earlier one of another stream if one of the two writes and the later stream has not waited for the earlier work.
Memory that was freed is written when its own stream next allocates, whatever it gets, so that what another still does
with it races. Within a graph, nodes are ordered by the graph alone.

What the host does with pinned memory is not seen. But what a device reads of it has to be unchanged when the host first
waits for that.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass

_MOST_KEPT = 100


def extent(tensor):
    """The addresses of a tensor's first byte and of the byte after its last one; None without any."""
    if tensor.numel() == 0:
        return None
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class Access:
    """An access of some addresses: when, by its stream's clock, and by what."""

    stream: object
    time: int
    name: str


class Races:
    """The accesses so far, by extent, within blocks of memory.

    `is_pinned` tells whether an address is in pinned memory; set by the memory.
    `found` has a sentence for every pair of kinds of work that raced.
    """

    def __init__(self):
        self._host = {}
        self._seen, self._time = {}, {}
        self._blocks = {}  # by block: {extent: last write}, {extent: {stream: last read}}
        self._watched = []  # (extent of pinned memory, access that reads it, checksum), until the host waits for it
        self.is_pinned = lambda at: False
        self.found = {}

    def take(self):
        """Return the sentences so far, and forget them."""
        found, self.found = list(self.found.values()), {}
        return found

    # ---- what orders work

    def moment(self, stream):
        """What a record on the stream stands for: this much of its work, and all that it has waited for."""
        return {**self._seen.get(stream, {}), stream: self._time.get(stream, 0)}

    def wait(self, stream, moment):
        _merge(self._seen.setdefault(stream, {}), moment)

    def host_waits(self, moment):
        _merge(self._host, moment)
        if self._watched:
            self._look(lambda _, access: self._is_over(access))

    # ---- what has to be ordered

    def enqueue(self, stream, name, reads, writes, block_of):
        """Note what work that is enqueued now reads and writes."""
        seen = self._seen.setdefault(stream, {})
        _merge(seen, self._host)
        self._time[stream] = time = self._time.get(stream, 0) + 1
        access = Access(stream, time, name)
        for each in writes:
            self._touch(each, access, seen, block_of, is_write=True)
        for each in reads:
            self._touch(each, access, seen, block_of, is_write=False)

    def _touch(self, extent, access, seen, block_of, *, is_write):
        block, pinned = block_of(extent[0]), self.is_pinned(extent[0])
        if pinned and is_write:
            self._look(lambda other, _: _overlap(other, extent))
        writes, reads = self._blocks.setdefault(block, ({}, {}))
        self._compare(writes.items(), extent, access, seen)
        if is_write:
            for other, by_stream in list(reads.items()):
                self._compare(((other, each) for each in by_stream.values()), extent, access, seen)
                if extent[0] <= other[0] and other[1] <= extent[1]:
                    del reads[other]  # whatever races with it later races with this write too
            for other in [each for each in writes if extent[0] <= each[0] and each[1] <= extent[1]]:
                del writes[other]
            writes[extent] = access
        else:
            reads.setdefault(extent, {})[access.stream] = access
            if pinned and not any(_overlap(other, extent) and not self._is_over(own) for other, own in writes.items()):
                self._watched.append((extent, access, _checksum(extent)))

    def _is_over(self, access):
        """Whether the host has waited for an access."""
        return access.time <= self._host.get(access.stream, 0)

    def _look(self, is_asked_for):
        """Compare pinned memory with what it was when work that reads it was enqueued, and watch it no longer."""
        left = []
        for extent, access, checksum in self._watched:
            if not is_asked_for(extent, access):
                left.append((extent, access, checksum))
            elif _checksum(extent) != checksum:
                self._say(
                    ("host", access.name),
                    f"a change of pinned memory by the host is not ordered after {access.name} on {access.stream}",
                )
        self._watched = left

    def _say(self, key, sentence):
        if len(self.found) < _MOST_KEPT:
            self.found.setdefault(key, sentence)

    def forget(self, block, end):
        """Forget what a block of memory was used for: all of it is over."""
        self._blocks.pop(block, None)
        self._look(lambda extent, _: _overlap(extent, (block, end)))

    def within_graph(self, nodes, block_of):
        """Note what nodes of a graph, in the order of their capture, do to the same memory though neither follows.

        Nodes that do nothing stand for what may be done with freed memory; later ones are not compared with them.
        """
        numbers = {node: number for number, node in enumerate(nodes)}
        ancestors, idle = [], 0  # sets of numbers, as bits
        unordered = []
        for number, node in enumerate(nodes):
            own = 0
            for each in node.after:
                own |= ancestors[numbers[each]] | 1 << numbers[each]
            ancestors.append(own)
            unordered.append(((1 << number) - 1) & ~own & ~idle)
            idle |= (node.work.run is None) << number
        if not any(unordered):
            return
        touched = {}  # by block: (number, extent, whether it is written, name)
        for number, (node, others) in enumerate(zip(nodes, unordered, strict=True)):
            work = node.work
            for extent, is_write in [*((each, False) for each in work.reads), *((each, True) for each in work.writes)]:
                earlier = touched.setdefault(block_of(extent[0]), [])
                for other, own, was_write, name in earlier if others else ():
                    if others >> other & 1 and (is_write or was_write) and _overlap(own, extent):
                        self._say(("graph", name, work.name), f"{work.name} is not ordered after {name} within a graph")
                earlier.append((number, extent, is_write, work.name))

    def _compare(self, earlier, extent, access, seen):
        for other, before in earlier:
            if before.stream is access.stream or not _overlap(extent, other):
                continue
            if seen.get(before.stream, 0) < before.time:
                self._say(
                    (before.name, access.name),
                    f"{access.name} on {access.stream} is not ordered after {before.name} on {before.stream}",
                )


def _overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


def _checksum(extent):
    return zlib.crc32((ctypes.c_char * (extent[1] - extent[0])).from_address(extent[0]))


def _merge(into, moment):
    for stream, time in moment.items():
        if into.get(stream, 0) < time:
            into[stream] = time
