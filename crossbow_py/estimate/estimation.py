"""The estimate for a configuration: memory counted or measured, and what follows for learners and workers."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crossbow_py.averaging import AveragingRule
from crossbow_py.core.errors import CrossbowError, UserError
from crossbow_py.core.host import Host, read_host
from crossbow_py.core.trees import Tree, leaves, map_tree
from crossbow_py.data.datasets import Data, as_pair, num_samples
from crossbow_py.data.resident.inputs import num_picks
from crossbow_py.data.sources.base import Declared
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.streaming.items import ItemData
from crossbow_py.data.streaming.streamed_data import Key, StreamedData
from crossbow_py.engine.device.memory import free_memory, is_out_of_memory
from crossbow_py.engine.executors import EXECUTORS, has_one_row
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.serial import SerialExecutor
from crossbow_py.engine.modules.precision import BF16, Precision, choose_device, choose_precision
from crossbow_py.engine.sizing.bound import free_bytes
from crossbow_py.engine.sizing.memory import ELSEWHERE, LARGEST_BATCH, MIB, ON_HOST, HeldBack, Job, LearnerModel, Sample
from crossbow_py.engine.sizing.probes import ModelSource, estimate_learner
from crossbow_py.engine.sizing.workers import Loading, Recommendation, recommend
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.estimate.batch_search import Measured, largest_measured
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.estimate.speed import fetch_seconds, step_seconds
from crossbow_py.estimate.units import parse_bytes
from crossbow_py.train.arguments import TrainArguments
from crossbow_py.train.build import RunBuilder
from crossbow_py.train.loop.learners import new_executor
from crossbow_py.train.run import DataSets
from crossbow_py.train.run_settings import RunSettings, choose
from crossbow_py.train.tuning.calibration import calibration_round

_ROUNDS = WARM_UP_ROUNDS + 3  # eager rounds, the one that is captured, and replays
_BATCHES_THERE = 4  # a learner: what a streaming feed keeps on the device

MakeModel = Callable[[], nn.Module]
Method = Literal["counted", "measured"]

_ON_DEVICE = HeldBack(256 * MIB, 0.01, "256 MiB and 1 % for what other processes may still take")
_TIMED_BATCH = 4
MOST_ADAPTERS = 10_000  # that are counted
_TARGET_BYTES = 8


@dataclass(frozen=True)
class DataFacts:
    """The facts of the data set.

    Bytes of a sample are those on the host, where it has the form `stored`; `fixed_bytes` lie on the device for good.
    `through_shared` is as of `Loading`.
    """

    sample: Sample
    stored: Sample
    num_classes: int
    num_train: int | None
    resident: bool
    sample_bytes: int
    fixed_bytes: int
    train: Data | None
    note: str | None
    through_shared: bool = True


@dataclass(frozen=True)
class Estimate:
    """The result of an estimate.

    Attributes:
        config: the configuration.
        method: whether memory was measured on the device or counted.
        precision: the precision of the run.
        num_learners: K of the recommendation: as configured, or the most that `auto` may take.
        in_turn: whether learners run one after another.
        memory_bytes, held_back: of the device, and what is left alone.
        model: the memory model of one learner.
        table: K → the largest batch size, by the model.
        fitting_learners: how many fit with the configured batch size, up to `max_learners`.
        fitting_adapters: likewise, of a model with `model.lora`, up to `MOST_ADAPTERS`; else None.
        measured: the search by real rounds, where the device was there.
        recommendation: None where not even one sample fits.
        loading: how samples get to the device.
        host: this machine.
        notes: sentences for the user.
        seconds: how long all of it took.
    """

    config: EstimateConfig
    method: Method
    precision: Precision
    num_learners: int
    in_turn: bool
    memory_bytes: int
    held_back: HeldBack
    model: LearnerModel
    table: dict[int, int]
    fitting_learners: int
    fitting_adapters: int | None
    measured: Measured | None
    recommendation: Recommendation | None
    loading: Loading
    host: Host
    notes: tuple[str, ...]
    seconds: float

    @property
    def limit_bytes(self) -> float:
        """The bytes that predictions must stay below."""
        return self.held_back.limit(self.memory_bytes)

    @property
    def at_once(self) -> int:
        """Learners that run at the same moment, of `num_learners`."""
        return 1 if self.in_turn else self.num_learners


def estimate(config: EstimateConfig) -> Estimate:
    """Answer what was asked. Raises UserError for what cannot be sized."""
    begun = time.monotonic()
    device = None if config.memory is not None else choose_device(config.device)
    on_gpu = config.device != "cpu" if device is None else device.type == "cuda"
    here = device or torch.device("cpu")
    precision = BF16 if on_gpu and config.precision == "auto" else choose_precision(config.precision, here)
    facts = _data_facts(config, precision)
    job = _job(config, precision, on_gpu)

    def make_model() -> nn.Module:
        module: nn.Module = config.model.make(facts.sample.input_shape, facts.num_classes)
        return module

    most = max(1, min(LARGEST_BATCH, facts.num_train or LARGEST_BATCH) // config.accumulate)
    staged = 0 if facts.resident else facts.sample_bytes + _TARGET_BYTES
    source: ModelSource = make_model
    if config.model.lora:  # PEFT moves adapters to their layers' device, which fake tensors do not bear
        with torch.device("meta"):
            source = make_model()
    model = estimate_learner(
        source, facts.sample, job, staged_sample_bytes=staged, fixed_bytes=facts.fixed_bytes, most=most
    )
    k = config.num_learners if isinstance(config.num_learners, int) else config.max_learners
    executor: str = config.executor
    memory = free_bytes(device) if device is not None else parse_bytes("memory", config.memory or 0)
    held_back = _held_back(config, device, on_gpu)
    limit, measured = held_back.limit(memory), None
    if device is not None and on_gpu and limit - facts.fixed_bytes >= 1:
        measured, executor = _measured(config, make_model, facts, model, k, int(limit), device, most)
    in_turn = executor == SerialExecutor.NAME
    if measured is not None and measured.bytes:  # the model's other answers, in the measure of what was confirmed
        predicted = model.predicted_bytes(measured.batch_size, k, 1 if in_turn else k)
        limit *= predicted / (measured.bytes + facts.fixed_bytes)
    largest = measured.batch_size if measured else model.largest_batch_size(limit, k, 1 if in_turn else k)
    host = read_host()
    is_timed = device is not None and not on_gpu and largest >= _TIMED_BATCH
    loading = _loading(config, facts, make_model, job, is_timed, at_once=1 if in_turn else min(k, host.cores))
    return Estimate(
        config=config,
        method="measured" if measured else "counted",
        precision=precision,
        num_learners=k,
        in_turn=in_turn,
        memory_bytes=memory,
        held_back=held_back,
        model=model,
        table=model.table(limit, max(k, config.max_learners), in_turn),
        fitting_learners=model.most_learners(limit, config.batch_size, max(k, config.max_learners), in_turn),
        fitting_adapters=model.most_learners(limit, config.batch_size, MOST_ADAPTERS, in_turn)
        if config.model.lora
        else None,
        measured=measured,
        recommendation=_recommended(config, largest, loading, host, facts.num_train) if largest else None,
        loading=loading,
        host=host,
        notes=(facts.note,) if facts.note else (),
        seconds=time.monotonic() - begun,
    )


def _recommended(
    config: EstimateConfig, largest: int, loading: Loading, host: Host, num_train: int | None
) -> Recommendation:
    """Return the recommendation for batches of a learner's step, which have as many samples as are accumulated."""
    n = config.accumulate
    held = replace(loading, sample_bytes=loading.sample_bytes * n)
    return recommend(largest, held, host, None if num_train is None else max(1, num_train // n))


def _job(config: EstimateConfig, precision: Precision, on_gpu: bool) -> Job:
    executor = EXECUTORS.get(config.executor)
    order, mean = executor.ORDER if executor is not None else None, config.averaging.gradient_mean
    return Job(
        nn.functional.cross_entropy, config.optimizer, config.averaging, precision, config.channels_last,
        order or ("blocks" if on_gpu else "rows"), config.accumulate,
        one_row=has_one_row(config.executor, config.optimizer, mean), has_own_rows=on_gpu,
    )  # fmt: skip


def _held_back(config: EstimateConfig, device: torch.device | None, on_gpu: bool) -> HeldBack:
    if config.held_back is not None:
        size = 0 if config.held_back in (0, "0") else parse_bytes("held_back", config.held_back)
        return HeldBack(size, 0.0, "as asked for by held_back")
    if not on_gpu:
        return ON_HOST
    return ELSEWHERE if device is None else _ON_DEVICE


def _data_facts(config: EstimateConfig, precision: Precision) -> DataFacts:
    """Return the facts as the data set declares them; data of the user's own is read."""
    declared = config.data.declared()
    if declared is not None:
        return _from_declared(config, declared, precision)
    source = config.data.load(progress=False)
    pair = as_pair(source.train)
    inputs, targets = _first(source.train) if pair is None else map_tree(lambda values: values[:1], pair)

    def as_taken(values: Tensor) -> Tensor:
        return values.to(precision.compute) if values.is_floating_point() or values.dtype == torch.uint8 else values

    count, size = num_samples(source.train), sum(values.nbytes for values in leaves(inputs))
    fixed = 0 if pair is None else (count + num_samples(source.test)) * (size + targets.nbytes)
    return DataFacts(
        Sample.of(map_tree(as_taken, inputs), targets), Sample.of(inputs, targets), source.num_classes or 0, count,
        pair is not None, size, fixed, source.train, note=None,
    )  # fmt: skip


def _first(data: Any) -> tuple[Tree, Tensor]:
    """Return the batch of the first sample. Raises UserError if it cannot be read."""
    streamed = data if isinstance(data, StreamedData) else ItemData(data)
    loaded = streamed.fetch([Key(0, 0)], seed=0, training=False, on_sample=lambda _: None)
    for bad in loaded.bad:
        raise UserError(f"{bad.name} cannot be read ({bad.reason}); {streamed.remedy}.")
    return loaded.inputs, loaded.targets


def _from_declared(config: EstimateConfig, declared: Declared, precision: Precision) -> DataFacts:
    channels, *extent = declared.input_shape
    size = torch.Size(declared.input_shape).numel()
    fixed = 0
    if declared.resident:
        padded = [side + 2 * config.data.crop_padding for side in extent]
        train, test = declared.num_train or 0, declared.num_test or 0
        picks = 2 * num_picks(config.data.augmentation) * 8  # two epochs' tables
        fixed = train * (torch.Size([channels, *padded]).numel() + 8 + picks) + test * (size + 8)
    return DataFacts(
        sample=Sample(declared.input_shape, precision.compute),
        stored=Sample(declared.input_shape, torch.uint8),
        num_classes=declared.num_classes,
        num_train=declared.num_train,
        resident=declared.resident,
        sample_bytes=size,
        fixed_bytes=fixed,
        train=None,
        note=declared.note,
        through_shared=not isinstance(config.data, ImageFolder),
    )


def _loading(
    config: EstimateConfig, facts: DataFacts, make_model: MakeModel, job: Job, is_timed: bool, at_once: int
) -> Loading:
    """Times are taken on this machine alone (`is_timed`), but for the speed of a device that the user knows.

    `at_once` is the number of learners that have a core each.
    """
    step_s = 1 / config.images_per_s if config.images_per_s else None
    if facts.resident:
        return Loading(facts.sample_bytes, resident=True)
    if step_s is None and is_timed:
        step_s = step_seconds(make_model, facts.sample, job, _TIMED_BATCH) / at_once
    train = facts.train
    if train is None and step_s is not None and facts.note is None and isinstance(config.data, ImageFolder):
        # Loading from a cache takes another time, and an estimate must not fill the cache.
        train = None if config.data.cache else replace(config.data).read(progress=False)[0]
    fetch_s = fetch_seconds(train) if train is not None and step_s is not None and as_pair(train) is None else None
    return Loading(facts.sample_bytes, fetch_s=fetch_s, step_s=step_s, through_shared=facts.through_shared)


def _measured(
    config: EstimateConfig, make_model: MakeModel, facts: DataFacts, model: LearnerModel, num_learners: int,
    limit_bytes: int, device: torch.device, most: int,
) -> tuple[Measured, str]:  # fmt: skip
    """Search by real rounds; and by which executor they ran.

    `auto` is `fused`, which takes the most; a model that it cannot run is measured by `serial`.
    """
    fixed = facts.fixed_bytes
    expected = model.largest_batch_size(limit_bytes, num_learners, num_learners)

    def search(executor: str) -> Measured:
        def measure(batch_size: int) -> int | None:
            settings = RunSettings.of(config, num_learners=num_learners, batch_size=batch_size, executor=executor)
            rule = config.averaging
            return reserved_bytes(make_model, facts.stored, facts.num_classes, settings, config.optimizer, rule)

        with within(limit_bytes - fixed, device):
            return largest_measured(measure, limit_bytes - fixed, first=max(1, expected // 3), most=most)

    if config.executor != "auto":
        return search(config.executor), config.executor
    try:
        return search(FusedExecutor.NAME), FusedExecutor.NAME
    except UserError:
        return search(SerialExecutor.NAME), SerialExecutor.NAME


def reserved_bytes(
    make_model: MakeModel, sample: Sample, num_classes: int, settings: RunSettings, optimizer: Optimizer,
    rule: AveragingRule,
) -> int | None:  # fmt: skip
    """Return the most that torch's allocator reserved in some rounds of a run; None if memory ran out.

    Bank, shadow rows, graphs and their pools, workspaces and fragmentation count; the context of CUDA does not, and of
    the data a few batches a learner. `sample` is one as the data set stores it, such as an image in bytes.

    Raises:
        CrossbowError: the rounds fail for another reason, such as an executor that cannot run the model.
    """
    device = choose(settings, None).device
    assert device.type == "cuda", "on other devices there is no allocator that counts what it reserves"
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _train(make_model, _made_up(sample, num_classes, settings), settings, optimizer, rule)
    except (CrossbowError, RuntimeError, MemoryError) as error:
        if any(is_out_of_memory(cause) for cause in _causes(error)):
            return None
        raise
    finally:
        taken = torch.cuda.max_memory_reserved(device)
        free_memory(device)
    return taken


@contextlib.contextmanager
def within(limit_bytes: int, device: torch.device) -> Iterator[None]:
    """Let torch's allocator take no more than that of a CUDA device, so that rounds beyond run out of memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _made_up(sample: Sample, num_classes: int, settings: RunSettings) -> DataSets:
    """Return made-up samples: zeros, and targets that go round the classes; no classes (0) are a regression."""
    count = _BATCHES_THERE * settings.samples_per_step * settings.first_learners
    inputs, targets = (map_tree(torch.zero_, own) for own in sample.batch(count, channels_last=False))
    if num_classes and targets.ndim == 1:
        targets = (torch.arange(count) % num_classes).to(targets.dtype)
    return DataSets((inputs, targets), num_classes=num_classes or None)


def _train(
    make_model: MakeModel, data: DataSets, settings: RunSettings, optimizer: Optimizer, rule: AveragingRule
) -> None:
    """Run some rounds. A function of its own, so that the run is gone, and its memory, when the caller frees it."""
    arguments = TrainArguments(
        model=make_model, train_data=data.train, num_classes=data.num_classes, optimizer=optimizer, averaging=rule,
        **vars(settings),
    )  # fmt: skip
    run = RunBuilder(arguments, choices=choose(settings, None), announce=_announce).build()
    executor = new_executor(run)
    try:
        for index in range(_ROUNDS):
            executor.submit(calibration_round(index, run.bank.num_learners, settings.samples_per_step, rule))
        executor.drain()
    finally:
        executor.close()
        run.close_feeds()


def _announce(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
