"""A prediction's files: what is left of them when the disk refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.predict import report
from crossbow_py.predict.prediction import Prediction

FOUND = cast(
    Prediction,
    SimpleNamespace(
        probabilities=np.full((1, 2, 2), 0.5, np.float32), ensemble=np.full((2, 2), 0.5, np.float32),
        targets=np.array([0, 1]), models=[SimpleNamespace(name="mine")],
    ),
)  # fmt: skip


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("No space left on device")])
def test_probabilities_that_the_disk_refuses_leave_the_old_ones_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def full(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise error

    (tmp_path / "predictions.npz").write_bytes(b"old")
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); choose another folder"):
        report.write(FOUND, tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("predictions.npz", b"old")]


def test_accuracy_of_probabilities_that_are_not_finite_counts_them_as_wrong() -> None:
    probabilities = np.array([[[0.9, 0.1], [np.nan, np.nan]], [[0.8, 0.2], [0.7, 0.3]]], np.float32)
    found = Prediction(
        config=cast(Any, None), models=cast(Any, (SimpleNamespace(name="ill"), SimpleNamespace(name="well"))),
        data="mine", probabilities=probabilities, targets=np.array([0, 0]), device="cpu", precision="fp32",
        executor="serial", num_architectures=1, batch_size=2, images_per_s=1.0, latencies={}, notes=(),
    )  # fmt: skip
    assert found.accuracies == [0.5, 1.0]
    assert found.accuracy == 0.5  # the mean of both members is not finite either
    assert "ill: the outputs of 1 of 2 samples are not finite" in report.as_text(found)
