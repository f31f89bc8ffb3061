"""A search over rank, rate and batch size of LoRA on text, by the commands that a user types; PEFT loads its adapters.

    python experiments/lora_search/run.py [--parts PART ...] [--seeds N] [--quick] [--json PATH]

README.md says what is trained and compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import Tensor, nn

from crossbow_py import load_models
from crossbow_py.core.intervals import estimate
from crossbow_py.data.datasets import as_pair
from crossbow_py.data.sources.text import Text
from crossbow_py.telemetry.records import read_summary
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
PARTS = ("search", "optimizers")
RANKS, BATCHES, CONTEXT = (1, 4, 16), (4, 16), 64
_MODEL = ["model.depth=2", "model.width=96"]  # of 0.26 million parameters
RATES = {"adapters": (0.0003, 0.001, 0.003, 0.01), "all": (0.0001, 0.0003, 0.001, 0.003)}
# α = 16 as by default, rank 8: by the rate of matrices, or of AdamW.
OPTIMIZERS = {"adamw": (0.001, 0.003, 0.01, 0.03), "muon": (0.003, 0.01, 0.03, 0.1)}
_TARGETS = "[attention.inputs, attention.out, mlp.0, mlp.2]"
_BYTES = 100_000  # of the language reference
_QUICK = {"train": ["+debug=fast"], "search": ["executor=serial"], "many": ["executor=serial"]}
_FEW_ROUNDS = 60  # of what is trained to be loaded alone


@dataclass
class Study:
    """The folder that commands are run in, and how far they go."""

    folder: Path
    seeds: int
    quick: bool
    commands: list[str] = field(default_factory=list)

    def run(self, command: str, *words: str) -> Path:
        """Run a command of the package; returns its folder. Raises RuntimeError with its last line if it fails."""
        out = self.folder / f"{command}{len(self.commands)}"
        words = (*words, *(_QUICK[command] if self.quick else ()))
        shown = [f"python -m crossbow_py.{command}", *map(shlex.quote, words), f"output_dir=runs/{out.name}"]
        self.commands.append(" ".join(shown).replace(f"{self.folder}/", "runs/"))
        print(self.commands[-1], file=sys.stderr)
        line = [sys.executable, "-m", f"crossbow_py.{command}", *words, f"output_dir={out}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        return out

    def epochs(self, number: float) -> str:
        return f"max_epochs={0.02 if self.quick else number}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--parts", choices=PARTS, nargs="+", default=[*PARTS], help="default: both")
    add("--seeds", type=count, default=3, help="of what is compared in the end (default %(default)s)")
    add("--quick", action="store_true", help="a few rounds of everything")
    return measure_and_write(parser, argv, measure, result_text, "lora_search")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        study = Study(Path(name), given.seeds, given.quick)
        prose = study.folder / "prose.txt"
        prose.write_bytes("\n\n".join(topics.values()).encode()[: _BYTES // 5 if given.quick else _BYTES])
        base = study.run(
            "train", "+experiment=gpt_tiny", *_MODEL, f"data.context={CONTEXT}", "num_learners=1", "batch_size=16",
            "optimizer.learning_rate=0.003", "optimizer.other_learning_rate=0.003", "evaluations_per_epoch=1",
            study.epochs(0.3),
        )  # fmt: skip
        task = [
            "model=gpt", *_MODEL, "data=text", f"data.file={prose}", f"data.context={CONTEXT}",
            "data.test_fraction=0.1", "optimizer=adamw", "schedule=cosine", f"init_from={base / 'model.safetensors'}",
        ]  # fmt: skip
        found: dict[str, Any] = {"quick": given.quick}
        if "search" in given.parts:
            found |= _searched(study, task, base, prose)
        if "optimizers" in given.parts:
            found["optimizers"] = [_optimizer(study, task, name, rates) for name, rates in OPTIMIZERS.items()]
        return {**found, "commands": study.commands}


def _searched(study: Study, task: Sequence[str], base: Path, prose: Path) -> dict[str, Any]:
    """Search adapters and, with as many epochs a point, all weights; train the best of each from several seeds."""
    lora = f"model.lora={{targets: {_TARGETS}}}"
    method = ["data.validation_fraction=0.1", "metric=loss", "sampler=grid", "method=successive_halving",
              "min_epochs=0.01" if study.quick else "min_epochs=0.33", study.epochs(3)]  # fmt: skip
    found: dict[str, Any] = {}
    folders = {}
    for kind, own in (("adapters", [lora, f"space.model.lora.rank={[*RANKS]}"]), ("all", [])):
        space = [f"space.optimizer.learning_rate={[*RATES[kind]]}", f"space.batch_size={[*BATCHES]}"]
        folders[kind] = study.run("search", *task, *method, *own, *space)
        record = json.loads((folders[kind] / "search.json").read_text())
        best = record["best"]["params"]
        again = [f"{key}={value}" for key, value in best.items()]
        found[kind] = {
            "trials": [{key: each[key] for key in ("params", "values", "state")} for each in record["trials"]],
            "best": best, "test_loss": record["best"]["test_loss"],
            "seeds": _by_seed(study, [*task, *([lora] if own else []), *again]),
        }  # fmt: skip
    found["loaded"] = _loaded(study, base, folders["adapters"], prose)
    return found


def _by_seed(study: Study, words: Sequence[str]) -> list[float]:
    """The test losses after 3 epochs, from seeds that draw adapters and the order of samples."""
    seeds = [*range(study.seeds)]
    folder = study.run("train", "-m", *words, "num_learners=1", f"seed={','.join(map(str, seeds))}", study.epochs(3))
    folders = [folder / f"seed={seed}" for seed in seeds] if study.seeds > 1 else [folder]
    return [read_summary(own)["test_loss"] for own in folders]


def _optimizer(study: Study, task: Sequence[str], name: str, rates: Sequence[float]) -> dict[str, Any]:
    """An optimizer's test losses by its rate, adapters of rank 8 in batches of 16, an epoch."""
    members = ", ".join(f"{{name: '{rate}', optimizer.learning_rate: {rate}}}" for rate in rates)
    words = [f"optimizer={name}" if word == "optimizer=adamw" else word for word in task]
    lora = f"model.lora={{rank: 8, targets: {_TARGETS}}}"
    folder = study.run(
        "many", *words, lora, "batch_size=16", f"members=[{members}]", f"seeds={study.seeds}", study.epochs(1)
    )
    rows = json.loads((folder / "results.json").read_text())["members"]
    losses = [[row["test_loss"] for row in rows if row["group"] == str(rate)] for rate in rates]
    return {
        "optimizer": name,
        "rates": [{"rate": rate, "losses": own} for rate, own in zip(rates, losses, strict=True)],
    }


def _loaded(study: Study, base: Path, search: Path, prose: Path) -> dict[str, Any]:
    """Save the best adapter, and one of each other rank, and load them with PEFT over the base alone."""
    import peft  # noqa: PLC0415  seconds

    best = json.loads((search / "search.json").read_text())["best"]["params"]
    test = as_pair(Text(file=str(prose), context=CONTEXT, test_fraction=0.1).load(progress=False).test)
    assert test is not None, "texts are tensors"
    (plain,) = load_models(base)
    runs = {f"rank {best['model.lora.rank']}, the best": search}
    for rank in (own for own in RANKS if own != best["model.lora.rank"]):
        rounds = 2 if study.quick else _FEW_ROUNDS
        words = [f"config={search / 'best'}", f"model.lora.rank={rank}", f"max_rounds={rounds}"]
        runs[f"rank {rank}, {rounds} rounds"] = study.run("train", *words)
    rows = []
    for name, run in runs.items():
        model: Any = load_models(run)[0]
        model.save_pretrained(study.folder / "adapter" / run.name)
        base_again: Any = copy.deepcopy(plain)
        by_peft = peft.PeftModel.from_pretrained(base_again, study.folder / "adapter" / run.name).eval()
        difference = float((_scores(model, test[0]) - _scores(by_peft, test[0])).abs().max())
        rows.append({"adapter": name, "difference": difference, "test_loss": _loss(by_peft, test)})
    return {"base": _loss(plain, test), "adapters": rows}


@torch.no_grad()
def _scores(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.cat([model(own) for own in torch.split(ids, 64)])


def _loss(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The loss a token, by PyTorch alone."""
    return float(nn.functional.cross_entropy(_scores(model, test[0]).flatten(0, 1), test[1].flatten()))


# --- tables -----------------------------------------------------------------------------------------------------------


def result_text(result: Result) -> str:
    parts = [search_text(result), optimizers_text(result)]
    return "\n\n".join(part for part in parts if part)


def search_text(result: Result) -> str:
    """What adapting came to, and whether PEFT agrees."""
    if "loaded" not in result:
        return ""
    rows = [["the base as it is", NONE, NONE, f"{result['loaded']['base']:.4f}", NONE, "1"]]
    for kind, what in (("adapters", "adapters"), ("all", "all weights")):
        own = result[kind]
        trials = len(own["trials"])
        best = ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {value:g}" for key, value in own["best"].items())
        rows.append([what, str(trials), best, f"{own['test_loss']:.4f}", str(estimate(own["seeds"])),
                     str(len(own["seeds"]))])  # fmt: skip
    head = ("", "trials", "best", "its test loss", "test loss of that setting by seeds", "n")
    loaded = [[each["adapter"], f"{each['test_loss']:.4f}", f"{each['difference']:.1e}"]
              for each in result["loaded"]["adapters"]]  # fmt: skip
    peft = markdown_table(("loaded by PEFT", "test loss", "furthest logit from crossbow_py's"), loaded)
    return f"{markdown_table(head, rows)}\n\n{peft}"


def optimizers_text(result: Result) -> str:
    """Test losses by rate of each optimizer."""
    if "optimizers" not in result:
        return ""
    rows = []
    for own in result["optimizers"]:
        cells = [f"{each['rate']:g}: {estimate(each['losses'])}" for each in own["rates"]]
        rows.append([own["optimizer"], *cells, str(len(own["rates"][0]["losses"]))])
    return markdown_table(("test loss by rate", *[""] * (len(rows[0]) - 2), "n"), rows)


TABLES = {"all": result_text, "search": search_text, "optimizers": optimizers_text}

if __name__ == "__main__":
    raise SystemExit(main())
