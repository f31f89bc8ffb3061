"""Trials that one pack can hold, and what they train with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from crossbow_py.data.feed import Feed
from crossbow_py.engine.fusion.fused_agreement import Comparison
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.search.packs.trial import TrialSettings
from crossbow_py.train.run_settings import Choices, RunSettings


@dataclass(frozen=True)
class TrialsAlike:
    """Trials of one signature.

    Attributes:
        settings, choices, loss: of the search.
        like: one of the trials.
        template: its model, on the device.
        feed: training batches of its size.
    """

    settings: RunSettings
    choices: Choices
    like: TrialSettings
    template: nn.Module
    feed: Feed
    loss: Loss

    @property
    def compared(self) -> Comparison:
        """The comparison that comes before their models are fused; in packs they take the same batches."""
        return Comparison(
            self.template, self.feed, self.loss, self.choices.precision, self.settings.channels_last, shared=True
        )

    def __str__(self) -> str:
        return f"{self.like.name} with batches of {self.like.batch_size}"
