"""Windows of all sides in turns, on the same two processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from experiments.bench.machine import free_port
from experiments.bench.windows import spread
from experiments.ranks.sides import BUCKETS_MB, serve
from experiments.scaling.ranks import Measured, RankPair

DDP = tuple(f"ddp_{size}" for size in BUCKETS_MB)
SIDES = ("sma", "apart", "alone", *DDP)


class Pair(RankPair):
    """Two ranks as a launcher starts them; they meet at a port."""

    def _serve_function(self) -> Callable[[int, int, str, Connection], None]:
        return serve

    def _new_store(self) -> str:
        return str(free_port())


def measure_ranks(model: str, batch_size: int, num_rounds: int, repetitions: int) -> dict[str, Any]:
    """Images/s of every side and the ratios asked for, within repetitions, as plain values."""
    rates: dict[str, list[float | None]] = {side: [] for side in SIDES}
    with Pair() as pair:
        pair.ask("prepare", model=model, batch_size=batch_size, attempts=1, is_judged=False)
        for number in range(repetitions):
            for side in SIDES if number % 2 else SIDES[::-1]:
                answers = pair.ask("window", side=side, num_rounds=num_rounds)
                rates[side].append(None if answers is None else _rate(side, answers, batch_size))
        dropped = pair.dropped
    best = max(DDP, key=lambda side: _median(rates[side]))
    return {
        "model": model,
        "batch_size": batch_size,
        "rounds": num_rounds,
        "repetitions": repetitions,
        "dropped": dropped,
        "images_per_s": {side: spread([rate for rate in rates[side] if rate]) for side in SIDES},
        "images_per_s_windows": {side: [rate and round(rate, 2) for rate in rates[side]] for side in SIDES},
        "best_ddp": best,
        "sma_over_alone": _ratio(rates["sma"], rates["alone"]),
        "apart_over_alone": _ratio(rates["apart"], rates["alone"]),
        "exposed_share": _ratio(rates["sma"], rates["apart"], share=True),
        "sma_over_ddp": _ratio(rates["sma"], rates[best]),
    }


def _rate(side: str, answers: Sequence[Measured], batch_size: int) -> float:
    """Images/s of both ranks together; of the one that trains in `alone`."""
    trained = answers[:1] if side == "alone" else answers
    return sum(batch_size / answer.round_s for answer in trained)


def _median(rates: Sequence[float | None]) -> float:
    found = spread([rate for rate in rates if rate])
    return found["median"] if found else 0.0


def _ratio(
    own: Sequence[float | None], other: Sequence[float | None], share: bool = False
) -> dict[str, float] | None:
    """own/other within repetitions; as a share, how much of a round of `own` the `other` does without."""
    pairs = [a / b for a, b in zip(own, other, strict=True) if a and b]
    return spread([1 - ratio if share else ratio for ratio in pairs])
