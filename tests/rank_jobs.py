"""What ranks do in tests: functions of a module, as processes are started with them. They return plain values."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._C import _distributed_c10d

from crossbow_py import Trainer, UserError
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.data.sampler import epoch_order
from crossbow_py.distributed import watch
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.auto_tuner import AutoTuner
from crossbow_py.engine.bank.layout import checksum
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.telemetry.console import CONSOLE_LOG, ConsoleListener
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.train import build, run_settings
from crossbow_py.train import trainer as trainer_module
from crossbow_py.train.checkpoints.resume import choose_together
from crossbow_py.train.evaluation.current_models import final_states
from crossbow_py.train.evaluation.learning_measurement import LearningMeasurement
from crossbow_py.train.loop.planning import plan_round
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from tests import trainers
from tests.made_up_ranks import ManyGpus
from tests.ranks import Raised, on_ranks
from tests.state_metrics import MacroF1
from tests.trainers import Recorder, image_model, images, make_trainer

Values = npt.NDArray[np.float64]


@dataclass
class Ended:
    """Where a rank stands after a job; vectors are end to end, one row a learner of the rank."""

    z: Values
    z_prev: Values
    learners: list[Values]
    momenta: list[Values]
    checksum: int
    samples_seen: int
    rounds: int
    num_learners: int
    learning_rate: float
    num_reseeded: int
    status: str = ""
    reason: str = ""
    test_accuracy: float | None = None
    test_loss: float | None = None
    model: dict[str, Values] | None = None
    epochs: list[tuple[Any, ...]] | None = None
    messages: list[str] | None = None


def _flat(views: list[Tensor]) -> Values:
    return torch.cat([view.detach().flatten() for view in views]).numpy().copy()


def ended(trainer: Trainer, result: Any = None, recorder: Recorder | None = None) -> Ended:
    """What there is to compare."""
    run, bank = trainer.run, trainer.run.bank
    state, momentum = run.state, bank.state.get("momentum")
    found = Ended(
        z=_flat(bank.z.flat()),
        z_prev=_flat(bank.z_prev.flat()),
        learners=[_flat(bank.weights.flat(j)) for j in range(bank.num_learners)],
        momenta=[_flat(momentum.flat(j)) for j in range(bank.num_learners)] if momentum else [],
        checksum=checksum(bank.z.storage),
        samples_seen=state.samples_seen,
        rounds=state.round_index,
        num_learners=bank.num_learners,
        learning_rate=plan_round(
            run, state.round_index, state.samples_seen, run.schedule.factor(state.samples_seen, run.num_samples, None)
        ).learning_rates[0],
        num_reseeded=state.num_reseeded,
    )
    if result is not None:
        found.status, found.reason = result.status, result.stop_reason
        found.test_accuracy, found.test_loss = result.test_accuracy, state.last_loss
        found.model = {name: value.numpy().copy() for name, value in result.model.state_dict().items()}
    if recorder is not None:
        found.messages = recorder.of("message")
        found.epochs = [
            (each.epoch, each.samples_seen, each.train_loss, each.test_loss, each.test_accuracy, each.spread)
            for each in recorder.of("epoch")
        ]
    return found


def image_trainer(ranks: Ranks, **options: Any) -> Trainer:
    """Two learners a rank."""
    return trainers.image_trainer(**{"ranks": ranks, **options})


def train(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any], fp64: bool = False) -> Ended:
    """A whole run, of images."""
    if fp64:
        run_settings.choose_precision = lambda name, device: FP64
    recorder = Recorder()
    trainer = image_trainer(ranks, callbacks=[recorder], **options)
    return ended(trainer, trainer.fit(**stops), recorder)


class Recording(Recorder):
    """A listener that the first rank alone calls, and which may refuse to begin."""

    ONLY_FIRST_RANK = True

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses

    def on_start(self, info: Any) -> None:
        if self.refuses:
            raise UserError("the server does not answer; start it.")
        super().on_start(info)


def train_recorded(ranks: Ranks, refuses: bool) -> list[str]:
    """The hooks that a rank calls of a listener of the first one."""
    recording = Recording(refuses)
    image_trainer(ranks, callbacks=[recording], executor="serial").fit(max_rounds=1)
    return [name for name, _ in recording.calls if name not in ("message", "progress")]


def find_learning_rate(ranks: Ranks, options: dict[str, Any]) -> list[float]:
    """The losses of a range test of 30 rounds."""
    return image_trainer(ranks, **options).find_learning_rate(num_rounds=30, lowest=1e-3, highest=0.1).losses


def train_measured(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any]) -> tuple[Ended, list[dict[str, Any]]]:
    """A whole run of images in float64, and its statistics of learning of every epoch."""
    run_settings.choose_precision = lambda name, device: FP64
    recorder = Recorder()
    trainer = image_trainer(ranks, callbacks=[recorder], learning_statistics=True, **options)
    found = ended(trainer, trainer.fit(**stops), recorder)
    return found, [dataclasses.asdict(record.learning) for record in recorder.of("epoch")]


def measure_with_a_failure(
    ranks: Ranks, rank: int, where: str, error: Exception, options: dict[str, Any]
) -> tuple[Ended, dict[str, Any]]:
    """An epoch with statistics of learning, of which one rank fails in one."""

    def fail(*_: Any) -> None:
        raise error

    if ranks.rank == rank:
        setattr(LearningMeasurement, where, fail)
    recorder = Recorder()
    trainer = image_trainer(ranks, callbacks=[recorder], learning_statistics=True, **options)
    found = ended(trainer, trainer.fit(max_epochs=1), recorder)
    return found, dataclasses.asdict(recorder.of("epoch")[-1].learning)


def restore_and_train(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any]) -> tuple[Ended, Ended]:
    """(what a resumed run begins with, where it ends)."""
    trainer = image_trainer(ranks, **options)
    begun = ended(trainer)
    return begun, ended(trainer, trainer.fit(**stops))


def before_each_round(trainer: Trainer, call: Callable[[Trainer], None]) -> None:
    """Let the training loop call a function before round `trainer.state.round_index`, the earlier ones submitted."""
    feed = trainer.run.train_feed
    announce = feed.announce

    def called(starts: Sequence[int]) -> bool:
        call(trainer)
        return announce(starts)

    feed.announce = called  # type: ignore[method-assign]


def train_watched(
    ranks: Ranks, call: Callable[[Trainer], None], options: dict[str, Any], stops: dict[str, Any]
) -> Ended:
    """A run with a function before each round."""
    recorder = Recorder()
    trainer = image_trainer(ranks, callbacks=[recorder], **options)
    before_each_round(trainer, call)
    return ended(trainer, trainer.fit(**stops), recorder)


def z_of_every_round(ranks: Ranks, options: dict[str, Any], num_rounds: int) -> list[Values]:
    """z before each round and at the end, in float64; with `serial`, which has no round in flight."""
    run_settings.choose_precision = lambda name, device: FP64
    found: list[Values] = []
    trainer = make_trainer(ranks=ranks, **options)
    before_each_round(trainer, lambda trainer: found.append(_flat(trainer.run.bank.z.flat())))
    trainer.fit(max_rounds=num_rounds)
    return [*found, _flat(trainer.run.bank.z.flat())]


class Pictures:
    """Images by number, which are noted; one of them may be bad, and one of another shape."""

    def __init__(self, num_samples: int, bad: int | None = None, odd: int | None = None) -> None:
        self.images, self.targets = images(num_samples)
        self.bad, self.odd, self.asked = bad, odd, list[int]()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.bad:
            raise OSError("image file is truncated")
        self.asked.append(index)
        image = self.images[index]
        return image[:, :5] if index == self.odd else image, int(self.targets[index])


def images_with_a_nan(position: int) -> tuple[Tensor, Tensor]:
    """Floating images, of which the one at a position of the first epoch's stream (seed 0) is NaN."""
    inputs, targets = images(200)
    inputs = inputs / 255
    inputs[epoch_order(0, 0, 200)[position]] = float("nan")
    return inputs, targets


def samples_taken(ranks: Ranks, options: dict[str, Any], num_rounds: int) -> list[int]:
    """Which samples a rank has learned from, in order."""
    data = Pictures(50)
    trainer = image_trainer(ranks, train_data=data, test_data=None, augmentation=None, num_workers=0, **options)
    data.asked.clear()
    trainer.fit(max_rounds=num_rounds)
    return data.asked


def starts_taken(ranks: Ranks, options: dict[str, Any], num_rounds: int) -> list[int]:
    """At which positions of the stream a rank has taken batches."""
    trainer, starts = image_trainer(ranks, **options), list[int]()
    feed = trainer.run.train_feed
    make = feed.batch

    def batch(start: int) -> Any:
        starts.append(start)
        return make(start)

    feed.batch = batch  # type: ignore[method-assign]
    trainer.fit(max_rounds=num_rounds)
    return starts


def evaluate_twice(ranks: Ranks, options: dict[str, Any]) -> tuple[Any, Any]:
    """(over all ranks, by this rank alone): loss, accuracy, number of samples and metrics of one state."""
    metrics = {"largest": lambda outputs, targets: outputs.abs().mean(), "f1": MacroF1(3)}
    trainer = image_trainer(ranks, metrics=metrics, **options)
    parts = trainer.run
    parts.evaluator.batch_size = 4
    trainer.fit(max_rounds=5)
    (state,) = final_states(parts, ema=False)
    found = [parts.evaluator.evaluate(state, parts.test_feed, each) for each in (ranks, Ranks())]
    shared, alone = ((each.loss, each.accuracy, each.num_samples, *each.metrics.values()) for each in found)
    return shared, alone


def stopped_by_signal(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any], number: int, at: int) -> Ended:
    """A run in which rank 1 alone gets a signal before a round."""

    def send(trainer: Trainer) -> None:
        if ranks.rank == 1 and trainer.state.round_index == at:
            signal.raise_signal(number)

    return train_watched(ranks, send, options, {**stops, "handle_signals": True})


def train_in_two_calls(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any], later: dict[str, Any]) -> Ended:
    """`fit` called twice."""
    trainer = image_trainer(ranks, **options)
    trainer.fit(**stops)
    return ended(trainer, trainer.fit(**later))


def train_with_clocks_apart(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any]) -> Ended:
    """A run taken up again whose ranks have counted another time each."""
    trainer = image_trainer(ranks, **options)
    trainer.fit(max_rounds=2)
    trainer.run.state.elapsed_s += ranks.rank
    return ended(trainer, trainer.fit(**stops))


def tuned(trainer: Trainer, window_s: float = 1e-4) -> None:
    """Let the auto-tuner decide at every meeting, so that how fast the machine is decides nothing."""
    tuning = trainer.run.tuning
    assert tuning is not None
    limit = tuning.tuner.max_learners
    tuning = LearnerTuning(
        AutoTuner(objective="throughput", max_learners=limit, windows=1, warm_up_windows=0), window_s
    )
    trainers.change_run(trainer, tuning=tuning)


def tune(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any]) -> tuple[Ended, list[int]]:
    """A run with the auto-tuner, and how many learners it had in every round."""
    counts, recorder = list[int](), Recorder()
    trainer = image_trainer(ranks, num_learners="auto", max_learners=4, callbacks=[recorder], **options)
    before_each_round(trainer, lambda trainer: counts.append(trainer.run.bank.num_learners))
    tuned(trainer)
    return ended(trainer, trainer.fit(**stops), recorder), counts


def tune_out_of_memory(
    ranks: Ranks, where: str, error: Exception, options: dict[str, Any], stops: dict[str, Any]
) -> tuple[Ended, dict[str, Any]]:
    """As `tune`, with a rank 1 that cannot hold two learners: their rows, or a round of theirs."""
    trainer: Trainer | None = None

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        own = trainer.run.bank.num_learners if trainer else 1
        if ranks.rank == 1 and where == "round" and own >= 2:
            raise error
        return torch.nn.functional.cross_entropy(outputs, targets)

    recorder = Recorder()
    trainer = image_trainer(ranks, num_learners="auto", max_learners=4, loss=loss, callbacks=[recorder], **options)
    tuned(trainer)
    bank = trainer.run.bank
    allocate = bank._allocate

    def refuse(capacity: int) -> None:
        if capacity >= 2:
            raise error
        allocate(capacity)

    if ranks.rank == 1 and where == "allocation":
        bank._allocate = refuse  # type: ignore[method-assign]
    found = ended(trainer, trainer.fit(**stops), recorder)
    return found, trainer.run.tuning.to_plain()


def spoil_z(ranks: Ranks, options: dict[str, Any], stops: dict[str, Any], at: int, rank: int) -> Ended:
    """A run in which a bit of one rank's z changes before a round; with `serial` alone.

    It is one of the higher bits, as by SMA a difference of z halves in every round of two ranks.
    """

    def flip(trainer: Trainer) -> None:
        if ranks.rank == rank and trainer.state.round_index == at:
            trainer.run.bank.z.flat()[0].view(torch.int32)[3] ^= 1 << 18

    return train_watched(ranks, flip, options, stops)


def evaluate_in_fours(ranks: Ranks, options: dict[str, Any]) -> Ended:
    """An epoch, evaluated in batches of four: those of rank 1 are the second and the fourth."""
    trainer = image_trainer(ranks, **options)
    trainer.run.evaluator.batch_size = 4
    return ended(trainer, trainer.fit(max_epochs=1))


def broken_on_rank_1(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric of the user's, which does not fail when it is tried on two samples first."""
    if os.environ["RANK"] == "1" and len(targets) > 2:
        raise ValueError("no such class")
    return outputs.mean()


def check_agreement(ranks: Ranks, configs: list[dict[str, Any]], codes: list[str]) -> str:
    """What a rank is told that was started with another configuration or another source than the others."""
    from crossbow_py.distributed import rank_agreement  # noqa: PLC0415  of this process alone

    code = rank_agreement._code()
    rank_agreement._code = lambda: {**code, "source": codes[ranks.rank]}
    rank_agreement.check_ranks_agree(configs[ranks.rank], ranks)
    return "agree"


def end_in_a_round(ranks: Ranks, options: dict[str, Any], at: int, how: str, stderr: str) -> Ended:
    """A run in which rank 1 is ended, or stopped for ever, before a round."""
    with open(f"{stderr}.{ranks.rank}", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    Path(f"{stderr}.pid.{ranks.rank}").write_text(str(os.getpid()))

    def end(trainer: Trainer) -> None:
        if ranks.rank == 1 and trainer.state.round_index == at:
            if how == "exit":
                os._exit(9)
            time.sleep(1.0)  # for it to say where it is
            os.kill(os.getpid(), signal.SIGSTOP)

    return train_watched(ranks, end, options, {"max_rounds": 100_000})


BLOCKS = threading.Event()


def block_for_ever() -> None:
    """Wait for what never comes, as a user's model may."""
    threading.Event().wait()


class BlockingModel(torch.nn.Module):
    """As `image_model`, until `BLOCKS` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = image_model()

    def forward(self, inputs: Tensor) -> Tensor:
        if BLOCKS.is_set():
            block_for_ever()
        return self.layers(inputs)


def hang_in_the_model(ranks: Ranks, options: dict[str, Any], at: int, folder: Path, stderr: str) -> Ended:
    """A run whose model blocks on rank 1 from a round on."""
    with open(f"{stderr}.{ranks.rank}", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    Path(f"{stderr}.pid.{ranks.rank}").write_text(str(os.getpid()))

    def block(trainer: Trainer) -> None:
        if ranks.rank == 1 and trainer.state.round_index == at:
            BLOCKS.set()

    folder.mkdir(exist_ok=True)
    console = [ConsoleListener(folder / CONSOLE_LOG, io.StringIO())] if ranks.is_first else []
    trainer = image_trainer(ranks, model=BlockingModel, output_dir=folder, callbacks=console, **options)
    before_each_round(trainer, block)
    return ended(trainer, trainer.fit(max_rounds=100_000))


def be_late(ranks: Ranks, folder: Path) -> tuple[str, bool]:
    """A run of which rank 1 is late by 2.2 s, once, while a disk takes 2.5 s for stacks. Its status, and if it ends."""
    write = watch.write_stacks

    def write_late(path: Path, lines: Sequence[str]) -> None:
        time.sleep(2.5)
        write(path, lines)

    watch.write_stacks = write_late  # type: ignore[attr-defined]

    def wait(trainer: Trainer) -> None:
        if trainer.state.round_index == 5 and ranks.rank == 1:
            time.sleep(2.2)
        elif trainer.state.round_index == 20:
            time.sleep(2.0)  # on both, until the stacks are written

    folder.mkdir(exist_ok=True)
    trainer = image_trainer(ranks, output_dir=folder, executor="serial")
    before_each_round(trainer, wait)
    return trainer.fit(max_rounds=30).status, ranks.watch.is_ending


def hang_beside_a_device_that_does_not_answer(ranks: Ranks, folder: Path) -> None:
    """The first rank waits for the other, and torch's record of NCCL blocks with Python's lock kept, on both."""
    with open(folder / f"stderr.{ranks.rank}", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    _distributed_c10d._dump_nccl_trace = ctypes.PyDLL(None).pause  # type: ignore[attr-defined]
    ranks.watch.has_nccl, ranks.watch.folder = True, folder

    def record(_: Sequence[HangingRank], sentence: str) -> None:
        (folder / "recorded").write_text(sentence)

    ranks.watch.record = record
    ranks.watch.start()
    with ranks.watch.waiting() if ranks.is_first else contextlib.nullcontext():
        time.sleep(3600)


class SlowModel(torch.nn.Module):
    """As `image_model`, but rank 1 takes `SLOW_S` longer for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = image_model()

    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ["RANK"] == "1" and self.training:
            time.sleep(SLOW_S)
        return self.layers(inputs)


SLOW_S = 0.05


def paces(ranks: Ranks, options: dict[str, Any], num_rounds: int) -> Any:
    """The summary of a run with a slow rank, and its last progress and epoch, as of this rank."""
    recorder = Recorder()
    trainer = image_trainer(ranks, model=SlowModel, test_data=None, callbacks=[recorder], **options)
    summary = trainer.fit(max_rounds=num_rounds).summary
    return summary, recorder.of("progress")[-1], recorder.of("epoch")[-1]


def gpus_recorded(ranks: Ranks, folder: Path) -> list[Any]:
    """Two rounds and an epoch of ranks that each have a GPU of a made-up NVML, `GPU-<rank>`; the places of all."""
    nvml = ManyGpus(ranks.num_ranks)
    nvml.percents = [10.0 * rank for rank in range(ranks.num_ranks)]
    trainer_module.SystemMonitor = partial(SystemMonitor, nvml=nvml)
    build.device_uuids = lambda device: [f"GPU-{ranks.rank}"]
    trainer = image_trainer(ranks, output_dir=folder)
    trainer.fit(max_rounds=8)
    return trainer.run.places


def sums_of_collective(ranks: Ranks, apart: bool) -> tuple[int, bool, bool, list[float], list[float], int]:
    """(num_devices, apart, is_alone, a sum, a mean over nodes, num_sums) of rank + 1 and ten times that."""
    collective = ranks.collective(torch.device("cpu"), apart)
    values = torch.tensor([1.0, 10.0]) * (ranks.rank + 1)
    total = values.clone()
    collective.all_reduce_sum(total)
    mean = total.clone()
    if collective.apart:
        collective.mean_over_nodes(mean)
    with collective.awaiting():
        pass
    found = collective.num_devices, collective.apart, collective.is_alone
    return *found, total.tolist(), mean.tolist(), collective.num_sums


def model_of_this_process() -> torch.nn.Module:
    """As `image_model`, of weights that are no other process's: as of a generator that is not torch's."""
    module = image_model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(int(os.environ["RANK"]) + 1.0)
    return module


def choose_apart(ranks: Ranks) -> None:
    """Ranks whose processors make another of precision=auto."""
    settings = run_settings.RunSettings(device="cpu", precision=("fp32", "bf16")[ranks.rank])
    choose_together(settings, None, ranks)


def results(function: Any, num_ranks: int, *arguments: Any, **options: Any) -> list[Any]:
    """What all ranks return, none of which raises."""
    found = on_ranks(function, num_ranks, *arguments, **options)
    failed = [each for each in found if isinstance(each, Raised | int | type(None))]
    assert not failed, failed
    return found


def distance(one: Values, other: Values) -> float:
    """Relative norm; of zeros the norm."""
    return float(np.linalg.norm(one - other) / (np.linalg.norm(other) or 1.0))


def assert_alike(found: list[Ended]) -> None:
    """z to the bit, and all that is said about the run."""
    same = (
        "checksum", "samples_seen", "rounds", "num_learners", "status", "reason", "num_reseeded", "test_accuracy",
        "test_loss", "epochs",
    )  # fmt: skip
    first = found[0]
    for each in found[1:]:
        assert (each.z.tobytes(), each.z_prev.tobytes()) == (first.z.tobytes(), first.z_prev.tobytes())
        assert {name: getattr(each, name) for name in same} == {name: getattr(first, name) for name in same}
