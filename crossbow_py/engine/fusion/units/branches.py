"""Work side by side on streams that fork from the current one and join it again: branches of a graph in a capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MOST = 8  # streams; more branches share them in turn
_CALLS, _REPLAYS = 8, 3  # calls in a graph that is timed, and replays of it


class Branches:
    """At most `most` streams of a CUDA device, made at first use. On a CPU branches run one after another."""

    def __init__(self, device: torch.device, most: int = _MOST) -> None:
        self._device, self._most = device, most
        self._streams: list[torch.cuda.Stream] = []

    def run(self, bodies: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Run bodies and return their results in order. The current stream waits for all; the host does not."""
        if self._device.type != "cuda":
            return [body() for body in bodies]
        while len(self._streams) < min(self._most, len(bodies)):
            self._streams.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        home, results = torch.cuda.current_stream(self._device), []
        streams = self._streams[: len(bodies)]
        for stream in streams:
            stream.wait_stream(home)
        for index, body in enumerate(bodies):
            with torch.cuda.stream(streams[index % len(streams)]):
                results.append(body())
        # Results are freed after this, so that their branches' memory is not reused too early.
        for stream in streams:
            home.wait_stream(stream)
        return results


def graph_milliseconds(device: torch.device) -> Callable[[Callable[[], Tensor]], float]:
    """Return a function that times work as in a CUDA graph: the best of a few replays of a graph of a few calls.

    Outside a graph, the time of small operators is only how fast the host launches them.
    """

    def milliseconds(run: Callable[[], Tensor]) -> float:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # libraries choose algorithms and allocate workspaces at their first call on a stream
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer guard restores the current stream, which torch does not if ending a capture fails.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                for _ in range(_CALLS):
                    run()
            times = []
            for _ in range(_REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record(stream)
                with torch.cuda.stream(stream):
                    graph.replay()
                end.record(stream)
                end.synchronize()  # host–device synchronisation
                times.append(float(begin.elapsed_time(end)))
            return min(times) / _CALLS
        finally:
            graph.reset()

    return milliseconds
