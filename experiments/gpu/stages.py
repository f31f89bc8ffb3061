"""The stages that run on a GPU: the commands of each, their limits, and what to do if one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.machine import ROOT

PACK_TESTS = ("test_packs.py", "test_ensemble.py")
EVERYTHING = {"CROSSBOW_GRAPHS": "1", "CROSSBOW_KERNELS": "update,loss,batches,layers,convolutions"}
_GRAPHS = {"CROSSBOW_GRAPHS": "1", "CROSSBOW_KERNELS": "none"}
_PLAIN = {"CROSSBOW_GRAPHS": "0", "CROSSBOW_KERNELS": "none"}
_SMOKE = (
    ("serial", {"serial": _PLAIN}),
    ("streams", {"plain": _PLAIN, "graphs": _GRAPHS}),
    ("fused", {"plain": _PLAIN, "graphs": _GRAPHS, "all": EVERYTHING}),
)
# The most wanted first: what cannot be built in time is left out.
_ROWS = (
    "serial:1:16:sma tuned:1:16:none tuned:1:128:none fused:1:16:sma fused:8:16:sma streams:1:16:sma streams:8:16:sma "
    "fused:8:16:none streams:8:16:none tuned:1:64:none fused:4:16:sma streams:4:16:sma tuned:1:256:none "
    "fused:16:16:sma streams:16:16:sma tuned:1:1024:none fused:64:16:sma fused:32:16:sma"
)
_MORE_ROWS = (
    "fused:8:16:sma tuned:1:128:none serial:8:16:sma streams:2:16:sma fused:2:16:sma fused:64:16:none fused:8:32:sma "
    "fused:8:64:sma tuned:1:512:none fused:8:16:sma:fp32 streams:8:16:sma:fp32 tuned:1:16:none:fp32 "
    "tuned:1:128:none:fp32"
)
_COMPILED_ROWS = "fused:8:16:sma tuned:1:16:none tuned:1:128:none compiled:1:128:none compiled:1:16:none"
_ONE = "num_learners=1 batch_size=64 optimizer.learning_rate=0.05 optimizer.other_learning_rate=0.17"  # as its recipe
_SMA = "optimizer=sgd optimizer.weight_decay=5e-4 optimizer.nesterov=true averaging=sma"
_LEARNING = {
    "k8": "executor=fused num_learners=8 batch_size=16",
    "single": f"executor=fused {_ONE}",  # one model in graphs, with all kernels
    "k4": "executor=fused",
    "sma_k8": f"executor=fused {_SMA} num_learners=8 batch_size=16",
    "sma_single": f"executor=fused {_SMA} num_learners=1 batch_size=64",
}
_KERNELS_WRONG = "the ladder's line names the kernel; leave its kind out: CROSSBOW_KERNELS=update,loss,batches"
_MEMCHECK = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "application-only")
_CHECKED = ("tests/gpu/test_kernels.py", "-k", "convolution_and_gradients and 1-sizes1")
_UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_LOG = "its log names the kernel and the line"
_SLOW = "put its other parts into the next call, with more --seconds"


@dataclass(frozen=True)
class Job:
    """A process: its command, its limit, variables of its environment, and whether it reads CIFAR-10."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    reads_data: bool = False


@dataclass(frozen=True)
class Stage:
    """Jobs that run side by side, and what to try if one of them fails."""

    jobs: tuple[Job, ...]
    then: str


@dataclass(frozen=True)
class Place:
    """Where stages run: the device, whether they are only tried, and the folders of jobs and of results."""

    device: str
    tiny: bool
    work: Path
    results: Path

    def result(self, experiment: str, name: str) -> str:
        return f"--json {self.results}/{experiment}/results/{name}_{self.device}.json"


def stages(at: Place, switches: Mapping[str, str]) -> dict[str, Stage]:
    """All stages by name; `switches` are the variables of those that measure."""
    check = f"-m crossbow_py.check device={at.device} archive={at.work}/check.tar.gz"
    found = {
        "env": Stage(
            (_python("env", f"experiments/gpu/facts.py --device={at.device}", 60),),
            "hand the machine back: its GPU is of no use",
        ),
        "check": Stage(
            (_python("check", check, 560, {"TMPDIR": str(at.work)}),),  # its logs are brought back if it is cut off
            "FAIL lines of its log, in logs.tar.gz, name the rungs; if it was cut off, check goes on from there in the "
            "next call",
        ),
        "tests": Stage(tuple(_tests(at, of_packs=False)), f"read its log; {_KERNELS_WRONG}"),
        "tests.packs": Stage(tuple(_tests(at, of_packs=True)), "read its log; leave packs out of the next calls"),
        "smoke": Stage(
            tuple(_smoke(at)),
            "serial: torch itself fails, or a wheel is missing. plain, not graphs: CROSSBOW_GRAPHS=0 in the next call. "
            f"graphs, not all: {_KERNELS_WRONG}",
        ),
    }
    return {**found, **_measuring(at, switches), **_learning(at, switches)}


def _python(
    name: str, words: str, limit_s: float, variables: Mapping[str, str] | None = None, reads_data: bool = False
) -> Job:
    return Job(name, (sys.executable, *words.split()), limit_s, variables or {}, reads_data)


def _tests(at: Place, of_packs: bool) -> Iterator[Job]:
    names = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    for name in ["test_estimate.py"] if at.tiny else [name for name in names if (name in PACK_TESTS) == of_packs]:
        yield Job(f"tests.{name[5:-3]}", _pytest(f"tests/gpu/{name}"), 300)


def _pytest(*words: str) -> tuple[str, ...]:
    options = "-p no:cacheprovider -m gpu -q -rfE --tb=short -o timeout=100"
    if Path(sys.prefix) != ROOT / ".venv":  # what libraries of other versions warn of is no failure
        options += " -o filterwarnings=default"
    return (sys.executable, "-m", "pytest", *options.split(), *words)


def _smoke(at: Place) -> Iterator[Job]:
    rounds, model = (4, "resnet20") if at.tiny else (50, "resnet32")
    for executor, kinds in _SMOKE:
        if at.device == "cpu" and executor == "streams":
            continue
        for kind, variables in kinds.items():
            name = f"smoke.{executor}" if kind == executor else f"smoke.{executor}.{kind}"
            words = (
                f"-m crossbow_py.train +experiment=resnet32 device={at.device} data=synthetic data.num_train=2048 "
                f"model={model} batch_size=16 num_learners=4 max_rounds={rounds} max_evaluation_batches=2 logger=[] "
                f"checkpoint_every_epochs=null executor={executor} output_dir={at.work}/{name}/run"
            )
            yield _python(name, words, 120, variables)


def _measuring(at: Place, switches: Mapping[str, str]) -> dict[str, Stage]:
    d, tiny = f"--device {at.device}", at.tiny
    rows = f"experiments/gpu/rows.py {d} --json"
    cells = {"rows": f"{_ROWS} --profile {at.work}/profile", "rows_more": _MORE_ROWS, "rows_compiled": _COMPILED_ROWS}
    cells["rows_compiled"] += " --build-s 40"
    how = "--build-s 150"
    if tiny:
        cells = dict.fromkeys(cells, f"serial:1:4:sma fused:2:4:sma tuned:1:4:none --profile {at.work}/profile")
        how = "--model lenet --seconds 0.05 --turns 2"
    of_learners, pack = "experiments/throughput", "experiments/model_batch/run.py"
    quick = "--quick" if tiny else "--seconds 0.3"
    told = {
        **{name: (f"{rows} {at.work}/{name}.json {how} --cells {own}", 300) for name, own in cells.items()},
        "update": (f"experiments/update_bandwidth/run.py {d} "
                   + ("--model lenet --num-learners 2 --seconds 0.2 " if tiny else "--seconds 5 ")
                   + at.result("update_bandwidth", "vgg16_k4"), 120),
        "memory": (f"experiments/memory/run.py {d} "
                   + ("--models mlp --num-learners 1 2 " if tiny else "--models resnet32 --num-learners 1 4 16 ")
                   + at.result("memory", "memory"), 150),
        "suite": (f"{of_learners}/suite.py {d} --minutes 4.5 {at.result('throughput', 'suite')}", 400),
        "sides": (f"{of_learners}/run.py {d} --precision bf16 --sides serial fused --num-learners 8 --seconds 0.5 "
                  f"--repetitions 5 {at.result('throughput', 'resnet32_b16')}", 200),
        "packs": (f"{pack} training {d} --batch-sizes 16 {quick} {at.result('model_batch', 'training')}", 150),
        "mlps": (f"{pack} mlp_training {d} --models mlp_256 --num-models 64 --batch-sizes 16 {quick} "
                 f"{at.result('model_batch', 'mlp_training')}", 150),
        "ensembles": (f"{pack} inference {d} --batch-sizes 16 {quick} {at.result('model_batch', 'inference')}", 150),
        "families": (f"{pack} families {d} --models resnet20 --num-models 8 --seconds 0.3 "
                     f"{at.result('model_batch', 'families')}", 150),
        "tables": ("experiments/tables", 60),
        "hyperband": (f"experiments/hyperband/run.py {d} --repetitions 1 {at.result('hyperband', 'lenet')}", 300),
    }  # fmt: skip
    found = {name: Stage((_python(name, words, limit, switches),), _SLOW) for name, (words, limit) in told.items()}
    found["rows"] = Stage(found["rows"].jobs, "what was measured is in the results; put sanitize into the next call")
    checked = Job("sanitize", (*_MEMCHECK, *_pytest(*_CHECKED)), 150, {**switches, **_UNCACHED})
    found["sanitize"] = Stage((checked,), _LOG)
    return found


def _learning(at: Place, switches: Mapping[str, str]) -> dict[str, Stage]:
    """Two at once would share the GPU, so each is a stage of its own."""
    limit = 60
    tiny = "max_rounds=3 max_evaluation_batches=1" if at.tiny else f"max_time_s={limit}"
    found = {}
    for short, settings in _LEARNING.items():
        name = f"learn.{short}"
        words = (
            f"-m crossbow_py.train +experiment=resnet32_short device={at.device} logger=[] evaluations_per_epoch=1 "
            f"checkpoint_every_epochs=null output_dir={at.work}/{name}/run {settings} {tiny}"
        )
        job = _python(name, words, limit + 40, switches, reads_data=True)
        found[name] = Stage((job,), "rows_more needs no data; it fills the time")
    return found
