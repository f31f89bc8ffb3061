"""compile_model: the same training, by a compiled model; and what a compiler that fails tells the user."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import SerialExecutor, ThreadsExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.compiled import CompiledModels
from tests.recording_streams import RecordingStreams
from tests.support import assert_learners_equal, features, make_tasks, norm_model, run
from tests.trainers import make_trainer

DATA = features(48, (3, 6, 6))


@pytest.fixture
def compilations(monkeypatch):
    """A compiler that notes what it compiles, and doubles nothing but the number of calls."""
    made = []

    def note(module, dynamic):
        made.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", note)
    return made


def compiled_tasks(**options):
    tasks = make_tasks(norm_model, num_learners=3, data=DATA, **options)
    tasks._compiled = CompiledModels()
    return tasks


def streams(tasks):
    return StreamsExecutor(tasks, RecordingStreams())


@pytest.mark.parametrize("executor", [SerialExecutor, ThreadsExecutor, streams])
def test_rounds_of_compiled_models_are_those_of_the_models(executor, compilations):
    ours, reference = compiled_tasks(), make_tasks(norm_model, num_learners=3, data=DATA)
    run(executor(ours), ours, 4)
    run(SerialExecutor(reference), reference, 4)
    assert_learners_equal(ours.bank, reference.bank)
    assert sorted(map(id, compilations)) == sorted(id(ours.bank.module(j)) for j in range(3))


def test_learner_with_another_module_is_compiled_anew(compilations):
    models, (first, second) = CompiledModels(), (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    inputs = torch.ones(1, 2)
    for module in (first, first, second):
        assert torch.equal(models(module, 0)(inputs), module(inputs))
    assert compilations == [first, second]


def test_compiler_that_fails_is_one_line_with_the_remedy(monkeypatch):
    import torch._inductor.exc  # noqa: PLC0415  not loaded before something compiles

    def fails(inputs):
        raise torch._inductor.exc.CppCompileError(["g++"], "g++: not found")

    monkeypatch.setattr(torch, "compile", lambda module, dynamic: fails)
    with pytest.raises(UserError, match=r"compile_model=true failed \(.*\); install a C\+\+ compiler"):
        CompiledModels()(torch.nn.Linear(2, 2), 0)(torch.ones(1, 2))


def test_compiled_code_with_other_gradients_is_refused_in_one_line(monkeypatch):
    class Halved(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, inputs):
            output = self.module(inputs)
            return output / 2 + output.detach() / 2  # the value is right, and its gradient half of what it is

    monkeypatch.setattr(torch, "compile", lambda module, dynamic: Halved(module))
    with pytest.raises(UserError, match=r"other numbers than the model itself \(the gradient of \w+ is off by 50%\)"):
        CompiledModels()(torch.nn.Linear(2, 2), 0)(torch.ones(1, 2))


def test_fused_learners_cannot_be_compiled():
    with pytest.raises(UserError, match="compile_model=true is for executors that run one model after another"):
        make_trainer(executor="fused", compile_model=True)


def test_run_with_a_compiled_model_learns(compilations):
    trained = make_trainer(compile_model=True, executor="serial").fit(max_epochs=1)
    plain = make_trainer(executor="serial").fit(max_epochs=1)
    assert compilations
    assert trained.test_accuracy == plain.test_accuracy
