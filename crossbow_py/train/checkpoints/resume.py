"""What all ranks begin with alike: the checkpoint that is gone on from, and what `auto` stands for."""

from __future__ import annotations

import json
from pathlib import Path

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path
from crossbow_py.core.plain_values import differences
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.train.checkpoints.checkpoint import (
    SavedCheckpoint,
    checkpoints,
    find_newest,
    open_checkpoint,
    taking_from,
)
from crossbow_py.train.run_settings import Choices, RunSettings, choose


def saved_run(
    resume: str | Path | None, output_dir: Path | None, ranks: Ranks
) -> tuple[SavedCheckpoint | None, list[str]]:
    """The checkpoint the first rank finds whole, and what there is to say of it. All ranks call it together.

    `auto` is the newest in `output_dir`, or none.
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
            "model and the schedule are what they were, and learners that are missing start as its clones."
        )
    return found, said


def choose_together(settings: RunSettings, found: SavedCheckpoint | None, ranks: Ranks) -> Choices:
    """What `auto` becomes, as the checkpoint says where there is one. All ranks call it together.

    Raises UserError, on all of them, when it would not be the same everywhere.
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
                f"rank {rank} would not train as rank 0 does ({'; '.join(differing)}): their machines are not alike; "
                "set device and precision to what all of them have."
            )
            ranks.raise_any(error if ranks.is_first else None)
    return chosen
