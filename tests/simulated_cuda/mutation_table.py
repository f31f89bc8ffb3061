"""The mutations of the package, each a slip that an engineer could make, with the tests that have to fail."""

from __future__ import annotations

from dataclasses import dataclass

_ORDER, _ENSEMBLE, _EXECUTORS = (f"tests/gpu/test_{name}.py::test_" for name in ("order", "ensemble", "executors"))
_NAMES = ("fused", "streams")
_DEVICE = "crossbow_py/engine/device/"
_RUN = "crossbow_py/engine/executors/"
GRAPHS, TASKS = f"{_DEVICE}graphs.py", f"{_DEVICE}device_tasks.py"
DROPOUT = "crossbow_py/engine/modules/dropout.py"
ON_DEVICE, STREAMS, FUSED, SPANS = (f"{_RUN}{name}.py" for name in ("on_device", "streams", "fused", "spans"))
SCHEDULER, COLLECTIVE = "crossbow_py/engine/scheduler.py", "crossbow_py/distributed/collective.py"
STREAMED, RESIDENT = "crossbow_py/data/streaming/streaming_feed.py", "crossbow_py/data/resident/resident_feed.py"
PREDICTORS, PROGRAMS = "crossbow_py/predict/predictors.py", "crossbow_py/predict/programs.py"


# What a test's own assertion shows, where that is not wrong numbers.
SHOWN_BY = {
    "test_idle_device_has_passed_every_stream": "work that is not over",
    "test_streams_of_a_closed_executor_are_those_of_the_next": "the wrong stream",
    "test_graph_is_captured_on_the_stream_it_is_replayed_on_while_other_threads_go_on": "the wrong stream",
    "test_timed_work_follows_what_the_caller_has_enqueued_and_takes_one_stream": "the wrong stream",
    "test_streamed_batches_are_copied_on_a_stream_that_no_learner_gets": "the wrong stream",
    "test_streamed_batches_are_made_without_waiting_from_pinned_memory": "memory that is not pinned",
    "test_after_a_capture_that_failed_nothing_is_captured_and_the_callers_stream_is_as_before":
        "captures, or the current stream, after a failure",
    "test_backward_passes_stay_on_the_thread_that_launches": "the wrong thread",
    "test_closed_executor_keeps_no_memory_of_graphs": "memory that stays reserved",
    "test_model_that_draws_on_the_device_learns_without_graphs": "a capture of what draws",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A change of the package.

    Args:
        name: its name.
        file: the file, from the root of the repository.
        slip: what was changed, in words.
        old, new: the text, which is there once, and what replaces it.
        tests: ids of tests, of which one has to fail.
        order, seed: of the simulated device.
    """

    name: str
    file: str
    slip: str
    old: str
    new: str
    tests: tuple[str, ...]
    order: str = "latest"
    seed: int = 0


def _rounds(executor: str, rule: str = "sma", devices: int = 1) -> str:
    alone, together = "one_after_another", "that_sum_with_another_device"
    what = f"{alone}_equal_serial" if devices == 1 else f"{together}_equal_serial_and_capture_no_sum"
    return f"{_ORDER}rounds_{what}[{rule}-{executor}]"


def _both(name: str) -> tuple[str, ...]:
    return tuple(f"{_ORDER}{name}[{executor}]" for executor in _NAMES)


_MASKS = tuple(
    f"{_ORDER}masks_and_rates_of_every_round_reach_its_graph[{each}]" for each in ("third-fused", "every-streams")
)
_OWN_WORK = _both("rounds_after_the_callers_own_work_equal_serial")
_COUNTS = _both("step_counts_changed_by_the_caller_are_those_of_the_next_round")
_CLOSING = _both("closing_in_the_middle_leaves_the_step_counts_of_the_rounds_issued")
_GIVEN_BACK = _both("streams_of_a_closed_executor_are_those_of_the_next")
_NO_WAITING = _both("replayed_rounds_wait_for_nothing_but_the_round_before")
_FAILED = (f"{_ORDER}after_a_capture_that_failed_nothing_is_captured_and_the_callers_stream_is_as_before",)
_WAITED = (f"{_ORDER}graph_that_waits_midway_sees_what_another_stream_wrote_before_its_replay",)
_CAPTURED = (f"{_ORDER}graph_is_captured_on_the_stream_it_is_replayed_on_while_other_threads_go_on",)
_TIMED = (f"{_ORDER}timed_work_follows_what_the_caller_has_enqueued_and_takes_one_stream",)
_RANKS = ("tests/simulated_cuda/test_nccl.py::test_two_ranks_train_what_they_train_on_cpus[1-fused]",)
_STREAMED = (f"{_ORDER}streamed_batches_on_two_streams_are_those_of_a_cpu[0]",)
_RESIDENT = (f"{_ORDER}resident_batches_on_several_streams_over_many_epochs_are_those_of_a_cpu",)
_SEVERAL = tuple(
    f"{_ENSEMBLE}captured_ensemble_called_from_several_streams_gives_each_its_own_answer[{executor}]"
    for executor in _NAMES
)
_SHAPES = (f"{_ENSEMBLE}graphs_of_several_shapes_called_from_several_streams_give_each_its_own_answer",)
_TRACED = (f"{_EXECUTORS}trace_of_fused_rounds_has_a_span_a_round",)

MUTATIONS = [
    # ---- the interface to the device
    Mutation(
        "no wait", GRAPHS, "a stream does not wait for an event", "        stream.wait_event(event)\n", "",
        (_rounds("streams"),),
    ),
    Mutation(
        "record elsewhere", GRAPHS, "an event is recorded on the current stream",
        '"""Record the end of all work on the stream so far."""\n        event.record(stream)',
        '"""Record the end of all work on the stream so far."""\n        event.record()',
        (_rounds("streams"),),
    ),
    Mutation(
        "body elsewhere", GRAPHS, "a body runs on the caller's stream",
        "        with torch.cuda.stream(stream), _RecordFunctionFast(name):\n            body()",
        "        with _RecordFunctionFast(name):\n            body()", (_rounds("streams"),),
    ),
    Mutation(
        "replay elsewhere", GRAPHS, "a graph is replayed on the caller's stream",
        "        with torch.cuda.stream(stream):\n            graph.replay()",
        "        graph.replay()",
        (_rounds("streams"),),
    ),
    Mutation(
        "event not waited for", GRAPHS, "the host does not wait for the event of a round",
        "        event.synchronize()  # host–device synchronisation\n", "        pass\n", (_rounds("fused"),),
    ),
    Mutation(
        "one stream idle", GRAPHS, "`synchronize` waits for the current stream alone",
        "torch.cuda.synchronize(self._device)", "torch.cuda.current_stream(self._device).synchronize()",
        (f"{_ORDER}idle_device_has_passed_every_stream",),
    ),
    Mutation(
        "streams shared", GRAPHS, "a stream that was given back is handed out, and stays idle",
        "setdefault((self._device, high_priority), []).pop()", "setdefault((self._device, high_priority), [])[-1]",
        _GIVEN_BACK,
    ),
    Mutation(
        "priority forgotten", GRAPHS, "`give_back` takes every stream for one of low priority",
        "_IDLE[self._device, high_priority].append", "_IDLE.setdefault((self._device, False), []).append", _GIVEN_BACK,
    ),
    Mutation(
        "global capture", GRAPHS, "a capture forbids other threads what it forbids its own",
        'capture_error_mode="thread_local"', 'capture_error_mode="global"', _CAPTURED,
    ),
    Mutation(
        "capture elsewhere", GRAPHS, "graphs are captured on torch's stream for captures",
        "pool=pool, stream=stream, capture", "pool=pool, capture", _CAPTURED,
    ),
    Mutation(
        "failure forgotten", GRAPHS, "a capture that failed is not remembered",
        "_FAILED_CAPTURES.append(one_line(failure)[:160])", "pass", _FAILED,
    ),
    Mutation(
        "stream not restored", GRAPHS, "nothing restores the current stream after a capture that failed",
        "                torch.cuda.stream(stream),\n", "", _FAILED,
    ),
    Mutation(
        "pageable results", GRAPHS, "results go to memory that is not pinned",
        "dtype=torch.float64, pin_memory=True)", "dtype=torch.float64)", _NO_WAITING,
    ),
    Mutation(
        "device draws unseen", GRAPHS, "only the host's generators are watched for draws",
        "torch.get_rng_state(), self._device_random_state()", "(torch.get_rng_state(),)",
        (f"{_EXECUTORS}model_that_draws_on_the_device_learns_without_graphs",),
    ),
    Mutation(
        "timed too early", GRAPHS, "what is timed does not wait for the caller's stream",
        "        stream.wait_stream(torch.cuda.current_stream(device))\n", "", _TIMED,
    ),
    Mutation(
        "timing keeps a stream", GRAPHS, "the stream of a measurement is not given back",
        "        streams.give_back(stream)\n        return min", "        return min", _TIMED,
    ),
    # ---- rounds in flight
    Mutation(
        "callers event too early", ON_DEVICE, "streams wait for the caller's event as it was the last time",
        "            self.device.record(self._callers_event, self.device.callers_stream())\n", "", _OWN_WORK,
    ),
    Mutation(
        "one stream waits for the caller", ON_DEVICE, "only the first stream waits for the caller's work",
        "            for stream in self.streams.values():\n                self.device.wait",
        "            for stream in list(self.streams.values())[:1]:\n                self.device.wait", _OWN_WORK,
    ),
    Mutation(
        "one round in flight", ON_DEVICE, "the rounds in flight share their events and results",
        "ROUNDS_IN_FLIGHT = 2", "ROUNDS_IN_FLIGHT = 1", (_rounds("fused"), _rounds("streams")),
    ),
    Mutation(
        "host does not wait", ON_DEVICE, "results are read before the streams have passed",
        "            self._synchronize(slot.events[stream], task, index, stream)\n        if self._idle",
        "            del stream, task\n        if self._idle", (_rounds("fused"),),
    ),
    Mutation(
        "z read too early", ON_DEVICE, "the host does not wait for the last averaging",
        '            self._synchronize(event, "averaging", index, AVERAGING_STREAM)\n',
        "            del index, event\n", _OWN_WORK,
    ),
    Mutation(
        "settled without averaging", ON_DEVICE, "`settle` leaves out the averaging stream",
        "*([self._averaged[1]] if self._averaged else [])", "",
        _both("settled_rounds_are_over_and_the_caller_may_read_z"),
    ),
    Mutation(
        "correction reads z too early", ON_DEVICE, "no stream waits for averaging",
        "            self.device.wait(self.streams[stream], self._averaged[1])\n", "            pass\n",
        (_rounds("streams"),),
    ),
    Mutation(
        "graph reads z too early", GRAPHS, "a graph does not wait midway",
        "            self.device.wait(self.stream, self.event)\n", "            pass\n", (_rounds("streams"),),
    ),
    Mutation(
        "event not made", GRAPHS, "an event that graphs wait for is made at its first record, after the capture",
        "            event.record(self.callers_stream())\n", "            pass\n", _WAITED,
    ),
    Mutation(
        "close does not wait", ON_DEVICE, "`close` reads step counts without waiting",
        "            self.device.synchronize()  # host–device synchronisation\n", "", _CLOSING,
    ),
    Mutation(
        "graphs kept", ON_DEVICE, "`close` does not drop graphs",
        "                program.release()\n",
        "                pass\n",
        _both("closed_executor_keeps_no_memory_of_graphs"),
    ),
    Mutation(
        "streams kept", ON_DEVICE, "`close` does not give streams back",
        "            self.device.give_back(stream, high_priority=name == AVERAGING_STREAM)\n",
        "            del stream, name\n",
        _GIVEN_BACK,
    ),
    Mutation(
        "no warm-up", ON_DEVICE, "the first round is captured", "WARM_UP_ROUNDS = 2", "WARM_UP_ROUNDS = 0",
        (*_MASKS, f"{_EXECUTORS}model_that_draws_on_the_device_learns_without_graphs"),
    ),
    Mutation(
        "capture after a failure", ON_DEVICE, "programs are captured after a capture that failed",
        "(is_warm and failed_capture() is None)", "is_warm", _FAILED, "random",
    ),
    Mutation(
        "failure not asked for", ON_DEVICE, "new executors do not ask whether a capture has failed",
        "why_not(GRAPHS, tasks.bank.device) or failed_capture()", "why_not(GRAPHS, tasks.bank.device)", _FAILED,
    ),
    Mutation(
        "autograd's thread", ON_DEVICE, "backward passes run on autograd's thread",
        "        with torch.autograd.set_multithreading_enabled(False):\n", "        with contextlib.nullcontext():\n",
        (f"{_ORDER}backward_passes_stay_on_the_thread_that_launches",),
    ),
    Mutation(
        "one graph for all variants", ON_DEVICE, "the first variant's graph is replayed for the others",
        "        self.device.replay(self.graphs[variant], self.stream)",
        "        self.device.replay(next(iter(self.graphs.values())), self.stream)",
        (_rounds("fused", "period"),),
    ),
    # ---- learners on streams
    Mutation(
        "corrections after averaging forgotten", SCHEDULER, "corrections are not after the averaging before",
        "= (self._last_averaging,) if self._last_averaging and pulls else ()", "= ()", (_rounds("streams"),),
    ),
    Mutation(
        "averaging too early", SCHEDULER, "averaging is after the first correction alone",
        "AVERAGING_STREAM, tuple(corrections)", "AVERAGING_STREAM, tuple(corrections[:1])", (_rounds("streams"),),
    ),
    Mutation(
        "gradient mean too early", SCHEDULER, "the gradient mean is after the first learning task alone",
        "tuple(launch.task for launch in launches)", "tuple(launch.task for launch in launches[:1])",
        (_rounds("streams", "sgd"),),
    ),
    Mutation(
        "gradient mean not waited for", SCHEDULER, "corrections are not after the gradient mean",
        "            after = mean, *after\n", "", (_rounds("streams", "sgd"),),
    ),
    Mutation(
        "mark before the work", STREAMS, "the event after a stream's last task is recorded before it",
        "                if not (as_one and isinstance(launch.task, CorrectionTask)):  # run with learning\n"
        "                    self._launch(launch, outcome, slot.results, as_one)\n"
        "                if last[launch.stream] is launch:\n"
        "                    self._marks[launch.task] = rounds.mark(slot, launch.stream)\n",
        "                if last[launch.stream] is launch:\n"
        "                    self._marks[launch.task] = rounds.mark(slot, launch.stream)\n"
        "                if not (as_one and isinstance(launch.task, CorrectionTask)):  # run with learning\n"
        "                    self._launch(launch, outcome, slot.results, as_one)\n"
        "                if last[launch.stream] is launch:\n"
        "                    pass\n",
        (_rounds("streams"),),
    ),
    Mutation(
        "no mark of learning", STREAMS, "learning tasks have no event between them and the gradient mean",
        "                elif str(launch.task) in slot.events and not as_one:\n",
        "                elif False:\n",
        (_rounds("streams", "sgd"),),
    ),
    Mutation(
        "waits forgotten", STREAMS, "marks are dropped as soon as they are recorded",
        "            elif other in self._marks:  # else",
        "            elif other in {}:  # else",
        (_rounds("streams"),),
    ),
    Mutation(
        "sums captured by streams", STREAMS, "sums over devices are captured",
        "            self._averaging.captures = self._gradient_mean.captures = False\n", "            pass\n",
        (_rounds("streams", "sma", 2),),
    ),
    Mutation(
        "report before the correction", STREAMS, "results are copied before the correction writes them",
        "                    self._launch_program(self._correction[task.learner], partial(bodies.correct, "
        "averaging), averaging)\n"
        "                    self._report(task.learner, host)\n",
        "                    self._report(task.learner, host)\n"
        "                    self._launch_program(self._correction[task.learner], partial(bodies.correct, "
        "averaging), averaging)\n",
        (_rounds("streams"),),
    ),
    Mutation(
        "bank not the caller's", STREAMS, "after a drain the bank is taken for unchanged",
        "        self._rounds.bank_changed = True\n", "", (_OWN_WORK[1], _COUNTS[1]),
    ),
    # ---- fused rounds
    Mutation(
        "fused averaging not waited for", FUSED, "corrections do not wait for the sum of the round before",
        "                rounds.wait_for_average(ALL_LEARNERS)\n",
        "                pass\n",
        (_rounds("fused", "sma", 2),),
    ),
    Mutation(
        "fused averaging too early", FUSED, "averaging does not wait for corrections",
        "            rounds.device.wait(rounds.streams[AVERAGING_STREAM], corrected)\n", "            del corrected\n",
        (_rounds("fused", "sma", 2),),
    ),
    Mutation(
        "sums captured by fused", FUSED, "sums over devices are captured",
        "            self._averaging.captures = self._gradient_mean.captures = False\n", "            pass\n",
        (_rounds("fused", "sma", 2),),
    ),
    Mutation(
        "fused variant forgotten", FUSED, "rounds with and without averaging share a graph",
        "variant = (plan.averaging, plan.compares, shared) if", "variant = (None, plan.compares, shared) if",
        (_rounds("fused", "period"),),
    ),
    Mutation(
        "fused report too early", FUSED, "the event of a round is recorded before its results are copied",
        '        rounds.device.run("report", partial(bodies.report, slot.results), stream)\n'
        "        last = {ALL_LEARNERS: self._round.name}\n        corrected = rounds.mark(slot, ALL_LEARNERS)\n",
        "        last = {ALL_LEARNERS: self._round.name}\n        corrected = rounds.mark(slot, ALL_LEARNERS)\n"
        '        rounds.device.run("report", partial(bodies.report, slot.results), stream)\n',
        (_rounds("fused"),),
    ),
    # ---- what a graph reads
    Mutation(
        "one tape", DROPOUT, "passes that draw their own masks record them over those that graphs read",
        "records = not masks_ahead and not self._is_read", "records = not masks_ahead", _MASKS,
    ),
    Mutation(
        "masks not drawn", TASKS, "masks are not drawn again before a replay",
        "self._tapes[self.shares(plan)].draw()", "pass", _MASKS,
    ),
    Mutation(
        "batch not copied", TASKS, "a round's batch is kept instead of copied to where the graph reads",
        "            kept.copy_(given)\n", "            pass\n        self._batch = batch\n",
        ("tests/gpu/test_order.py::test_runs_on_mixed_batches_end_as_those_of_a_cpu[streams]",),
    ),
    Mutation(
        "picks not static", TASKS, "every round has picks of its own, and not those that the graph reads",
        "        if len(starts) not in self._picked:", "        if starts:", (_rounds("fused"),),
    ),
    Mutation(
        "rates not loaded", TASKS, "rates are loaded once", "        if rates != self._loaded_rates:\n",
        "        if not self._loaded_rates:\n", _MASKS,
    ),
    Mutation(
        "counts not loaded", TASKS, "step counts that the caller changed are not loaded", "        if bank_changed:\n",
        "        if False:\n", _COUNTS,
    ),
    Mutation(
        "report blocks", TASKS, "the host waits for every copy of results",
        "own.copy_(self._results[: len(self.learners)], non_blocking=True)",
        "own.copy_(self._results[: len(self.learners)])",
        _NO_WAITING,
    ),
    Mutation(
        "value from the host",
        "crossbow_py/engine/update/device_update.py",
        "a constant is made while a graph is captured",
        "limit / (norms + 1e-6), self._one))",
        "limit / (norms + 1e-6), torch.tensor(1.0, dtype=norms.dtype).to(norms.device)))", _MASKS,
    ),
    Mutation(
        "pack keeps its graphs",
        "crossbow_py/packs/pack.py",
        "other trials in a pack run by the graphs of those before",
        'if engine.executor is not None and self.job.choices.device.type == "cuda":',
        "if engine.executor is None and False:",
        tuple(
            "tests/gpu/test_packs.py::test_trial_that_joins_a_pack_in_graphs_takes_the_row_of_one_that_leaves_unfinished"
            f"[{each}]"
            for each in _NAMES
        ),
    ),
    # ---- feeds
    Mutation(
        "copy not waited for", STREAMED, "batches are used before they are copied",
        "            stream.wait_event(one.copied)\n", "", _STREAMED,
    ),
    Mutation(
        "batch freed too early", STREAMED, "the allocator is not told who uses a batch",
        "                tensor.record_stream(stream)  # the buffer may drop it while this stream still reads it\n",
        "                pass\n", _STREAMED,
    ),
    Mutation(
        "flips freed too early", STREAMED, "the allocator is not told who uses flips and rectangles",
        "for tensor in leaves((one.batch, one.draws)):", "for tensor in leaves(one.batch):",
        _STREAMED,
    ),
    Mutation(
        "copies elsewhere", STREAMED, "copies are enqueued on the producer's current stream",
        "        with torch.cuda.stream(self._copies):\n", "        if True:\n", _STREAMED,
    ),
    Mutation(
        "copied too early", STREAMED, "the event of the copies is recorded before the last of them",
        "            draws = None if draws is None else self._enqueue_copy(draws.pin_memory())\n"
        "            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]\n"
        "            copied.record(self._copies)\n",
        "            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]\n"
        "            copied.record(self._copies)\n"
        "            draws = None if draws is None else self._enqueue_copy(draws.pin_memory())\n",
        (f"{_ORDER}streamed_masks_are_flipped_before_they_are_used",),
    ),
    Mutation(
        "copies block", STREAMED, "the producer waits for every copy",
        "return values.to(self._device, non_blocking=True)",
        "return values.to(self._device)",
        (f"{_ORDER}streamed_batches_are_made_without_waiting_from_pinned_memory",),
    ),
    Mutation(
        "batches not pinned", STREAMED, "batches are loaded into memory that is not pinned",
        "pins, largest = self._copies is not None,", "pins, largest = False,",
        (f"{_ORDER}streamed_batches_are_made_without_waiting_from_pinned_memory",),
    ),
    Mutation(
        "copy stream of learners", STREAMED, "the copy stream is one of those that learners get",
        "return torch.cuda.Stream(device, priority=-1)", "return torch.cuda.Stream(device)",
        (f"{_ORDER}streamed_batches_are_copied_on_a_stream_that_no_learner_gets",),
    ),
    Mutation(
        "rectangles unordered", "crossbow_py/data/erasing.py", "constants are made on the stream that comes first",
        "torch.arange(width).repeat_interleave(channels).to(device)",
        "torch.arange(width, device=device).repeat_interleave(channels)", _STREAMED,
    ),
    Mutation(
        "table freed too early", RESIDENT, "the allocator is not told who uses an epoch's table",
        "                table.record_stream(torch.cuda.current_stream())\n", "                del table\n", _RESIDENT,
    ),
    Mutation(
        "table unordered", RESIDENT, "an epoch's table is copied without blocking",
        "torch.from_numpy(picks).to(self._targets.device)",
        "torch.from_numpy(picks).pin_memory().to(self._targets.device, non_blocking=True)", _RESIDENT,
    ),
    # ---- NCCL
    Mutation(
        "sum not waited for", COLLECTIVE, "no stream waits for NCCL's sum",
        "torch.distributed.all_reduce(values, group=group)",
        "torch.distributed.all_reduce(values, group=group, async_op=True)", _RANKS,
    ),
    Mutation(
        "sum on a stream of its own", COLLECTIVE, "NCCL's sum follows the work of a stream that has none",
        "                torch.distributed.all_reduce(values, group=group)\n",
        "                with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                    torch.distributed.all_reduce(values, group=group)\n", _RANKS,
    ),
    # ---- prediction
    Mutation(
        "branches begin too early", PREDICTORS, "branches do not wait for the stream they fork from",
        "            stream.wait_stream(home)\n", "            pass\n", _SEVERAL,
    ),
    Mutation(
        "branches not joined", PREDICTORS, "the stream does not wait for its branches",
        "            home.wait_stream(stream)\n", "            pass\n", _SEVERAL,
    ),
    Mutation(
        "calls unordered", PROGRAMS, "a call does not wait for the last one",
        "        device.wait(stream, self._done)  # of the last call, which may have been made on another stream\n", "",
        _SEVERAL,
    ),
    Mutation(
        "end of a call not recorded", PROGRAMS, "the end of a call is not recorded",
        "        outputs = self._outputs.clone()  # which the next call overwrites, maybe on another stream\n "
        "       device.record(self._done, stream)\n",
        "        outputs = self._outputs.clone()\n", _SEVERAL,
    ),
    Mutation(
        "batch of the first caller", PROGRAMS, "a graph reads the tensor that its first caller gave",
        "own = CapturedRun(run, map_tree(torch.clone, inputs), device, self._done)",
        "own = CapturedRun(run, inputs, device, self._done)",
        (f"{_ORDER}captured_ensemble_leaves_the_batch_of_its_first_call_as_it_is",),
    ),
    Mutation(
        "outputs not copied", PROGRAMS, "callers get the tensor that the next call overwrites",
        "outputs = self._outputs.clone()", "outputs = self._outputs", _SEVERAL,
    ),
]
