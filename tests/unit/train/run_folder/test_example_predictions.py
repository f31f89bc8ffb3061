"""What is shown of an evaluation: pixels as they were, and nothing for what is not classified images."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.data.normalisation import Normalisation
from crossbow_py.train.evaluation.evaluator import Examples
from crossbow_py.train.run_folder.example_predictions import example_predictions

TARGETS, OUTPUTS = torch.tensor([1, 0]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])


def test_normalisation_is_undone_and_the_likeliest_class_named() -> None:
    normalisation = Normalisation((0.5, 0.25, 0.0), (0.5, 0.25, 2.0))
    pixels = torch.rand(2, 3, 4, 4)
    pixels[0, 0, 0, 0], pixels[0, 0, 0, 1] = 0.0, 1.0
    mean, std = normalisation.constants(pixels, torch.float32)
    found = example_predictions(Examples((pixels - mean) / std, TARGETS, OUTPUTS), normalisation, ["cat", "dog"])
    assert found is not None
    assert found.images.shape == (2, 4, 4, 3)
    torch.testing.assert_close(
        torch.from_numpy(found.images).float(), pixels.permute(0, 2, 3, 1) * 255, atol=0.51, rtol=0
    )
    assert (found.targets, found.predicted) == ((1, 0), (1, 0))
    assert found.probabilities == pytest.approx((0.8807971, 0.5))
    assert found.class_names == ("cat", "dog")


def test_dark_images_are_stretched_to_what_a_screen_has() -> None:
    found = example_predictions(Examples(torch.tensor([0.0, 0.02, 0.01, 0.0]).view(2, 1, 1, 2), TARGETS, OUTPUTS), None)
    assert found is not None
    assert found.images.flatten().tolist() == [0, 255, 128, 0]


def test_clips_show_their_middle_frame() -> None:
    clips = torch.zeros(2, 3, 5, 4, 4)
    clips[:, :, 2] = 1.0
    found = example_predictions(Examples(clips, TARGETS, OUTPUTS), None)
    assert found is not None
    assert found.images.shape == (2, 4, 4, 3)
    assert found.images.min() == 255


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(torch.zeros(2, 7, 4, 4), OUTPUTS), (torch.zeros(2, 1, 4, 4), torch.full((2, 2), torch.nan))],
    ids=["seven channels", "not finite"],
)
def test_what_no_screen_can_show_is_not_shown(inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    assert example_predictions(Examples(inputs, TARGETS, outputs), None) is None
    assert example_predictions(None, None) is None
