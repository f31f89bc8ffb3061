"""Finds accesses to the same memory that no stream, event or wait of the host orders, whatever order they ran in.

Every stream has a clock that counts its work, and knows how far it has waited for the others (vector clocks, as Lamport
and Mattern describe them). What the host enqueues after it has waited is ordered by that wait as well. An access races
with an earlier one of another stream if one of the two writes and the later stream has not waited for the earlier work.
Memory that is freed is written by its own stream, so that what another still does with it races.
"""

from __future__ import annotations

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

    `found` has a sentence for every pair of kinds of work that raced.
    """

    def __init__(self):
        self._host = {}
        self._seen, self._time = {}, {}
        self._blocks = {}  # by block: {extent: last write}, {extent: {stream: last read}}
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
        block = block_of(extent[0])
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

    def _compare(self, earlier, extent, access, seen):
        for other, before in earlier:
            if before.stream is access.stream or extent[1] <= other[0] or other[1] <= extent[0]:
                continue
            if seen.get(before.stream, 0) < before.time and len(self.found) < _MOST_KEPT:
                key = before.name, access.name
                self.found.setdefault(
                    key, f"{access.name} on {access.stream} is not ordered after {before.name} on {before.stream}"
                )


def _merge(into, moment):
    for stream, time in moment.items():
        if into.get(stream, 0) < time:
            into[stream] = time
