"""Features: what the frozen layers before the first trained one make of each sample, kept once it was computed.

A sample's features are computed in the first round that has it. A round all of whose samples are known gathers them
and runs only what comes after the cut (`cut.py`). Before they are used, a round is run in both ways, with features that
were computed in batches of other samples: `auto` uses them if losses, gradients and buffers are the same bits.
"""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import read_host
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.data.feed import Batch
from crossbow_py.data.resident.resident_feed import ResidentFeed, in_rows
from crossbow_py.engine.bank.frozen_base import values_digest
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.cut import find_cut
from crossbow_py.engine.fusion.fused_agreement import Passes
from crossbow_py.engine.fusion.fused_pass import FusedPass
from crossbow_py.engine.fusion.graph import Cut, Midway
from crossbow_py.engine.rounds import Round, RoundTasks
from crossbow_py.engine.trust import compare, not_used, once

_LEAST_SHARE = 0.5  # of the products of a forward pass: less does not pay for memory
_MOST_MEMORY, _MOST_ASKED = 0.1, 0.5  # of what is free: a tenth is left by the bound of the number of learners


class _NotKeptError(Exception):
    """The reason why features are not kept, as part of a sentence; `is_said` also where nobody has asked for them."""

    def __init__(self, reason: str, is_said: bool = False) -> None:
        super().__init__(reason)
        self.is_said = is_said


class Features:
    """The features of a data set on the host.

    Args:
        num_samples: N.
        cut: the cut whose nodes' values they are.
        channels_last: whether 4-D values are channels-last in memory.

    Attributes:
        known: which samples are there, bool [N].
        of: what they were computed by; those of anything else are forgotten.
        is_told: whether the user knows of them.
    """

    def __init__(self, num_samples: int, cut: Cut, channels_last: bool) -> None:
        values = [node.meta["val"] for node in cut.nodes]
        self._last = [channels_last and own.ndim == 4 for own in values]
        shapes = [self._in_memory(own, last).shape[1:] for own, last in zip(values, self._last, strict=True)]
        self._rows = [  # memory is taken as it is filled
            torch.empty(num_samples, *shape, dtype=own.dtype) for own, shape in zip(values, shapes, strict=True)
        ]
        self.known, self.of, self.is_told = torch.zeros(num_samples, dtype=torch.bool), ("", "", 0), False

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(rows.nbytes for rows in self._rows)

    @staticmethod
    def _in_memory(values: Tensor, last: bool) -> Tensor:
        return values.permute(0, 2, 3, 1) if last else values

    def put(self, ids: Tensor, values: Midway) -> None:
        """Keep values `[n, ...]` of the samples `ids`, [n]."""
        for rows, own, last in zip(self._rows, values.values, self._last, strict=True):
            rows[ids] = self._in_memory(own, last)
        self.known[ids] = True

    def take(self, ids: Tensor) -> Midway:
        """Return the values `[n, ...]` of samples."""
        found = [rows.index_select(0, ids) for rows in self._rows]
        pairs = zip(found, self._last, strict=True)
        return Midway(tuple(own.permute(0, 3, 1, 2) if last else own for own, last in pairs))


class FeatureBatches:
    """The batches of a pass: features of a round's samples in place of their inputs.

    Args:
        tasks, fused: the pass, whose graph has a cut, and what it is of.
        feed: gives batches of inputs that follow from the sample alone.
        features: those of the data set.
    """

    def __init__(self, tasks: RoundTasks, fused: FusedPass, feed: ResidentFeed, features: Features) -> None:
        self._tasks, self._pass, self._feed, self._features = tasks, fused, feed, features
        self._base, self._of_buffers = values_digest(tasks.bank.base.row(0)), values_digest({})
        self._seen: object = None
        self._stand_in: set[bool] = set()  # where they can, see `try_on`

    def __call__(self, plan: Round) -> Batch:
        """Return the round's batches as `FusedPass.batch` does, of `Midway` values where these can stand for inputs."""
        starts, shared = self._pass.starts(plan), self._pass.shares(plan)
        picks, rows = self._feed.picks(starts), None if shared else len(starts)
        if shared not in self._stand_in or not self.is_current():
            return self._feed.gathered(picks, rows)
        ids = picks[0]
        if not self._features.known[ids].all():
            inputs = self._feed.gathered(picks, rows)
            try:
                self._features.put(ids, self._computed(inputs, rows))
            except (IndexError, RuntimeError):
                return inputs  # the pass, which fails too, explains it
        return Batch(_midway(self._features.take(ids), rows), self._feed.targets_of(picks, rows))

    def _computed(self, batch: Batch, rows: int | None) -> Midway:
        """Return features `[n, ...]` of a batch `[B, ...]`, or of batches `[K, B, ...]` if `rows` is K."""
        lead = 0 if rows is None else 1
        parts = [part.map(torch.clone) if lead else part for part in batch.parts(self._tasks.accumulate, lead)]
        found = [self._pass.graph.before_cut(part.inputs, shared=rows is None).values for part in parts]
        return Midway(tuple(torch.cat(own, lead).flatten(0, lead) for own in zip(*found, strict=True)))

    def is_current(self) -> bool:
        """Return whether learners agree in the buffers before the cut; forgets features of other values of them."""
        graph, threads = self._pass.graph, torch.get_num_threads()  # sums of other threads may round otherwise
        buffers = graph.buffers_before_cut()
        if buffers is None:
            return False
        if self._seen is not graph.shared_buffers:
            self._seen, self._of_buffers = graph.shared_buffers, values_digest(buffers)
        if self._features.of != (of := (self._base, self._of_buffers, threads)):
            self._features.known.zero_()
            self._features.of = of
        return True

    def try_on(self, shared: bool, exact: bool) -> str | None:
        """Run a batch in both ways, with features computed among other samples; return what differs.

        From then on features stand for inputs of such rounds, if losses, gradients and buffers of all learners are the
        same bits, or unless they must be `exact`, the same up to rounding.
        """
        fused, passes = self._pass, Passes(self._tasks)
        count = 1 if shared else len(fused.learners)
        rows, lead = (None, 0) if shared else (count, 1)
        picks = self._feed.picks(tuple(n * self._feed.batch_size for n in range(2 * count)))
        order = torch.randperm(picks.shape[1], generator=torch.Generator().manual_seed(0))
        halves = [self._computed(self._feed.gathered(own, rows), rows) for own in picks[:, order].chunk(2, 1)]
        back, own = order.argsort()[: picks.shape[1] // 2], picks[:, : picks.shape[1] // 2]
        mixed = Midway(tuple(torch.cat(each)[back] for each in zip(*(half.values for half in halves), strict=True)))
        inputs = self._feed.gathered(own, rows)
        both = [inputs, inputs._replace(inputs=_midway(mixed, rows))]
        plain, cut = (passes.together(fused, each.parts(self._tasks.accumulate, lead)[0], shared) for each in both)
        for learner, expected, found in zip(fused.learners, plain, cut, strict=True):
            if all(torch.equal(found[name], own) for name, own in expected.items()):
                continue
            if exact:
                return "features of a sample differ between batches, if only in the last digits"
            control = passes.control(learner, inputs if shared else inputs.map(itemgetter(learner - fused.learners[0])))
            if difference := compare.furthest(found, expected, control, self._tasks.bank.precision.compute):
                return f"features of a sample depend on the others in its batch ({difference})"
        self._stand_in.add(shared)
        return None


def keep_features(tasks: RoundTasks, fused: FusedPass) -> None:
    """Have a pass keep features, if `tasks.cache_features` says so and they can be. Nothing may be in flight.

    Raises UserError if they were asked for and cannot be kept.
    """
    asked = tasks.cache_features is True
    if tasks.cache_features is False:
        return
    try:
        fused.source = _feature_batches(tasks, fused, asked)
    except _NotKeptError as reason:
        if asked:
            raise UserError(f"cache_features=true: {reason}; set cache_features=auto.") from reason
        if reason.is_said:
            fused.notes.append(not_used("Kept features", f"{reason}"))


def _feature_batches(tasks: RoundTasks, fused: FusedPass, asked: bool) -> FeatureBatches:
    """Return the batches of a pass with features. Raises _NotKeptError."""
    bank, feed, graph = tasks.bank, tasks.feed, fused.graph
    if bank.device.type != "cpu":
        raise _NotKeptError("rounds on CUDA gather inputs inside graphs")
    if not isinstance(feed, ResidentFeed) or not feed.is_plain:
        raise _NotKeptError("inputs are augmented, mixed or streamed, so that they are others in each epoch")
    if not bank.base or not bank.base.is_shared:
        raise _NotKeptError("there are no frozen parameters that all learners share")
    graph.cut = cut = find_cut(graph, feed.batch_size // tasks.accumulate)
    if cut is None:
        raise _NotKeptError("no convolution, linear layer or attention comes before what is trained, drawn or moved")
    if not asked and cut.share < _LEAST_SHARE:
        raise _NotKeptError("the layers before the first trained one are the smaller part")
    features = _features_of(feed, cut, bank, asked)
    found = FeatureBatches(tasks, fused, feed, features)
    if not found.is_current():
        raise _NotKeptError("learners differ in buffers of frozen layers")
    averages, alone = tasks.update.rule.has_central_model, len(fused.learners) == 1
    with kept_generators(bank.device):
        for shared in [True] if alone else [False] if averages else [True, False]:
            if (reason := found.try_on(shared, exact=not asked)) is not None and (asked or averages or alone):
                raise _NotKeptError(reason, is_said=True)
    if not features.is_told:
        features.is_told, size = True, f"{features.nbytes / 1e6:,.1f} MB"
        fused.notes.append(f"Features of {feed.num_samples:,} samples after {cut.module} are kept: {size}.")
    return found


def _features_of(feed: ResidentFeed, cut: Cut, bank: ReplicaBank, asked: bool) -> Features:
    """Return the features of a data set, one object for all passes of a model. Raises _NotKeptError for memory."""

    def new() -> Features:
        features, free = Features(feed.num_samples, cut, bank.layout.channels_last), read_host().memory_bytes
        if features.nbytes > (_MOST_ASKED if asked else _MOST_MEMORY) * free:
            size = f"{features.nbytes / 1e6:,.0f} MB"
            raise _NotKeptError(f"they take {size}, and {free / 1e6:,.0f} MB are free", is_said=True)
        return features

    key = feed.data, tuple(node.name for node in cut.nodes), bank.precision.name, bank.layout.channels_last
    return once("features", key, new, bank.template)


def _midway(features: Midway, rows: int | None) -> Midway:
    return Midway(tuple(in_rows(own, rows) for own in features.values))
