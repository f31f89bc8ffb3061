"""The contents of a checkpoint: saving a run's state, and finding a checkpoint to resume from and restoring it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from crossbow_py.core.errors import CheckpointError, UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.plain_values import differences
from crossbow_py.core.settings import to_mapping
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.bank.replicas import CENTRAL
from crossbow_py.engine.bank.saved import mean_weights, num_saved
from crossbow_py.models.lora import SCALE
from crossbow_py.train.checkpoints.checkpoint import (
    SavedCheckpoint,
    checkpoints,
    find_newest,
    open_checkpoint,
    taking_from,
    upgraded,
)
from crossbow_py.train.run import Run
from crossbow_py.train.run_settings import Choices, RunSettings, choose
from crossbow_py.train.train_state import BestModels, TrainState

# Settings that do not change results, or whose value is in `choices`.
_CHANGEABLE = (
    "device", "executor", "compile_model", "precision", "on_nonfinite", "min_learners", "max_learners", "num_workers",
    "learning_statistics", "evaluations_per_epoch", "cache_features",
)  # fmt: skip


def state_dict(run: Run) -> dict[str, Any]:
    """Return this rank's part of a checkpoint: tensors and plain types. All ranks call it together, drained.

    The first rank's part also holds what belongs to no learner, including z unless every node has its own.
    """
    bank, ranks = run.bank, run.ranks
    if bank.is_single:
        bank.adopt_learner()
    own = bank.state_dict()
    if not (ranks.is_first or run.collective.apart):
        for name in CENTRAL:
            own.pop(name, None)
    return {
        "choices": run.choices.to_plain(),
        "identity": identity(run),
        "train_data": run.data.train_digest,
        "state": run.state.to_plain(),
        "epoch_sums": list(run.state.epoch_sums(run.ranks)),
        "nodes": run.nodes,
        "bank": own,
        "average_ema": run.average_ema.state_dict() if run.average_ema and ranks.is_first else None,
        "tuner": run.tuning.to_plain() if run.tuning else None,
        "best": run.state.best.to_plain() if run.state.best and ranks.is_first else None,
    }


def restore(run: Run, checkpoint: SavedCheckpoint) -> list[str]:
    """Restore a run from a checkpoint, which may be of another number of ranks. Returns messages.

    With the same number of ranks every learner is restored. With another number z and the schedule are; additional
    learners are clones of z. Raises CheckpointError if the checkpoint is of another run.
    """
    noise = run.state.noise
    with taking_from(checkpoint.folder):
        saved = checkpoint.part(0)
        current = identity(run)
        if changed := differences(upgraded(saved["identity"], current), current):
            shown = "; ".join(changed[:4]) + ("; ..." if len(changed) > 4 else "")
            raise CheckpointError(
                f"checkpoint {run.resumed_from} is of another run ({shown}); resuming may change only stops, logging "
                "and paths: use the same settings, or start afresh without resume."
            )
        if checkpoint.num_ranks == run.ranks.num_ranks:
            own, nodes = checkpoint.part(run.ranks.rank), run.nodes
            # Its node's z, if every node has one and ranks are on the same nodes as before.
            central = own["bank"] if nodes and nodes == own.get("nodes") else _central(checkpoint)
            run.bank.load_state_dict({**own["bank"], **{name: central[name] for name in CENTRAL if name in central}})
            run.state.take(TrainState.from_plain(own["state"]))
        else:
            _take_share(run, checkpoint)
        run.state.noise = noise and (run.state.noise or noise)  # whether it is measured may have changed
        if run.average_ema is not None:
            run.average_ema.load_state_dict(saved["average_ema"], run.state.samples_seen)
        if saved.get("best"):
            run.state.best = BestModels.from_plain(saved["best"], run.bank.learner_state(0), run.state.samples_seen)
        if run.tuning and saved.get("tuner"):
            run.tuning.restore(saved["tuner"])
            run.bank.resize(run.tuning.state.num_learners)
        known = saved.get("train_data"), run.data.train_digest
    if None in known or known[0] == known[1]:
        return []
    return ["The training data are not those that the run had before; it goes on with these, from what it learned."]


def _take_share(run: Run, checkpoint: SavedCheckpoint) -> None:
    """Load a share of the learners and of the epoch's sums, which another number of ranks wrote."""
    saved = checkpoint.part(0)
    run.bank.resize(num_saved(saved["bank"]))
    non_finite = _distribute(run, checkpoint)
    state = TrainState.from_plain({**saved["state"], "sick_learners": non_finite})
    whole = saved.get("epoch_sums", (state.loss_sum, state.num_losses, state.num_correct))
    none = (0.0, 0, None if state.num_correct is None else 0.0)
    state.loss_sum, state.num_losses, state.num_correct = whole if run.ranks.is_first else none
    if not run.ranks.is_first:
        state.compared = []  # the first rank's count once
    run.state.take(state)


def _distribute(run: Run, checkpoint: SavedCheckpoint) -> dict[int, int]:
    """Distribute learners over another number of ranks. Returns this rank's non-finite learners and their rounds."""
    bank, non_finite = run.bank, dict[int, int]()
    num_learners = num_saved(checkpoint.part(0)["bank"])
    bank.load_central(_central(checkpoint))
    if run.rule.shows_mean:  # z is as old as their last averaging
        parts = [checkpoint.part(rank) for rank in range(checkpoint.num_ranks)]
        gated = [part["state"]["sick_learners"] for part in parts]
        bank.z.load(0, mean_weights([part["bank"] for part in parts], gated))
    # Identical replicas are z and keep their optimizer state; others are restored each, as far as there are enough.
    mean, goes_on = run.rule.gradient_mean, not bank.replicas_identical
    if bank.replicas_identical and mean is not None:
        goes_on = mean.num_groups(num_learners, checkpoint.num_ranks) == 1
    for row in range(bank.num_learners):
        learner = bank.first_learner + row
        rank, saved_row = divmod(learner % (num_learners * checkpoint.num_ranks), num_learners)
        saved = checkpoint.part(rank)
        there = learner < num_learners * checkpoint.num_ranks or bank.replicas_identical
        (bank.load_row if there and goes_on else bank.clone_learner)(row, saved["bank"], saved_row)
        if (since := saved["state"]["sick_learners"].get(saved_row)) is not None:
            non_finite[row] = since  # at least its buffers must not be used
    bank.align_groups()
    return non_finite


def _central(checkpoint: SavedCheckpoint) -> Mapping[str, Any]:
    """Return the saved values named in `CENTRAL`: the first rank's, or their means if every node had its own."""
    first = checkpoint.part(0)
    if not first.get("nodes"):
        return first["bank"]  # type: ignore[no-any-return]
    banks = [checkpoint.part(rank)["bank"] for rank in range(checkpoint.num_ranks)]
    means = {
        name: {key: sum(bank[name][key] for bank in banks) / len(banks) for key in first["bank"][name]}
        for name in CENTRAL
        if name in first["bank"]
    }
    return {**first["bank"], **means}


def identity(run: Run) -> dict[str, Any]:
    """Return what must be equal for a run to resume: everything but stops, logging and paths."""
    settings = to_mapping(run.settings)
    for changeable in _CHANGEABLE:
        settings.pop(changeable)
    grows = run.settings.num_learners == "seesaw"  # whose learners come by these alone
    return {
        **settings,
        "precision": run.choices.precision.name,
        **{group: {"name": chosen.NAME, **to_mapping(chosen)} for group, chosen in run.groups.items()},
        "data": {
            "augmentation": to_mapping(run.data.augmentation or Augmentation()),
            "mean": list(run.data.mean or ()),
            "std": list(run.data.std or ()),
            "sample_weights": None if run.data.sample_weights is None else _digest(run.data.sample_weights),
        },
        "model": run.bank.shapes,
        **({"min_learners": run.settings.min_learners} if grows else {}),
        **({"adapter_scales": scales} if (scales := scales_of(run.bank.template)) else {}),
        "num_train_samples": run.num_samples,
    }


def scales_of(model: nn.Module) -> dict[str, float]:
    """Return the scales of LoRA's adapters by name, which a checkpoint holds as buffers and a setting decides."""
    return {name: float(own) for name, own in model.named_buffers() if name.endswith(SCALE)}


def _digest(values: npt.ArrayLike) -> str:
    """Return a short hash that tells arrays apart."""
    found = torch.as_tensor(values, dtype=torch.float64).cpu().numpy()
    return hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest()


def find_checkpoint(
    resume: str | Path | None, output_dir: Path | None, ranks: Ranks
) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from, None for a fresh start, and messages. All ranks call it together.

    The first rank finds and verifies it. `auto` is the newest in `output_dir`, or none.
    """
    if resume is None:
        return None, []

    def find() -> str:
        asked = output_dir if resume == "auto" else given_path("resume", resume)
        if asked is None:
            raise UserError("resume=auto goes on in output_dir, got none; set one.")
        if resume == "auto" and not checkpoints(asked):
            return json.dumps([None, []])
        found, problems = find_newest(asked)
        return json.dumps([str(found.folder), problems])

    folder, said = json.loads(ranks.from_first(find))
    if folder is None:
        return None, said
    with ranks.together():
        found = open_checkpoint(Path(folder))
    if found.num_ranks != ranks.num_ranks:
        said.append(
            f"The checkpoint is of another number of ranks ({found.num_ranks}, now {ranks.num_ranks}): the average "
            "model and the schedule are restored, and missing learners start as clones of the average model."
        )
    return found, said


def choose_together(settings: RunSettings, found: SavedCheckpoint | None, ranks: Ranks) -> Choices:
    """Resolve `auto` by `choose`, to the checkpoint's values if there is one. All ranks call it together.

    Raises UserError on all ranks if the values would differ between them.
    """
    with ranks.together():
        if found is None:
            chosen = choose(settings, None, ranks.num_ranks)
        else:
            with taking_from(found.folder):
                chosen = choose(settings, found.part(0)["choices"], ranks.num_ranks)
    first, *others = [json.loads(text) for text in ranks.gather_texts(json.dumps(chosen.to_plain()))]
    for rank, other in enumerate(others, 1):
        if differing := differences(first, other):
            error = UserError(
                f"rank {rank} would not train as rank 0 does ({'; '.join(differing)}): their machines differ; "
                "set device and precision to what all of them have."
            )
            ranks.raise_any(error if ranks.is_first else None)
    return chosen
