"""Figures of classes from counts worked out by hand, their tables, and the file of the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossbow_py.telemetry.class_counts import (
    ClassCounts,
    ClassFigures,
    as_csv,
    from_csv,
    markdown_table,
    mean_figures,
)

# Four cats, of which one is taken for a dog; two dogs, of which one has no finite outputs; no fox, predicted once.
MATRIX = [[3, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]


def counts(matrix: Any = MATRIX, names: tuple[str, ...] = ("cat", "dog", "fox"), **options: Any) -> ClassCounts:
    return ClassCounts(np.array(matrix, dtype=np.int64), names, **options)


def test_figures_of_classes_are_those_worked_out_by_hand() -> None:
    assert counts().figures() == (
        ClassFigures("cat", precision=1.0, recall=0.75, f1=6 / 7, support=4),
        ClassFigures("dog", precision=0.0, recall=0.0, f1=0.0, support=2),
        ClassFigures("fox", precision=0.0, recall=None, f1=0.0, support=0),
    )
    assert counts().num_non_finite == 1


def test_class_that_is_neither_there_nor_predicted_has_no_figures() -> None:
    assert counts([[0, 0, 0], [0, 2, 0]], ()).figures() == (
        ClassFigures("0", None, None, None, 0),
        ClassFigures("1", 1.0, 1.0, 1.0, 2),
    )


def test_masks_have_an_intersection_over_union() -> None:
    # TP 3, FP 0, FN 1; TP 0, FP 1, FN 2; TP 0, FP 1, FN 0
    assert [each.iou for each in counts(of_positions=True).figures()] == [0.75, 0.0, 0.0]


def test_means_are_over_the_classes_that_have_a_value() -> None:
    found = mean_figures(counts(of_positions=True).figures())
    assert found == ClassFigures("mean of the classes", 1 / 3, 0.375, 2 / 7, 6, 0.25)
    assert mean_figures([]) == ClassFigures("mean of the classes", None, None, None, 0)


def test_table_has_a_row_for_each_class_and_one_for_the_means() -> None:
    assert markdown_table(counts(names=("cat", "a|b\n")).figures()) == (
        "| class | precision | recall | F1 | support |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| cat | 1.0000 | 0.7500 | 0.8571 | 4 |\n"
        "| a\\|b | 0.0000 | 0.0000 | 0.0000 | 2 |\n"
        "| 2 | 0.0000 | – | 0.0000 | 0 |\n"
        "| mean of the classes | 0.3333 | 0.3750 | 0.2857 | 6 |"
    )
    assert "| F1 | IoU | support |" in markdown_table(counts(of_positions=True).figures())


def test_names_that_several_classes_have_carry_their_numbers() -> None:
    assert counts(names=("crane", "dog", "crane")).names == ("crane (0)", "dog", "crane (2)")
    assert counts(names=("a", "b", "c", "d")).names == ("a", "b", "c")


def test_confusions_are_the_most_frequent_mistakes() -> None:
    found = counts([[5, 2, 0, 0], [7, 9, 1, 0], [0, 2, 0, 3]])
    assert found.confusions(3) == [(7, 1, 0), (2, 0, 1), (2, 2, 1)]
    assert found.confusions(9) == [(7, 1, 0), (2, 0, 1), (2, 2, 1), (1, 1, 2)]


def test_file_of_a_matrix_is_read_as_it_was_written() -> None:
    own = counts(names=('a "b", c', "dog", ""))
    text = as_csv(own)
    assert text.splitlines()[1:] == ['"a ""b"", c",3,1,0,0', "dog,0,0,1,1", ",0,0,0,0"]
    again = from_csv(text)
    assert again.counts.tolist() == MATRIX and again.names == own.names


@pytest.mark.parametrize(
    "text",
    [
        "", "class\n", "class,0,not finite\n", "class,0,not finite\n0,1\n", "class,0,not finite\n0,1,2,3\n",
        "class,0,not finite\n0,1,x\n", "class,0,not finite\n0,1,-2\n", "class,0,not finite\n0,1," + "9" * 30 + "\n",
        "class,0,not finite\n0,1," + "9" * 9000 + "\n", "class,1,not finite\n0,1,2\n", "\n\n", 'class,"0\n',
    ],
)  # fmt: skip
def test_file_that_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no confusion matrix"):
        from_csv(text)
