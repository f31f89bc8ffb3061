"""`executor=auto`: choosing, remembering, and candidates that cannot run."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py import Trainer
from crossbow_py.core.errors import CrossbowError, DeviceLostError, UserError
from crossbow_py.engine.device import graphs
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.trust.remember import UNKNOWN, RememberedAnswers, assumed
from crossbow_py.train.tuning import calibration
from crossbow_py.train.tuning.calibration import Candidate, Effort, Refusal, calibrate
from tests.caches import use_cache
from tests.trainers import Recorder, image_model, images, make_trainer

CPU = torch.device("cpu")


class FakeExecutor:
    """An executor whose rounds take a given time, on a simulated clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.closed = clock, seconds, False

    def submit(self, plan):
        self.clock.now += self.seconds

    def drain(self):
        pass

    def close(self):
        self.closed = True


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "foreign_share", lambda before, after: 0.0)
    return clock


@pytest.fixture
def gpu_generators(monkeypatch):
    """Generators of a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)


def candidate(name, learners, executor):
    return Candidate(name, learners, lambda: (executor, lambda index: index))


def failing(error, name="fused", learners=2):
    """A candidate that cannot run."""

    def fails():
        raise error

    return Candidate(name, learners, fails)


@pytest.mark.slow
def test_calibration_takes_the_executor_with_the_most_images_per_second(clock):
    slow, fast, faster = (FakeExecutor(clock, seconds) for seconds in (0.04, 0.02, 0.01))
    sides = [candidate("serial", 4, slow), candidate("threads", 2, fast), candidate("fused", 2, faster)]
    found = calibrate(sides, 10, CPU)
    # 4·10 / 0.04, 2·10 / 0.02 and 2·10 / 0.01
    rates = {("serial", 4): 1000.0, ("threads", 2): 1000.0, ("fused", 2): 2000.0}
    assert found.images_per_s == pytest.approx(rates)
    assert (found.executor, found.notes) == ("fused", ())
    assert slow.closed and fast.closed and faster.closed


def test_candidate_that_is_far_behind_is_measured_for_two_windows(clock):
    def windows(seconds):
        began = clock.now
        calibrate([candidate("threads", 1, FakeExecutor(clock, seconds))], 1, CPU, known={("serial", 1): 100.0})
        return round((clock.now - began - seconds) / 0.25)

    assert [windows(seconds) for seconds in (1 / 40, 1 / 60)] == [2, 3]  # 40 and 60 of 100 images/s


def test_one_stall_in_the_first_window_decides_nothing(clock):
    class Stalls(FakeExecutor):
        rounds = 0

        def submit(self, plan):
            self.rounds += 1
            clock.now += 0.41 if self.rounds == 4 else self.seconds

    sides = [candidate("serial", 1, FakeExecutor(clock, 0.02)), candidate("fused", 1, Stalls(clock, 0.01))]
    found = calibrate(sides, 1, CPU)
    assert found.executor == "fused"
    assert found.images_per_s["fused", 1] == pytest.approx(100.0)


def test_calibration_of_a_slow_candidate_is_cut_short(clock):
    calibrate([candidate("serial", 1, FakeExecutor(clock, 3.0))], 1, CPU)
    assert clock.now == 6.0  # a round to warm up and one to measure


def test_slow_candidate_is_as_fast_as_the_faster_of_two_rounds(clock):
    seconds = iter([2.0, 2.5, 1.5])

    class Uneven(FakeExecutor):
        def drain(self):
            clock.now += next(seconds)

    found = calibrate([candidate("serial", 3, Uneven(clock, 0.0))], 1, CPU)
    assert found.images_per_s == {("serial", 3): 2.0} and clock.now == 6.0  # 3 / 1.5


@pytest.mark.slow
def test_candidate_that_cannot_run_is_left_out_and_named(clock):
    unfit = CrossbowError("torch.export cannot capture it")
    sides = [failing(unfit, learners=k) for k in (2, 4)] + [candidate("serial", 2, FakeExecutor(clock, 0.1))]
    found = calibrate(sides, 1, CPU)
    assert found.executor == "serial"
    assert found.notes == ("Executor fused is not used: torch.export cannot capture it.",)


def test_calibration_leaves_out_what_would_take_too_long(clock):
    sides = [candidate("serial", 2, FakeExecutor(clock, 2.0)), candidate("fused", 4, FakeExecutor(clock, 4.0))]
    found = calibrate(sides, 1, CPU, Effort(8.0))
    # Serial took 6 of 8 seconds for 1 image/s; twice a round of 4 images would take 8 more.
    assert (found.executor, list(found.images_per_s), clock.now) == ("serial", [("serial", 2)], 6.0)
    assert found.notes == ("Executor fused is not used: measuring with 4 learners takes too long.",)


@pytest.mark.slow
def test_on_a_gpu_compiling_is_announced_and_takes_nothing_from_the_time_for_measuring(clock, monkeypatch):
    monkeypatch.setattr(calibration, "kept_generators", lambda device: contextlib.nullcontext())

    def compiled(name, learners, seconds):
        def build():
            clock.now += 60.0  # of compilers
            return FakeExecutor(clock, seconds), lambda index: index

        return Candidate(name, learners, build)

    def breaks():
        clock.now += 60.0
        raise CrossbowError("no")

    said = []
    sides = [compiled("serial", 2, 0.1), Candidate("streams", 2, breaks), compiled("fused", 2, 0.05)]
    found = calibrate(sides, 10, torch.device("cuda"), Effort(8.0), announce=said.append)
    assert list(found.images_per_s) == [("serial", 2), ("fused", 2)]  # within 8 seconds of measuring
    assert found.late == () and found.seconds > 180 > found.seconds - found.warm_up_s + 170
    assert said == [
        f"Compiling and measuring executor {name} with 2 ({number} of at most 3)."
        for number, name in enumerate(("serial", "streams", "fused"), start=1)
    ]


@pytest.mark.slow
def test_choice_made_after_a_failed_capture_in_the_process_is_not_lasting(clock, gpu_generators, monkeypatch):
    sides = [candidate(name, 2, FakeExecutor(clock, 0.1)) for name in ("serial", "fused")]
    monkeypatch.setattr(graphs, "_FAILED_CAPTURES", ["RuntimeError: by another model"])
    assert calibrate(sides, 1, CPU).is_lasting
    found = calibrate(sides, 1, torch.device("cuda"))
    assert not found.is_lasting and "remembered" not in found.sentence
    assert found.notes == (
        "CUDA graphs were not always used, because a capture failed in this process (RuntimeError: by another model): "
        "it is measured again the next time.",
    )


@pytest.mark.slow
def test_what_is_known_is_compared_and_not_measured_again(clock):
    sides = [candidate("serial", 1, FakeExecutor(clock, 1.0)), candidate("fused", 4, FakeExecutor(clock, 1.0))]
    left = Effort(20.0, total_samples=1000, spent_s=2.0).after(15.0)
    assert (left.budget_s, left.spent_s) == (5.0, 17.0)
    found = calibrate(sides, 1, CPU, Effort(9.0), {("serial", 1): 1.0})
    # Twice a round of 4 images would take 8 seconds at 1 image/s.
    assert found.images_per_s == pytest.approx({("serial", 1): 1.0, ("fused", 4): 4.0})
    found = calibrate(sides, 1, CPU, Effort(7.0), {("serial", 1): 1.0})
    assert (found.images_per_s, found.late) == ({("serial", 1): 1.0}, (("fused", 4),))


@pytest.mark.slow
def test_calibration_takes_no_more_than_a_tenth_of_the_time_of_what_is_to_be_trained(clock):
    quick = [candidate("fused", k, FakeExecutor(clock, 0.01 * k)) for k in (8, 4, 2)]
    serial = candidate("serial", 1, FakeExecutor(clock, 0.01))
    # 100 images/s, of 1000 images: a second, of which serial takes 0.62 and 0.26 went before; 2 · 8 images take 0.16.
    found = calibrate([serial, *quick], 1, CPU, Effort(20.0, total_samples=1000, spent_s=0.26))
    assert list(found.images_per_s) == [("serial", 1), ("fused", 4)]
    assert not found.is_lasting
    found = calibrate([serial, *quick], 1, CPU, Effort(20.0, total_samples=10_000))
    assert len(found.images_per_s) == 4 and found.is_lasting


def test_calibration_that_is_to_stop_measures_the_first_alone(clock):
    sides = [candidate(name, 1, FakeExecutor(clock, 0.01)) for name in ("serial", "threads")]
    found = calibrate(sides, 1, CPU, Effort(stopped=lambda: True))
    assert list(found.images_per_s) == [("serial", 1)] and not found.is_lasting


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_generators")
def test_calibration_beside_other_programs_is_said_and_does_not_last(clock, monkeypatch):
    monkeypatch.setattr(calibration, "foreign_share", lambda before, after: 0.45)
    sides = [candidate(name, 1, FakeExecutor(clock, 0.01)) for name in ("serial", "threads")]
    found = calibrate(sides, 1, CPU)
    assert not found.is_lasting and "remembered" not in found.sentence
    assert found.notes == ("Other programs took 45% of the cores meanwhile: it is measured again the next time.",)
    assert calibrate(sides, 1, CPU, Effort(is_alone=False)).is_lasting  # beside its own ranks
    assert calibrate(sides, 1, torch.device("cuda")).is_lasting  # where the cores are not what is measured
    monkeypatch.setattr(calibration, "foreign_share", lambda before, after: None)
    assert calibrate(sides, 1, CPU).is_lasting  # nobody knows


@pytest.mark.slow
def test_calibration_spares_more_learners_of_an_executor_that_is_far_behind(clock):
    fused = [FakeExecutor(clock, seconds) for seconds in (0.08, 0.02)]
    sides = [candidate("fused", k, executor) for k, executor in zip((4, 8), fused, strict=True)]
    found = calibrate([candidate("threads", 2, FakeExecutor(clock, 0.02)), *sides], 1, CPU)
    assert list(found.images_per_s) == [("threads", 2), ("fused", 4)]
    assert found.notes == ()


@pytest.mark.slow
def test_calibration_does_not_spare_an_executor_for_what_it_does_with_fewer_learners_than_cores(clock, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = [candidate("threads", k, FakeExecutor(clock, seconds)) for k, seconds in ((1, 0.1), (4, 0.1))]
    found = calibrate([candidate("serial", 1, FakeExecutor(clock, 0.04)), *threads], 1, CPU)
    # A learner a core leaves three of four idle at first.
    assert found.images_per_s == pytest.approx({("serial", 1): 25.0, ("threads", 1): 10.0, ("threads", 4): 40.0})
    assert found.executor == "threads"


@pytest.mark.slow
def test_calibration_in_which_more_learners_do_not_fit_keeps_what_was_measured(clock):
    sides = [candidate("fused", 4, FakeExecutor(clock, 0.01)), failing(MemoryError(), learners=8)]
    found = calibrate(sides, 1, CPU)
    assert (found.executor, found.notes) == ("fused", ())


@pytest.mark.slow
def test_fewer_learners_are_tried_where_more_of_them_did_not_fit(clock):
    executor, short = FakeExecutor(clock, 0.08), MemoryError("16 do not fit")
    sides = [failing(short, learners=16), candidate("fused", 8, executor), failing(short, learners=32)]
    found = calibrate([*sides, failing(short, "threads", 4), candidate("serial", 1, executor)], 1, CPU)
    assert list(found.images_per_s) == [("fused", 8), ("serial", 1)]
    assert found.refused == {key: Refusal("16 do not fit", is_passing=True) for key in (("fused", 16), ("threads", 4))}
    assert found.left_out() == {"threads": "16 do not fit"}
    assert found.left_out(fewest=8) == {}
    assert found.left_out(fewest=16) == {"fused": "16 do not fit"}
    assert not found.is_lasting  # threads may run the next time


@pytest.mark.slow
def test_executor_that_cannot_run_is_not_tried_with_fewer_learners(clock):
    sides = [failing(RuntimeError("no kernel"), learners=16), candidate("fused", 8, FakeExecutor(clock, 0.01))]
    found = calibrate([*sides, candidate("serial", 1, FakeExecutor(clock, 0.01))], 1, CPU)
    assert list(found.images_per_s) == [("serial", 1)]
    assert found.refused == {("fused", 16): Refusal("no kernel")}


@pytest.mark.slow
def test_an_error_without_words_is_named_by_its_kind(clock):
    found = calibrate([candidate("serial", 1, FakeExecutor(clock, 0.01)), failing(MemoryError())], 1, CPU)
    assert found.notes == ("Executor fused is not used: MemoryError.",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "measured"),
    [
        ({16: 0.16, 32: 0.2, 64: 0.25, 128: 0.5, 256: 0.5}, [16, 32, 64, 128]),  # 100, 160, 256, 256 images/s
        ({16: 0.16, 32: 0.31, 64: 0.1, 128: 0.1, 256: 0.1}, [16, 32]),  # 100, 103: it pays no more
        ({16: 0.16, 64: 0.1, 128: 0.1}, [16]),  # of one number of learners nothing follows
    ],
)
def test_still_more_learners_are_measured_only_while_they_gain(clock, seconds, measured):
    sides = [
        dataclasses.replace(candidate("fused", k, FakeExecutor(clock, each)), needs_gain=k > 32)
        for k, each in seconds.items()
    ]
    found = calibrate(sides, 1, CPU)
    assert [k for _, k in found.images_per_s] == measured
    assert found.late == () and found.notes == ()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A file of remembered choices for the test alone, in place of what `conftest` assumes."""
    use_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(calibration, "foreign_share", lambda before, after: 0.0)
    with assumed("executor", UNKNOWN):
        yield tmp_path / "crossbow_py" / "executors.json"


def test_memory_keeps_choices_and_survives_a_damaged_file(memory):
    RememberedAnswers("executor").remember("a", "threads")
    RememberedAnswers("executor").remember("b", "fused")
    assert [RememberedAnswers("executor").recall(key) for key in "abc"] == ["threads", "fused", None]
    memory.write_text("{damaged")
    assert RememberedAnswers("executor").recall("a") is None
    RememberedAnswers("executor").remember("a", "serial")
    assert RememberedAnswers("executor").recall("a") == "serial"


@pytest.mark.slow
def test_choice_that_cannot_be_written_is_not_called_remembered(memory, monkeypatch):
    monkeypatch.setattr(calibration, "_WINDOW_S", 0.01)
    memory.mkdir(parents=True)
    options = {"model": image_model, "train_data": images(96), "batch_size": 4, "num_learners": 2, "device": "cpu"}
    said = Trainer(**options).run.warnings
    assert any(warning.endswith("; not remembered, as the user's cache cannot be written.") for warning in said)


@pytest.mark.slow
def test_auto_executor_measures_once_and_remembers(memory, monkeypatch):
    calls = []

    def counting(candidates, batch_size, device, effort, announce):
        calls.append([(side.executor, side.num_learners) for side in candidates])
        return calibrate(candidates, batch_size, device, effort, announce=announce)

    monkeypatch.setattr("crossbow_py.train.tuning.executor_choice.calibrate", counting)
    monkeypatch.setattr(calibration, "_WINDOW_S", 0.01)
    options = {"model": image_model, "train_data": images(96), "batch_size": 4, "num_learners": 2, "device": "cpu"}
    first = Trainer(**options)
    assert calls == [[("serial", 2), ("threads", 2), ("fused", 2), ("fused_threads", 2)]]
    second = Trainer(**options)
    assert len(calls) == 1
    assert second.run.warnings[-1].startswith(
        f"Executor {second.run.choices.executor} was the fastest when measured earlier (remembered in "
    )
    assert first.run.choices.executor == second.run.choices.executor
    assert any("was the fastest here" in warning for warning in first.run.warnings)
    assert any(warning.endswith("; remembered for the next run.") for warning in first.run.warnings)
    assert first.choices.executor_choice_s > 0 == second.choices.executor_choice_s
    Trainer(**{**options, "batch_size": 8})
    assert len(calls) == 2
    elsewhere = memory.with_name("mine.json")
    Trainer(**options, executor_cache=elsewhere)
    assert len(calls) == 3
    assert elsewhere.is_file()


def test_measuring_leaves_no_trace_in_the_run(memory, monkeypatch):
    monkeypatch.setattr(calibration, "_WINDOW_S", 0.01)
    monkeypatch.setattr("crossbow_py.train.tuning.executor_choice.candidates", lambda device: ["threads"])
    options = {"model": image_model, "train_data": images(96), "batch_size": 4, "num_learners": 2, "device": "cpu"}
    measured, asked = Trainer(**options), Trainer(**options, executor="threads")
    results = [trainer.fit(max_rounds=6) for trainer in (measured, asked)]
    for ours, theirs in zip(*(result.model.state_dict().values() for result in results), strict=True):
        assert ours.equal(theirs)


@pytest.mark.slow
def test_measuring_is_announced_and_draws_from_no_generator_of_the_users(memory, monkeypatch):
    monkeypatch.setattr(calibration, "_WINDOW_S", 0.01)

    class Drawing(nn.Linear):
        def forward(self, inputs):
            noise = random.random() + np.random.rand() + torch.rand(())
            return super().forward(inputs) + noise

    drawn, told = [], Recorder()
    for _ in range(2):  # measured, then remembered
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        make_trainer(model=lambda: Drawing(4, 3), executor="auto", callbacks=[told])
        drawn.append((random.random(), np.random.rand(), torch.rand(())))
    assert drawn[0] == drawn[1]
    (said,) = told.of("message")
    assert said.startswith("Measuring which executor")


@pytest.mark.slow
def test_remembered_fused_is_measured_anew_when_the_model_cannot_be_fused_any_more(memory, monkeypatch):
    monkeypatch.setattr(calibration, "_WINDOW_S", 0.01)

    class Branches(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    with assumed("executor", "fused"):
        trainer = make_trainer(model=lambda: Branches(4, 3), executor="auto")
    assert trainer.run.choices.executor in ("serial", "threads")


def test_fused_for_a_model_that_cannot_be_exported_is_one_clear_sentence():
    class Branches(type(image_model())):
        def forward(self, inputs):
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    with pytest.raises(UserError, match=r"executor=fused cannot run this model: .*set executor=auto"):
        make_trainer(model=lambda: Branches(*image_model()), train_data=images(24), executor="fused")


@pytest.mark.usefixtures("gpu_generators")
def test_calibration_on_a_gpu_looks_past_the_rounds_that_compile_and_capture(clock, monkeypatch):
    class Compiles(FakeExecutor):
        rounds = 0

        def submit(self, plan):
            self.rounds += 1
            self.clock.now += 2.0 if self.rounds <= 3 else self.seconds

    monkeypatch.setattr(calibration, "free_memory", lambda device: None)
    found = calibrate([candidate("fused", 2, Compiles(clock, 0.01))], 10, torch.device("cuda"))
    assert found.images_per_s == pytest.approx({("fused", 2): 2000.0})


def test_executor_that_nothing_was_compared_with_is_not_called_the_fastest(clock):
    slow = FakeExecutor(clock, 9.0)
    found = calibrate([candidate("serial", 2, slow), candidate("fused", 4, slow)], 10, CPU)
    assert found.sentence.startswith("Executor serial is taken, the only one there was time to measure")
    assert len(found.notes) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_generators")
def test_device_that_is_lost_ends_calibration_and_is_no_refusal(clock):
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    sides = [candidate("streams", 2, FakeExecutor(clock, 0.1)), failing(lost)]
    with pytest.raises(DeviceLostError, match="illegal memory access") as caught:
        calibrate(sides, 1, torch.device("cuda"))
    assert caught.value.__cause__ is lost
    assert list(calibrate(sides, 1, CPU).refused) == [("fused", 2)]  # words of a model's own


@pytest.mark.slow
@pytest.mark.parametrize(("error", "expected"), [(MemoryError(), True), (RuntimeError("no kernel"), False)])
def test_refusals_say_whether_more_memory_might_have_helped(error, expected, clock):
    with pytest.raises(UserError, match="no executor can run this model: .*; no way") as caught:
        calibrate([failing(error), failing(RuntimeError("no way"), "serial")], 1, CPU)
    assert is_out_of_memory(caught.value) is expected
