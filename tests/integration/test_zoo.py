"""Models that people bring, of timm and transformers: every executor trains them as `serial` does, or says why not.

With the extra `zoo`, which `make test-all` installs; skipped without.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from crossbow_py.engine.trust.remember import assumed
from experiments.zoo.comparison import compared
from experiments.zoo.models import TIMM, TRANSFORMERS, Entry, entry_of
from experiments.zoo.run import models_table, summary_table


@pytest.fixture(autouse=True)
def kept_number_of_threads():
    """Comparisons set torch's own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TIMM, *TRANSFORMERS])
def test_model_of_the_zoo_trains_alike_on_every_executor(name):
    # Not imported here: see `import_torchvision`.
    if importlib.util.find_spec("timm" if name in TIMM else "transformers") is None:
        pytest.skip("the extra zoo is not installed")
    found = compared(entry_of(name))
    assert {executor: row["outcome"] for executor, row in found.items()} == dict.fromkeys(found, "ok")


def entry(forward):
    class Net(nn.Linear):
        def forward(self, x):
            return forward(super().forward(x))

    return Entry(lambda: Net(4, 5), (4,))


class Counting(nn.Linear):
    """From its second batch on another model, which a graph cannot know."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.long
@pytest.mark.slow
def test_comparison_finds_what_is_different_refused_or_crashes():
    with assumed("fused graph", None):
        fine, refused = compared(entry(torch.tanh)), compared(entry(lambda y: y if y.sum() > 0 else -y))
        different, crash = compared(Entry(lambda: Counting(4, 5), (4,))), compared(entry(lambda y: y.view(3)))
    assert [row["outcome"] for row in fine.values()] == ["ok"] * 4
    assert fine["fused"]["difference"] < 1e-12
    assert refused["threads"]["outcome"] == "ok"
    assert refused["fused"]["outcome"] == "refused"
    assert "Python asks for the value of a tensor" in refused["fused"]["reason"]
    assert different["fused"]["outcome"] == "DIFFERENT"
    assert different["fused"]["difference"] > 10 * different["fused"]["control"]
    assert crash == {"serial": {"outcome": "crash", "reason": crash["serial"]["reason"]}}


def test_tables_count_what_each_executor_serves():
    ok, refused = {"outcome": "ok", "difference": 2e-13, "looped": ["fold"]}, {"outcome": "refused", "reason": "why"}
    models = [
        {"model": "a", "package": "timm", "executors": {"serial": {"outcome": "ok"}, "fused": ok}},
        {"model": "b", "package": "timm", "executors": {"serial": {"outcome": "ok"}, "fused": refused}},
    ]
    result = {"versions": {"timm": "1.0"}, "models": models}
    assert summary_table(result).splitlines()[2].split("|")[1:-1] == [
        " timm 1.0 ", " 2 of 2 ", " 1 of 2 ", "                  0 ", "       0 "
    ]  # fmt: skip
    assert [" ".join(line.split()) for line in models_table(result).splitlines()[2:]] == [
        "| a | ok | ok | 2e-13 | – | fold |",
        "| b | ok | refused | – | – | – |",
    ]
