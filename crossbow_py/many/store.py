"""What `train_many` keeps in its folder: results and models of members that have ended, checkpoints of the others.

A member's files are named after a digest of what it trains. So a call goes on with whatever members of its own are
there already, and members may be added or left out between two calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import own_file, replacing
from crossbow_py.many.members import Settled
from crossbow_py.many.results import MemberResult
from crossbow_py.packs.slots import Slot
from crossbow_py.packs.trial import Checkpoint
from crossbow_py.telemetry.records import finite, write_json

MEMBERS_FOLDER = "members"
_FORMAT = 1


@dataclass
class Underway:
    """A member on its way: what was measured, and, where it is saved, its checkpoint.

    Attributes:
        history: a dict for each evaluation.
        best, best_value, best_state: the place of the best evaluation in it, its value, and the weights if they count.
        num_stale: evaluations since.
        loss_sum, num_losses: sums over the rounds since the last evaluation.
        seconds: seconds of training.
    """

    checkpoint: Checkpoint | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    best: int | None = None
    best_value: float | None = None
    best_state: dict[str, Tensor] | None = None
    num_stale: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    seconds: float = 0.0

    def at(self, checkpoint: Checkpoint, slot: Slot) -> Underway:
        """Return a copy as it is saved at a checkpoint."""
        row = slot.member
        return replace(
            self, checkpoint=checkpoint, history=[*self.history], loss_sum=row.loss_sum, num_losses=row.num_losses,
            seconds=slot.seconds,
        )  # fmt: skip


class Store:
    """The files of members in `folder`/members. Without a folder checkpoints are kept in memory, for packs that fail.

    `base_of` returns the values by name that a member begins with and its file of weights leaves out where they are
    still the same, as those of the base under an adapter are.

    Raises UserError when the disk refuses.
    """

    def __init__(self, folder: Path | None, base_of: Callable[[Settled], Mapping[str, Tensor]] = lambda _: {}) -> None:
        self._base_of = base_of
        self._in_memory: dict[int, Underway] = {}
        self._folder = None if folder is None else folder / MEMBERS_FOLDER
        if self._folder is not None:
            with _writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def load(self, member: Settled) -> MemberResult | None:
        """Return what a member ended with in an earlier call; None if it has not ended, or the files are not whole."""
        path = self._path(member, ".json")
        if path is None or not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format_version") != _FORMAT:
                return None
            model = path.with_suffix(".safetensors")
            state = {**self._base_of(member), **load_file(model)}
            return MemberResult(name=member.name, group=member.group, **values, state=state)
        except (OSError, ValueError, TypeError, KeyError, SafetensorError):
            return None

    def save(self, member: Settled, result: MemberResult) -> None:
        """Keep what a member ended with."""
        self._in_memory.pop(member.number, None)
        path = self._path(member, ".json")
        if path is None:
            return
        base = self._base_of(member)
        own = {
            name: value.contiguous() for name, value in result.state.items()
            if name not in base or not torch.equal(value, base[name])
        }  # fmt: skip
        plain = {each.name: getattr(result, each.name) for each in fields(result) if each.name[0] != "_"}
        del plain["state"], plain["name"], plain["group"]
        with _writing(path):
            with replacing(path.with_suffix(".safetensors"), synced=True) as partial:
                save_file(own, partial)
            write_json(path, {"format_version": _FORMAT, **finite(plain)}, indent=None)  # last: the member has ended
        with suppress(OSError):
            path.with_suffix(".underway.pt").unlink(missing_ok=True)

    def save_underway(self, member: Settled, underway: Underway) -> None:
        """Keep where a member stands."""
        path = self._path(member, ".underway.pt")
        if path is None:
            self._in_memory[member.number] = underway
            return
        values = {each.name: getattr(underway, each.name) for each in fields(underway)}
        values["checkpoint"] = None if underway.checkpoint is None else vars(underway.checkpoint)
        with _writing(path), replacing(path) as partial:
            torch.save({"format_version": _FORMAT, **values}, partial)

    def load_underway(self, member: Settled) -> Underway | None:
        """Return where a member stood in an earlier call; None if the file is not there, or not whole."""
        path = self._path(member, ".underway.pt")
        if path is None:
            kept = self._in_memory.get(member.number)
            return None if kept is None else replace(kept, history=[*kept.history])
        if not path.exists():
            return None
        try:
            with open(path, "rb", opener=own_file) as file:
                values: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
            if values.pop("format_version") != _FORMAT:
                return None
            checkpoint = values.pop("checkpoint")
            return Underway(checkpoint=None if checkpoint is None else Checkpoint(**checkpoint), **values)
        except Exception:  # whatever a torn file makes torch raise: the member begins again
            return None

    def _path(self, member: Settled, suffix: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{member.digest}{suffix}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch says RuntimeError of a full disk
        raise UserError(f"cannot write {path} ({error}); make room there, and call again.") from error
