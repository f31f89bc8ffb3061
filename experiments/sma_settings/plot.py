"""Draws final test accuracies with every setting, without curves."""

from __future__ import annotations

from experiments.grids.plot import draw_accuracies
from experiments.tables.pictures import beside

PICTURES = beside(lambda result: draw_accuracies(result, curves=False))
