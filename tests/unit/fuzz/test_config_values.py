"""Overrides of any text and values of any kind: a configuration that can be written and read again, or one sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from crossbow_py.cli.config_files import read_yaml, write_yaml
from crossbow_py.cli.configuration import APPENDED_GROUPS, compose
from crossbow_py.cli.overrides import expand_sweeps
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import from_mapping
from crossbow_py.data.sources.synthetic import Synthetic
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.train.config import TrainConfig, config_to_mapping
from tests.unit.fuzz.examining import depths, examine, memory_of_at_most

MOST_JOBS = 2_000
ODD = [
    "", "null", "true", "0", "-1", "1e999", "-1e999", "nan", "inf", "1e308", "5e-324", "9" * 400, "9" * 5000, "1_000",
    "0x1f", "[]", "{}", "[1,2", "{a:1}", "[[[1]]]", "{a:{b:[c]}}", "'a b'", "a=b", "1,2", "range(1,3)", "choice(1,2)",
    "glob(*)", "int(3)", "float(x)", "str(1)", "json_str('{}')", "sort(3,2)", "shuffle(a,b)", "tag(a,1)",
    "extend_list(3)", "${seed}", "${oc.env:HOME}", "${oc.env:X,1}", "${oc.decode:'1'}", "${oc.create:{a:1}}", "${",
    "\\${", "'\\${a'", "${.x}", "${..seed}", "${hydra:runtime.cwd}", "${oc.dict.keys:model}", "${a.b.c}", "a\0b",
    "'\0'", "\ud800", "'\udce9'", "é漢😀", "\u202e", "\ufeff", "\x85", "\x1b[2J", "~nobody_at_all/x", "/dev/zero",
    "../..", "x" * 5000, "x" * 300, "'" + "x/" * 3000 + "'", "[" * 300, "[" * 300 + "]" * 300,
    "{a:" * 200 + "1" + "}" * 200, "\\", "'", '"', "@", "*", "&a", "!!python/object/apply:os.system ['x']", "\n",
    "a\nb: c", "- 1", "? x", "null,null", "  3  ", "auto", "custom", "x.y",
]  # fmt: skip


def keys_of(kind: type[Any], prefix: str = "") -> list[str]:
    """Every key that --help shows, and the groups."""
    keys = []
    for field in dataclasses.fields(kind):
        nested = [type(field.default)] if dataclasses.is_dataclass(field.default) else []
        nested += TrainConfig.GROUPS.get(field.name, {}).values() if issubclass(kind, TrainConfig) else []
        keys.append(prefix + field.name)
        keys += [key for settings in nested for key in keys_of(settings, f"{prefix}{field.name}.")]
    return list(dict.fromkeys(keys))


KEYS = keys_of(EstimateConfig)


def overrides() -> st.SearchStrategy[str]:
    """Keys and others, values and others, and text that is no override."""
    odd_keys = ["hydra.run.dir", "hydra", "defaults", "_target_", "model@x", "a@b:c", "experiment@x", *APPENDED_GROUPS]
    key = st.one_of(
        st.sampled_from(KEYS),
        st.sampled_from(odd_keys),
        st.builds("{}.{}".format, st.sampled_from(KEYS), st.sampled_from(["x", "_target_", "0", "a.b", "", "name"])),
        st.text(max_size=12),
    )
    nested = st.recursive(
        st.sampled_from(ODD),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]"),
            st.dictionaries(st.text("abc", min_size=1), inner, max_size=3).map(
                lambda items: f"{{{','.join(f'{name}:{value}' for name, value in items.items())}}}"
            ),
        ),
        max_leaves=8,
    )
    numbers = st.one_of(st.integers().map(str), st.floats().map(repr))
    value = st.one_of(st.sampled_from(ODD), st.text(max_size=20), numbers, nested)
    override = st.builds("{}{}={}".format, st.sampled_from(["", "", "+", "++", "~"]), key, value)
    return st.one_of(override, override, override, key.map("~{}".format), st.text(max_size=30), st.sampled_from(ODD))


def test_keys_are_those_of_every_group() -> None:
    assert {"seed", "memory", "model.dropout", "data.worker_timeout_s", "distributed.timeout_s"} < set(KEYS)


@depths(50, 1000)
def test_overrides_of_any_text_are_a_configuration_or_one_sentence(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "config.yaml"

    def check(texts: Sequence[str]) -> None:
        try:
            config = compose(texts, EstimateConfig)
            path.write_text(write_yaml(config_to_mapping(config)), encoding="utf-8")
        except UserError as error:
            said = " ".join(str(error).split())  # as the command says it
            said.encode()
            return
        assert read_yaml(path) == config_to_mapping(config)

    examine(st.lists(overrides(), max_size=3), check, examples)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_key_with_odd_values_is_a_configuration_or_one_sentence() -> None:
    with memory_of_at_most(300):
        for number, key in enumerate(KEYS):
            for value in ODD[number % 8 :: 8]:  # an eighth for each key; all with all take a quarter of an hour
                with suppress(UserError):
                    write_yaml(config_to_mapping(compose([f"{key}={value}"], EstimateConfig)))


@depths(60, 1000)
def test_sweeps_of_any_text_are_jobs_that_can_be_counted_or_one_sentence(examples: int) -> None:
    sweeps = ["1,2", "range(1,4)", "range(0,1e9)", "range(1,10,0)", "range(0,1,1e-9)", "range(3,1)", "range(1,inf)",
              "range(-1e18,1e18)", "interval(0,1)", "choice(a,b,c)", "sort(shuffle(1,2))", "shuffle(range(1,9))",
              ",".join(["1"] * 200), "[1,2],[3]", "glob([a,b])"]  # fmt: skip
    swept = st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(sweeps))

    def check(texts: Sequence[str]) -> None:
        with suppress(UserError):
            assert len(expand_sweeps(texts)) <= MOST_JOBS

    examine(st.lists(st.one_of(swept, swept, overrides()), max_size=4), check, examples)


def plain_values() -> st.SearchStrategy[Any]:
    """What YAML can hold, with odd numbers and texts."""
    leaf = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**63, -(2**63), 10**400, -(10**400), 10**4000]),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from(ODD),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    )


@depths(60, 1000)
def test_settings_from_any_values_are_settings_or_one_sentence(examples: int) -> None:
    kinds = [kind for registry in TrainConfig.GROUPS.values() for kind in registry.values()]

    def check(example: tuple[type[Any], dict[str, Any]]) -> None:
        kind, values = example
        with suppress(UserError):
            from_mapping(kind, values)

    def values_of(kind: type[Any]) -> st.SearchStrategy[tuple[type[Any], dict[str, Any]]]:
        name = st.sampled_from([field.name for field in dataclasses.fields(kind)] or ["none"])
        return st.tuples(st.just(kind), st.dictionaries(st.one_of(name, name, st.text(max_size=5)), plain_values()))

    examine(st.sampled_from(kinds).flatmap(values_of), check, examples)


def test_number_too_long_for_a_message_is_one_sentence() -> None:
    for kind, name in ((Synthetic, "num_train"), (SGD, "clip_norm"), (Synthetic, "flip"), (Synthetic, "shape")):
        for number in (10**5000, -(10**5000), [10**5000]):  # of more digits than Python turns into text
            with pytest.raises(UserError) as raised:
                from_mapping(kind, {name: number}).read(progress=False)
            assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
        "a: " + "[" * 20_000,
        "a: " + "{b: " * 20_000,
        "a: &a [*a]\n",
        "a: !!python/object/apply:os.system [exit]\n",
        "a: !!binary " + "/" * 10_001 + "\n",
        "a: [" + "1, " * 100_000 + "1]\n",
        "a: !!map x\n",
        "a: !!bool x\n",
        "a: !!int ''\n",
        "model: 0x" + "f" * 10_000 + "\n",
        "model: {0x" + "f" * 10_000 + ": 1}\n",
    ],
    ids=["aliases of aliases", "lists", "mappings", "itself", "code", "bytes", "many", "no map", "no bool", "no int",
         "number", "key"],
)
def test_config_of_a_run_that_grows_or_runs_when_read_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with memory_of_at_most(200), pytest.raises(UserError, match=r"config\.yaml"):
        read_yaml(tmp_path / "config.yaml")
