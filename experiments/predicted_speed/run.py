"""Predicts images/s of ResNet-32 and VGG-16 on an H100 and an H200, on paper: nothing of it was measured.

    python experiments/predicted_speed/run.py [--json PATH]

README.md says how, and what would make it wrong. It takes minutes: every round is enqueued once, and every kernel is
compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.errors import UserError
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.predicted_speed.model import (
    BOTH,
    GPUS,
    LIMITS_OF_STREAMS,
    Assumptions,
    Gpu,
    Predictor,
    mixtures,
    programs_at_once,
)
from experiments.predicted_speed.report import result_text

KIND = "predicted speed"
MODELS, NUM_LEARNERS, BATCH_SIZE = ("resnet32", "vgg16"), (1, 2, 4, 8, 16), 16
# What is counted, and how products are multiplied, by the name of a precision.
PRECISIONS = {"bf16": ("bf16", "bf16"), "tf32": ("fp32", "tf32"), "fp32": ("fp32", "ieee")}
Counted = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    return measure_and_write(_parser(), argv, predict, result_text, "predicted_speed")


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """Count, compile and predict everything. Raises UserError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels cannot be compiled here; install Triton: pip install -e '.[dev]' on Linux.")
    capability = max({gpu.capability for gpu in GPUS})
    found: dict[str, list[dict[str, Any]]] = {"rows": [], "ratios": []}
    compiled, triton = dict[str, Any](), ""
    for model in options.models:
        for precision in options.precisions:
            sides = _sides(model, precision, options)
            forms = {key: form for each in sides["fused"].values() for key, form in each["cubins"].items()}
            missing = {key: form for key, form in forms.items() if key not in compiled}
            answer = _asked("cubins", str(capability), given=json.dumps(missing), interprets=False)
            triton, compiled = answer["triton"], {**compiled, **answer["kernels"]}
            for gpu in GPUS:
                cell = {"model": model, "precision": precision, "gpu": gpu.name}
                case = Case(gpu, PRECISIONS[precision][1], compiled, sides, options.batch_size)
                for k in options.num_learners:
                    found["rows"] += [
                        {**cell, "num_learners": k, "assumed": name, **case.cell(k, given)}
                        for name, given in BOTH.items()
                    ]
                    found["ratios"].append({**cell, "num_learners": k, **case.ratios(k, min(options.num_learners))})
    return {
        "kind": KIND, "batch_size": options.batch_size, "triton": triton, "gpus": [_plain(gpu) for gpu in GPUS],
        "assumptions": {name: asdict(given) for name, given in BOTH.items()}, **found, "kernels": _families(compiled),
    }  # fmt: skip


def _sides(model: str, precision: str, options: argparse.Namespace) -> dict[str, dict[int, Any]]:
    """What was counted of each side, by the number of learners."""
    form, arithmetic = PRECISIONS[precision]
    counts = partial(_counted, model=model, precision=form, batch_size=options.batch_size)
    learners = options.num_learners
    return {
        "fused": {k: _with_products(counts("fused", num_learners=k), arithmetic) for k in learners},
        "streams": _streams(counts, learners),
        "plain": {k: counts("plain", num_learners=k) for k in learners},
    }


def _plain(gpu: Gpu) -> dict[str, Any]:
    return {**asdict(gpu), "flops_per_s": dict(gpu.flops_per_s)}


@dataclass(frozen=True)
class Case:
    """Predictions for a model on a device, at a precision.

    Attributes:
        gpu, arithmetic, cubins: see `Predictor`.
        sides: what was counted, by side and number of learners.
        batch_size: images a learner takes.
    """

    gpu: Gpu
    arithmetic: str
    cubins: Mapping[str, Any]
    sides: Mapping[str, Mapping[int, Any]]
    batch_size: int

    def cell(self, num_learners: int, given: Assumptions) -> dict[str, Any]:
        """Return the predictions for all sides, as plain values."""
        predictor, images = self._predictor(given), num_learners * self.batch_size
        found = dict[str, Any]()
        for side in ("fused", "plain"):
            counted = self.sides[side][num_learners]
            sums, round_s = predictor.sums(counted["parts"]), predictor.one_stream_s(counted)
            found[side] = {
                "images_per_s": images / round_s, "round_s": round_s, "host_s": predictor.host_s(counted),
                "nodes_s": sums.nodes_s, "by_limit_s": sums.by_limit, "launches": sums.launches,
                "chain_launches": sums.launches, "bytes": sums.num_bytes, "flops": sums.flops,
            }  # fmt: skip
        nodes = [node for part in self.sides["fused"][num_learners]["parts"] for node in part["nodes"]]
        found["fused"]["launches_grouped"] = sum(node["count"] * (node["grouped"] or node["fewest"]) for node in nodes)
        few, more = self.sides["streams"][num_learners]
        bounds = predictor.streams(few, more, num_learners)
        binds = max(LIMITS_OF_STREAMS, key=lambda name: bounds[name])
        found["streams"] = {
            "images_per_s": images / bounds[binds], "round_s": bounds[binds], "binds": binds,
            "by_limit_s": {name: bounds[name] for name in LIMITS_OF_STREAMS}, "launches": bounds["launches"],
            "chain_launches": bounds["chain_launches"], "bytes": bounds["num_bytes"], "flops": bounds["flops"],
        }  # fmt: skip
        return found

    def ratios(self, num_learners: int, fewest: int) -> dict[str, list[float]]:
        """Return the smallest and the largest ratio of speeds over all mixtures of assumptions."""
        found: dict[str, list[float]] = {"fused ÷ its first": [], "fused ÷ plain": [], "streams ÷ plain": []}
        for given in mixtures():
            own, first = self._rounds_s(num_learners, given), self._rounds_s(fewest, given)
            found["fused ÷ its first"].append(num_learners / fewest * first["fused"] / own["fused"])
            found["fused ÷ plain"].append(own["plain"] / own["fused"])
            found["streams ÷ plain"].append(own["plain"] / own["streams"])
        return {name: [min(ratios), max(ratios)] for name, ratios in found.items()}

    def _rounds_s(self, num_learners: int, given: Assumptions) -> dict[str, float]:
        predictor, sides = self._predictor(given), self.sides
        found = {side: predictor.one_stream_s(sides[side][num_learners]) for side in ("fused", "plain")}
        few, more = sides["streams"][num_learners]
        bounds = predictor.streams(few, more, num_learners)
        return {**found, "streams": max(bounds[name] for name in LIMITS_OF_STREAMS)}

    def _predictor(self, given: Assumptions) -> Predictor:
        return Predictor(self.gpu, given, self.arithmetic, self.cubins)


def _families(compiled: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the extremes of what kernels need, by their name and, of those that multiply, by how they do."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for key, cubin in compiled.items():
        form = json.loads(key)
        how = form["constants"].get("PRECISION")
        how = "bf16" if how and form["arguments"]["inputs"] == "*bf16" else how
        by_name.setdefault(f"{form['kernel']} {how}" if how else form["kernel"], []).append(cubin)
    return [
        {
            "kernel": name, "variants": len(cubins), "products": sorted({each["product"] or "" for each in cubins}),
            "asynchronous": sum(each["asynchronous"] for each in cubins),
            **{key: [min(each[key] for each in cubins), max(each[key] for each in cubins)]
               for key in ("registers", "spilled_bytes", "shared_bytes")},
            "at_once": [min(fits), max(fits)],
        }
        for name, cubins in by_name.items()
        if (fits := [programs_at_once(each, GPUS[0]) for each in cubins])
    ]  # fmt: skip


def _streams(counts: Callable[..., Counted], num_learners: Sequence[int]) -> dict[int, tuple[Counted, Counted]]:
    """What was counted with one learner, and with two and three, from which that of more follows."""
    alone = counts("streams", num_learners=1) if 1 in num_learners else None
    several = [counts("streams", num_learners=k) for k in (2, 3)] if max(num_learners) > 1 else []
    return {k: (alone, alone) if k == 1 and alone else (several[0], several[1]) for k in num_learners}


def _with_products(counted: Counted, arithmetic: str) -> Counted:
    """Kernels that multiply float32 as asked for; those that were counted do as torch's default is."""
    if arithmetic == "bf16":
        return counted

    def changed(key: str) -> str:
        form = json.loads(key)
        if "PRECISION" in form["constants"]:
            form["constants"]["PRECISION"] = arithmetic
        return json.dumps(form, sort_keys=True)

    cubins = {}
    for key, form in counted["cubins"].items():
        constants = form["constants"]
        own = {**constants, "PRECISION": arithmetic} if "PRECISION" in constants else constants
        cubins[changed(key)] = {**form, "constants": own}
    parts = [
        {**part, "nodes": [{**node, "cubin": node["cubin"] and changed(node["cubin"])} for node in part["nodes"]]}
        for part in counted["parts"]
    ]
    return {**counted, "parts": parts, "cubins": cubins}


@cache
def _counted(side: str, *, model: str, num_learners: int, precision: str, batch_size: int) -> Counted:
    print(f"counting {side} {model} K={num_learners} {precision}", file=sys.stderr, flush=True)
    counted: Counted = _asked("counting", side, model, str(num_learners), precision, str(batch_size), interprets=True)
    return counted


def _asked(program: str, *arguments: str, interprets: bool, given: str = "") -> Any:
    """Run one of the two programs: Triton's interpreter and its compiler do not live in one process."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interprets)), "PYTHONPATH": _path()}
    command = [sys.executable, "-m", f"experiments.predicted_speed.{program}", *arguments]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def _path() -> str:
    return os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, written="write the prediction there, and draw it beside it")
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS, help=f"default {' '.join(MODELS)}")
    add("--num-learners", type=count, nargs="+", default=NUM_LEARNERS, help="K (default 1 2 4 8 16)")
    add("--batch-size", type=count, default=BATCH_SIZE, help="images a learner takes (default %(default)s)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS), help="default bf16 tf32 fp32")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
