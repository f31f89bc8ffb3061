"""Mutated command lines of all five commands, each a function of its number: what pages say to type, damaged."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from functools import cache

from crossbow_py.cli.configuration import APPENDED_GROUPS, group_options
from crossbow_py.estimate.config import EstimateConfig
from crossbow_py.predict.config import PredictConfig
from crossbow_py.search.config import SearchConfig
from crossbow_py.train.config import TrainConfig
from tests.pages.snippets import commands, pages, snippets
from tests.unit.fuzz.test_config_values import ODD, keys_of

Words = list[str]
Mutation = Callable[[random.Random, Words], Words]
COMMANDS = ("train", "search", "predict", "estimate", "report")
# What a folder for mutated commands has, by `outcomes.Watched`, and what it does not have.
FOLDERS = [
    "runs/digits/a", "runs/digits/b", "runs/lenet/a", "runs/search_digits/s", "runs/search_digits/s/best", "runs",
    "runs/nowhere", "runs/digits/a/config.yaml", "runs/digits/a/checkpoints", ".",
]  # fmt: skip

KEYS = list(dict.fromkeys([*keys_of(EstimateConfig), *keys_of(SearchConfig), *keys_of(PredictConfig)]))
_ODD_KEYS = [
    "hydra", "hydra.run.dir", "hydra.searchpath", "hydra.job.chdir", "hydra/launcher", "hydra/sweeper", "defaults",
    "_target_", "_self_", "name", "config", "a.b.c", "", " ", "0", "é", "seed.x", "model.x.y", "space.optimizer",
    "space.optimizer.learning_rate", "space.batch_size", "space", "group/sub", "/model", "model/x", "override model",
]  # fmt: skip
_VALUES = [
    *ODD, "-1e400", str(2**63), str(-(2**63)), str(2**64), "1e309", "-0.0", ".nan", "-inf", "NaN", "1e", "0o17", "1:30",
    "2001-01-01", "yes", "???", "'???'", "${", "${seed", "${}", "${:}", "${seed}${seed}", "${oc.env:NOT_THERE}",
    "${model.hidden}", "${space}", "${now:%Y}", "${seed:${seed}}", "{a:1,a:2}", "{1:2}", "{null:1}", "{a:{b:[{c:d}]}}",
    "[null]", "[1,[2,[3]]]", "[,]", "{,}", "{a}", "[a:b]", "()", "\t", "\r\n", "\x00", "\x07\x1b]0;x\x07", "'\x1b[31m'",
    "'\n'", "\udc80", "'\udcff\udcfe'", "'" + "\u202eabc'", "\u2028", "🦉" * 80, "a" * 100_000,
    "[" + "1," * 20_000 + "1]", "'", '"', "'a", '"a', "'a\"", "\\'", "a\\", "a b", " a", "a#b", "a: b", "%s %d {0}",
    "../../x", "runs/digits/a", "$HOME", "-1", "--help", "=", "==", "1=2", "*", "?", "`id`", "$(id)", ";", "|", "&",
    "!", "@", "::", "auto auto",
]  # fmt: skip
_SWEEPS = [
    "1,2", "0,x", "a,b,c", "range(1,4)", "range(3,1)", "range(0,1,0)", "range(1,1e12)", "choice(1,2)", "choice()",
    "interval(0,1)", "glob(*)", "glob(x*)", "sort(3,1,2)", "shuffle(1,2)", "tag(x,1,2)", "1,,2", ",", "[1],[2]",
    "null,1", "{a:1},{b:2}", "'a,b'", "'a/b','c'", "../x,../y", "é,漢", "\udc80,1", "'x\x1b[2J',2", "..,.", "'',1",
    "1,1", ",".join(["x" * 90] * 3), ",".join(map(str, range(10_001))),
]  # fmt: skip
_SPACES = [
    "{low:0,high:1}", "{low:1,high:0}", "{low:nan,high:1}", "{low:0.001,high:0.1,log:true}", "{low:0,high:1,log:true}",
    "{low:1,high:10,step:0.3}", "{low:1,high:10,num:3}", "{low:1,high:10,num:1}", "{low:-1e308,high:1e308}",
    "{low:5e-324,high:1,log:true}", f"{{low:0,high:{2**53 + 1}}}", "{choices:[1,2]}", "{choices:[]}", "{choices:{a:1}}",
    "{low:0,high:1,when:{optimizer:sgd}}", "{low:0,high:1,when:{seed:1}}", "{low:0,high:1,when:[]}", "[1,1.0]",
    "[true,1]", "[[8],[16]]", "[[[1]]]", "[{a:1}]", "[null]", "{lo:0,high:1}", "{low:a,high:b}", "[sgd,adamw]",
    "[mlp,lenet]", "[nan]", "{low:0,high:1,step:1e-300}", "{}", "[]", "x", "{low:{low:1,high:2},high:3}", "['\x1b']",
    "['\udc80']", "[1e400]",
]  # fmt: skip
_FLAGS = [
    "-m", "--multirun", "--cfg", "--cfg=job", "--cfg job", "-c", "job", "all", "--info", "--info=all", "--config-name",
    "--config-name=x", "-cn", "--config-dir=.", "-cd", "--package", "-p", "--run", "--resolve", "--version",
    "--hydra-help", "--shell-completion", "--experimental-rerun", "--", "-", "---", "--help", "-h", "--list",
    "--completion", "bash", "pwsh", "--completion=bash", "--batch_size=3", "-m=1", "-mm", "--multi", "\u2014help",
    "-\x1b[2J", "hydra/launcher=joblib", "hydra/launcher=basic", "+hydra/launcher=joblib", "hydra/sweeper=optuna",
    "hydra/help=x", "hydra/job_logging=disabled", "hydra.run.dir=x", "hydra.job.chdir=true", "hydra.searchpath=[x]",
    "~hydra", "hydra.sweeper.params.x=1", "++hydra.verbose=true", "hydra={}", "hydra/launcher@x=joblib",
    "~hydra/launcher",
]  # fmt: skip
_STRAY = [
    "", " ", "\t", "\n", "\x00", "\x1b[2J", "\udc80", "\u202e", "é", "漢", "🦉", "'", '"', "\\", "=", "==", ",", ":",
    "[", "]", "{", "}", "(", ")", "$", "${", "}", "@", "~", "+", "++", "#", "%", "&", "*", "!", "?", "/", ".", "..",
    "-", "--", "|", "<", ">", "`", ";", "^",
]  # fmt: skip
# Only what a line names in the folder of the tests is to be written: nothing that begins at the root of this machine.
_ROOTED = re.compile(r"(?<![A-Za-z0-9_.:])[/~](?=[^/=]*)")
_HARMLESS = ("/dev/null/x", "/dev/zero", "/proc/x", "~nobody_at_all/x")


@cache
def _seeds() -> dict[str, list[Words]]:
    """The commands of all pages, by command, and one of each kind that they do not have."""
    found: dict[str, list[Words]] = {name: [] for name in COMMANDS}
    for page in pages():
        for snippet in snippets(page):
            for words in commands(snippet) if snippet.language == "sh" else ():
                for at, word in enumerate(words):
                    name = word.removeprefix("crossbow_py.").removeprefix("crossbow-")
                    if name in found and name != word and "--completion" not in words:  # which takes seconds
                        found[name].append(_of_runs_that_are_there(words[at + 1 :]))
    recipes = group_options("experiment", TrainConfig)
    found["train"] += [[f"+experiment={name}"] for name in recipes if "search" not in name]
    found["train"] += [["config=runs/digits/a"], ["resume=runs/digits/a"], ["resume=auto", "+experiment=digits"]]
    found["search"] += [["+experiment=search_digits", "space.batch_size=[8,16]"], ["resume=runs/search_digits/s"]]
    found["predict"] += [["models=[runs/digits/a]"], ["runs/digits/a", "runs/digits/b"], ["runs/search_digits/s"]]
    found["estimate"] += [["config=runs/digits/a", "memory=8GiB"]]
    found["report"] += [["runs/digits/a"], ["runs/digits", "output_dir=out"]]
    return found


def _of_runs_that_are_there(words: Words) -> Words:
    """The runs that a page has trained before are not here; others are."""
    runs = itertools.cycle(["runs/digits/a", "runs/digits/b"])
    there = re.compile(r"(?<!output_dir=)\bruns/[\w/.-]+")
    return [there.sub(lambda _: next(runs), word) for word in words if word not in ("|", "&", ";", ">")]


def command_line(number: int) -> tuple[str, Words]:
    """The command, and what it is told: a line of a page with one to four mutations."""
    draw = random.Random(number)
    name = draw.choices(COMMANDS, (8, 4, 3, 3, 1))[0]
    words = list(draw.choice(_seeds()[name]))
    for _ in range(draw.choice((1, 1, 1, 1, 2, 2, 3, 4))):
        words = draw.choices(*zip(*_MUTATIONS, strict=True))[0](draw, words)
    return name, [_at_home(word) for word in words]


def _at_home(word: str) -> str:
    return word if any(each in word for each in _HARMLESS) else _ROOTED.sub("_", word)


def _drop(draw: random.Random, words: Words) -> Words:
    at = draw.randrange(len(words) + 1)
    return words[:at] + words[at + 1 :]


def _twice(draw: random.Random, words: Words) -> Words:
    return [*words, draw.choice(words)] if words else words


def _mix(draw: random.Random, words: Words) -> Words:
    return draw.sample(words, len(words))


def _other_key(draw: random.Random, words: Words) -> Words:
    """A key that is misspelled, another one, or one with something around it."""

    def changed(word: str) -> str:
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")
        at = draw.randrange(len(bare) + 1)
        new = draw.choice([
            bare[:at] + bare[at + 1 :], bare[:at] + bare[at : at + 1] + bare[at:], bare.upper(), bare.replace("_", "-"),
            bare.replace("_", ""), f"+{bare}", f"++{bare}", f"~{bare}", f"+~{bare}", f"{bare}.x", f"{bare}.",
            f".{bare}",
            f"{bare}.0", f"{bare}[0]", f"{bare}@x", f"{bare}@:x", f"x@{bare}", f"{bare}@_global_", f"x.{bare}",
            f"model.{bare}", f"'{bare}'", f" {bare}", bare.rpartition(".")[2], bare.partition(".")[0],
            draw.choice(KEYS), draw.choice(_ODD_KEYS),
        ])  # fmt: skip
        return f"{new}{equals}{value}"

    return _changed(draw, words, changed)


def _other_value(draw: random.Random, words: Words) -> Words:
    def changed(word: str) -> str:
        return f"{word.partition('=')[0]}={odd_value(draw)}"

    return _changed(draw, words, changed)


def _damage(draw: random.Random, words: Words) -> Words:
    """A few characters more or less, anywhere in a word."""

    def changed(word: str) -> str:
        at, more = draw.randrange(len(word) + 1), draw.choice(_STRAY)
        return draw.choice([word[:at] + more + word[at:], word[:at] + word[at + 1 :], word[:at] + more, more + word,
        word[:at]])

    return _changed(draw, words, changed)


def _changed(draw: random.Random, words: Words, changed: Callable[[str], str]) -> Words:
    if not words:
        return [changed("seed=1")]
    at = draw.randrange(len(words))
    return [*words[:at], changed(words[at]), *words[at + 1 :]]


def _one_more(draw: random.Random, words: Words) -> Words:
    key = draw.choice(_ODD_KEYS) if draw.random() < 0.1 else draw.choice(KEYS)
    return _put(draw, words, f"{draw.choice(['', '', '', '+', '++', '~'])}{key}={odd_value(draw)}")


def odd_value(draw: random.Random) -> str:
    """A number of any size, or one of what is hard to read or to write."""
    if draw.random() < 0.15:
        return draw.choice([str(draw.randrange(-(10**6), 10**6)), repr(draw.uniform(-10, 10)),
        repr(10.0 ** draw.randrange(-320, 308))])
    return draw.choice(_VALUES)


def _flag(draw: random.Random, words: Words) -> Words:
    return _put(draw, words, draw.choice(_FLAGS))


def _group(draw: random.Random, words: Words) -> Words:
    """An option, of another group or command too, in any of the ways in which somebody might write it."""
    group = draw.choice([*TrainConfig.GROUPS, *APPENDED_GROUPS])
    of = draw.choice([group, group, group, *TrainConfig.GROUPS, *APPENDED_GROUPS])
    option = draw.choice(list(group_options(of, TrainConfig)))
    form = draw.choice([
        "{0}={1}", "{0}={1}", "{0}={1}", "+{0}={1}", "+{0}={1}", "++{0}={1}", "~{0}={1}", "~{0}", "{0}@x={1}",
        "{0}={1},{1}",
        "{0}=[{1}]", "{0}={{name:{1}}}", "{0}.name={1}", "{0}.{1}=1", "{0}/{1}", "{0}/{1}=x", "{0}={1}.yaml",
        "/{0}={1}",
        "override /{0}={1}", "{0}={0}/{1}", "{0}=../{0}/{1}", "{0}=null", "{0}=", "{0}={1}x",
    ])  # fmt: skip
    return _put(draw, words, form.format(group, option))


def _sweep(draw: random.Random, words: Words) -> Words:
    words = _put(draw, words, f"{draw.choice([*KEYS, 'seed', 'output_dir', 'experiment'])}={draw.choice(_SWEEPS)}")
    return words if draw.random() < 0.2 else _put(draw, words, draw.choice(["-m", "-m", "--multirun"]))


def _folder(draw: random.Random, words: Words) -> Words:
    form = draw.choice(["config={}", "resume={}", "output_dir={}", "models=[{0},{0}]", "init_from={}", "{}",
    "models={}"])
    return _put(draw, words, form.format(draw.choice(FOLDERS)))


def _space(draw: random.Random, words: Words) -> Words:
    key = draw.choice([*KEYS, "optimizer", "model", "batch_size", "optimizer.learning_rate", "model.hidden"])
    sampler = draw.choice([[], [], ["sampler=grid"], ["sampler=tpe"], ["eta=2"], ["num_trials=5"], ["min_epochs=20"]])
    form = draw.choice(["space.{}={}", "space.{}={}", "+space.{}={}", "~space.{}={}", "space={{{}:{}}}"])
    return _put(draw, [*words, *sampler], form.format(key, draw.choice(_SPACES)))


def _put(draw: random.Random, words: Words, word: str) -> Words:
    at = draw.randrange(len(words) + 1)
    return [*words[:at], word, *words[at:]]


_MUTATIONS: list[tuple[Mutation, int]] = [
    (_drop, 2), (_twice, 1), (_mix, 2), (_other_key, 4), (_other_value, 5), (_damage, 4), (_one_more, 5), (_flag, 3),
    (_group, 3), (_sweep, 2), (_folder, 2), (_space, 2),
]  # fmt: skip
