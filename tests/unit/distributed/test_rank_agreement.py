"""Ranks with another code or configuration are refused at the start, with the difference."""

from __future__ import annotations

import copy

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import RankError, UserError
from crossbow_py.distributed import rank_agreement
from crossbow_py.distributed.rank_agreement import check_ranks_agree
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests.thread_ranks import on_threads

CONFIG = config_to_mapping(compose(["+experiment=digits"], TrainConfig))


def with_changes(changes):
    changed = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *groups, key = path.split(".")
        owner = changed
        for group in groups:
            owner = owner[group]
        owner[key] = value
    return changed


def check(ranks, configs):
    check_ranks_agree(configs[ranks.rank], ranks)
    return "alike"


def found_with(*changes):
    return on_threads(check, len(changes), [with_changes(each) for each in changes])


def test_ranks_of_one_configuration_are_alike():
    assert found_with({}, {}, {}) == ["alike"] * 3


def test_paths_and_what_the_first_rank_alone_reads_may_differ():
    other = {"output_dir": "/other", "resume": "auto", "init_from": "/weights.safetensors"}
    assert found_with({}, other) == ["alike"] * 2


def test_other_value_on_one_rank_is_refused_on_all_with_both_values():
    first, second, third = found_with({}, {}, {"batch_size": 8, "optimizer.learning_rate": 0.5})
    assert isinstance(first, UserError)
    said = str(first)
    assert said.startswith("rank 2 is not like rank 0 (")
    assert "config.batch_size: 16 → 8" in said
    assert "config.optimizer.learning_rate: 0.05 → 0.5" in said
    for other in (second, third):
        assert isinstance(other, RankError)
        assert (other.exit_code, other.is_said, said in str(other)) == (2, False, True)


@pytest.mark.parametrize(("key", "value"), [("source", "0123456789ab"), ("torch", "2.0.0"), ("python", "3.9.9")])
def test_other_code_on_one_rank_is_refused_with_what_differs(key, value, monkeypatch):
    own = rank_agreement._code()

    def check_other(ranks):
        check_ranks_agree(CONFIG, ranks)

    calls = []

    def code():
        calls.append(key)
        return {**own, key: value} if len(calls) == 1 else own

    monkeypatch.setattr(rank_agreement, "_code", code)
    found = on_threads(check_other, 2)
    assert {type(each) for each in found} == {UserError, RankError}
    first, second = found
    assert f"code.{key}: " in str(first)
    assert value in str(first)
    assert second.exit_code == 2


def test_code_hash_changes_with_any_source_file(monkeypatch, tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "inner" / "b.py").write_text("b = 1\n")
    (package / "notes.txt").write_text("not code")
    monkeypatch.setattr(rank_agreement, "PACKAGE", package)
    hashes = [rank_agreement._code()["source"]]
    assert hashes[0] == rank_agreement._code()["source"]
    (package / "notes.txt").write_text("still not")
    assert rank_agreement._code()["source"] == hashes[0]
    (package / "inner" / "b.py").write_text("b = 2\n")
    hashes.append(rank_agreement._code()["source"])
    (package / "inner" / "b.py").rename(package / "inner" / "c.py")
    hashes.append(rank_agreement._code()["source"])
    assert len(set(hashes)) == 3
