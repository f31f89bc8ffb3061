"""Numbers from windows: interleaving, what is dropped, medians, and ratios paired by repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.gate import Ready, Window
from experiments.bench.sides.side import AUTO, EXECUTOR_SIDES, OPEN, SINGLE_SIDES, Side
from experiments.bench.windows import Windows, paired_ratios

CAPTURED_SIDES = "fused", "streams"


@dataclass
class Measurement:
    """A side and its windows."""

    side: Side
    ready: Ready
    windows: Windows[Window] = field(default_factory=Windows)


def to_row(measurement: Measurement, model: str, batch_size: int) -> dict[str, Any]:
    return {
        "model": model,
        "batch_size": batch_size,
        **asdict(measurement.side),
        **measurement.windows.figures(),
        "threads": measurement.ready.threads,
        "detail": measurement.ready.detail,
        "in_effect": sorted({", ".join(window.in_effect) or "operators" for window in measurement.windows.kept()}),
    }


def mixed(rows: Sequence[Mapping[str, Any]], captures: bool) -> list[str]:
    """Say which rows cannot be compared: those of one executor, model and precision that ran with different parts.

    How many convolutions are the kernel's is measured for each size, and may differ. With `captures`, on CUDA, rounds
    of `fused` and `streams` must all be graphs, or none of them.
    """
    parts: dict[str, set[str]] = {}
    for row in rows:
        for each in row.get("in_effect", ()):
            own = [part for part in each.split(", ") if not part.startswith("convolutions: ")]
            parts.setdefault(f"{row['side']} {row['precision']} of {row['model']}", set()).add(", ".join(own))
            if captures and row["side"] in CAPTURED_SIDES:
                words = "graphs" if "graphs" in own else "eager"
                parts.setdefault(f"rounds of {' and '.join(CAPTURED_SIDES)}", set()).add(words)
    return [
        f"Not comparable: {where} ran with {'; and with '.join(sorted(found))}. `python -m crossbow_py.check` says why."
        for where, found in parts.items() if len(found) > 1
    ]  # fmt: skip


def ratios(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the ratios that the comparison is for, each the median of the ratios within repetitions.

    Kinds: `throughput`, of a side to `default_loop` and to `tuned_single` of its precision; and `round_time`, of rounds
    with SMA to rounds of as many learners without averaging.
    """
    windows = {measurement.side: measurement.windows.rates() for measurement in measurements}
    entries = []
    for side, own in windows.items():
        bases = [base for base in windows if _is_base(base, side)]
        entries += [_ratio("throughput", side, base, paired_ratios(own, windows[base])) for base in bases]
        without = Side(side.side, side.num_learners, "none", side.precision)
        if side.averaging == "sma" and without in windows:
            # As many images a round on both sides, so the ratio of times is that of throughputs upside down.
            entries.append(_ratio("round_time", side, without, paired_ratios(windows[without], own)))
    return [entry for entry in entries if entry["n"]]


def _is_base(base: Side, side: Side) -> bool:
    if base.side == "default_loop":
        return side.side != "default_loop"
    return base.side == "tuned_single" and base.precision == side.precision and side.side not in SINGLE_SIDES


def _ratio(kind: str, side: Side, base: Side, values: Sequence[float]) -> dict[str, Any]:
    return {
        "kind": kind,
        **asdict(side),
        "to": asdict(base),
        "ratio": round(median(values), 4) if values else None,
        "minimum": round(min(values), 4) if values else None,
        "maximum": round(max(values), 4) if values else None,
        "n": len(values),
    }


def plan_sides(
    names: Sequence[str],
    num_learners: Sequence[int],
    precisions: Sequence[PrecisionName],
    *,
    serial_learners: Sequence[int],
) -> list[Side]:
    """Every side to measure. `default_loop` is float32 alone; an executor runs with and without averaging.

    `auto` runs with averaging, since how many independent models to train is not a question of speed.
    """
    sides = [Side("default_loop", 1, "none", "fp32")] if "default_loop" in names else []
    for precision in precisions:
        if "tuned_single" in names:
            sides.append(Side("tuned_single", 1, "none", precision))
        for name in EXECUTOR_SIDES:
            counts = serial_learners if name == "serial" else num_learners
            if name in names:
                sides += [Side(name, k, rule, precision) for k in counts for rule in ("sma", "none")]
        if AUTO in names:
            sides.append(Side(AUTO, OPEN, "sma", precision))
    return sides
