"""Ranks: one alone, and how several agree on what one of them has failed with."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.core.errors import BadSampleError, CrossbowError, DataError, NonFiniteError, RankError, UserError
from crossbow_py.distributed.ranks import ALONE, Ranks
from tests.thread_ranks import on_threads

CPU = torch.device("cpu")


def test_rank_alone_meets_itself():
    assert (ALONE.rank, ALONE.num_ranks, ALONE.is_first, ALONE.num_nodes) == (0, 1, True, 1)
    assert ALONE.gather([1.0, 2.0]) == [[1.0, 2.0]]
    assert ALONE.gather_texts("text") == ["text"]
    assert ALONE.sum([1.0, 2.5]) == [1.0, 2.5]
    assert ALONE.from_first(lambda: "made") == "made"
    values = torch.tensor([1.0, 2.0])
    ALONE.add(values)
    assert values.tolist() == [1.0, 2.0]
    assert ALONE.collective(CPU).is_alone
    assert ALONE.collective(CPU, apart=True).is_alone
    ALONE.close()


@pytest.mark.parametrize("error", [UserError("no"), DataError("bad"), ValueError("ours")])
def test_rank_alone_raises_its_own_error(error):
    with pytest.raises(type(error)) as caught, ALONE.together():
        raise error
    assert caught.value is error


def copied(ranks: Ranks) -> list[float]:
    values = [torch.full((2,), ranks.rank + 0.1), torch.tensor(ranks.rank + 0.5, dtype=torch.float64)]
    ranks.copy_first(values)
    return [*values[0].tolist(), values[1].item()]


def test_copy_first_gives_all_the_values_of_the_first():
    own = torch.tensor(0.1).item()
    assert on_threads(copied, 3) == [[own, own, 0.5]] * 3
    assert copied(ALONE) == [own, own, 0.5]


def tensors_of(ranks: Ranks) -> list[list[torch.Tensor]]:
    nan = torch.tensor([-0.0, torch.nan, torch.inf])
    own = [nan.bfloat16(), torch.tensor([[True, False]]), torch.tensor(2**62 + 1), torch.empty(0, 3), nan[:2].double()]
    return ranks.gather_tensors(own[: 2 * ranks.rank])


def test_tensors_of_all_ranks_are_gathered_to_the_bit():
    for found in on_threads(tensors_of, 3):
        assert [len(each) for each in found] == [0, 2, 4]
        minus, flags = found[1]
        assert (minus.dtype, flags.tolist()) == (torch.bfloat16, [[True, False]])
        assert minus.isnan().tolist() == [False, True, False] and bool(minus[0].signbit())
        assert found[2][2].item() == 2**62 + 1 and found[2][2].shape == ()
        assert found[2][3].shape == (0, 3)
    assert [each.tolist() for each in ALONE.gather_tensors([torch.ones(1)])[0]] == [[1.0]]


def nodes_of(ranks: Ranks) -> list[int]:
    ranks.node = (1, 0, 1)[ranks.rank]
    return ranks.nodes()


def test_nodes_are_named_by_their_first_rank():
    assert on_threads(nodes_of, 3) == [[0, 1, 0]] * 3


def fail_on(ranks: Ranks, failures: dict[int, CrossbowError]) -> int:
    with ranks.together():
        if ranks.rank in failures:
            raise failures[ranks.rank]
    return ranks.rank


def test_together_raises_the_first_ranks_error_there_and_its_words_elsewhere():
    own = UserError("data.root is missing")
    first, *others = on_threads(fail_on, 3, {0: own})
    assert first is own
    for other in others:
        assert isinstance(other, RankError)
        assert str(other) == "rank 0: data.root is missing"
        assert (other.rank, other.exit_code, other.kind) == (0, 2, "UserError")
        assert not other.is_said


def test_together_raises_another_ranks_error_on_all_and_the_first_says_it():
    own = BadSampleError("item 7")
    found = on_threads(fail_on, 3, {1: own})
    assert all(isinstance(each, RankError) for each in found)
    assert {str(each) for each in found} == {"rank 1: item 7"}
    assert [each.is_said for each in found] == [True, False, False]
    assert {each.is_of_data for each in found} == {True}
    assert found[1].__cause__ is own


def test_together_with_several_failures_tells_the_lowest_ranks():
    failures = {1: NonFiniteError(3, 5, None), 2: UserError("two")}
    found = on_threads(fail_on, 3, failures)
    assert {each.rank for each in found} == {1}
    assert {each.exit_code for each in found} == {1}
    assert {each.kind for each in found} == {"NonFiniteError"}
    assert not any(each.is_of_data for each in found)
    assert found[2].__cause__ is failures[2]
    assert "learner 3 went non-finite in round 5" in str(found[0])


def make_text(ranks: Ranks, fails: bool) -> str:
    def make() -> str:
        if fails:
            raise UserError("cannot be written")
        return f"of rank {ranks.rank}, ünïcode"

    return ranks.from_first(make)


def test_from_first_gives_all_what_the_first_makes():
    assert on_threads(make_text, 3, False) == ["of rank 0, ünïcode"] * 3


def test_from_first_that_fails_is_raised_on_all():
    first, second = on_threads(make_text, 2, True)
    assert isinstance(first, UserError)
    assert isinstance(second, RankError)
    assert second.exit_code == 2


def sums(ranks: Ranks) -> list[float]:
    return ranks.sum([0.1 * (ranks.rank + 1), 1e16 if ranks.rank == 0 else 1.0])


def test_sum_adds_in_rank_order_alike_everywhere():
    expected = [sum([0.1 * 1, 0.1 * 2, 0.1 * 3]), sum([1e16, 1.0, 1.0])]  # Python 3.12 began to make up for rounding
    assert on_threads(sums, 3) == [expected] * 3
