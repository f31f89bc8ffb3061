"""The number of learners that fit in a device's memory now: the auto-tuner's bound at the start of a run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from crossbow_py.core.host import read_host
from crossbow_py.core.host_randomness import kept_torch_state
from crossbow_py.core.measured import Remembered, digest, model_facts
from crossbow_py.core.trees import Tree, call, form_of, leaves
from crossbow_py.core.version import __version__
from crossbow_py.engine.modules.dropout import replace_dropout
from crossbow_py.engine.modules.precision import Precision, cast_module
from crossbow_py.engine.sizing.memory import Activations, Job, LearnerModel, Line, Sample, model_sizes

# A forward and a backward pass together hold 0.94 to 1.41 times what the forward pass saves for the backward pass
# (probes of an MLP, LeNet, VGG-16, AlexNet, DenseNet-121 and ResNets, in fp32 and bf16). If this many times as much
# fits, no probe is made.
_CRUDE = 3.0
_SHARE = 0.9  # the share of free memory to use; the rest is for rounding, fragmentation and workspaces


def free_bytes(device: torch.device) -> int:
    """Return the memory that can be allocated on a device now; on CPU within the limits of control groups."""
    if device.type != "cuda":
        return read_host().memory_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def learners_that_fit(
    template: nn.Module,
    inputs: Tree,
    targets: Tensor,
    job: Job,
    *,
    batch_size: int,
    max_learners: int,
    in_turn: bool,
    limit_bytes: float,
    known: Remembered | None = None,
) -> int:
    """Return the largest number of learners, from 1 to `max_learners`, that should fit in memory.

    One real forward pass of a few samples usually shows at once that memory is ample. Otherwise the memory model is
    probed under fake tensors, which takes seconds, and the result is remembered.

    Args:
        template: the model on its device; it and torch's generators are not changed.
        inputs, targets: a few samples as the model takes them, [n, ...]; n ≥ 2 for BatchNorm.
        job: what learners do.
        batch_size: the batch size of a learner.
        max_learners: the most learners to return.
        in_turn: whether one learner runs at a time, as under `serial`.
        limit_bytes: free memory, without what the run has allocated.
        known: the remembered activations of earlier probes; by default those in the user's cache.

    Raises:
        UserError: memory is not ample by a crude guess, and the model does not run under fake tensors or this torch
            cannot count them.
    """
    limit, saved = _SHARE * limit_bytes, saved_bytes(template, inputs, job.precision)
    sizes = model_sizes(template, job)
    weights = sizes.num_values * sizes.master_bytes
    line, sample = Line(2 * weights, _CRUDE * saved / len(targets)), Sample.of(inputs, targets)
    crude = Activations((line,)).in_batches_of(job.accumulate, sample.nbytes)
    if LearnerModel(sizes, crude).most_learners(limit, batch_size, max_learners, in_turn) == max_learners:
        return max_learners
    known = known or Remembered("activations.json")
    key = digest(
        {
            "versions": (__version__, torch.__version__),
            **model_facts(template),
            "inputs": (form_of(inputs), batch_size, *([job.accumulate] if job.accumulate > 1 else [])),
            "job": (
                job.precision.name,
                job.optimizer.NAME,
                job.rule.NAME,
                job.channels_last,
                getattr(job.loss, "__qualname__", type(job.loss).__qualname__),
            ),
        }
    )
    remembered = known.recall(key)
    if remembered is None or not remembered.isdigit():
        remembered = str(_probed(template, inputs, targets, job, batch_size))
        known.remember(key, remembered)
    probed = LearnerModel(sizes, Activations((Line(int(remembered), 0),)))
    return max(1, probed.most_learners(limit, batch_size, max_learners, in_turn))


def saved_bytes(template: nn.Module, inputs: Tree, precision: Precision) -> int:
    """Return the bytes that a forward pass of these samples keeps for its backward pass, without parameters."""
    model = cast_module(copy.deepcopy(template), precision).train()
    device = leaves(inputs)[0].device
    replace_dropout(model, torch.Generator(device))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}  # holds memory, or another tensor could get the same address

    def pack(tensor: Tensor) -> None:  # an output that is held would hold its graph, and so itself, for ever
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()

    with kept_torch_state(device), torch.autograd.graph.saved_tensors_hooks(pack, lambda none: none):
        call(model, inputs)
    return sum(size for size, _ in kept.values())


def _probed(template: nn.Module, inputs: Tree, targets: Tensor, job: Job, batch_size: int) -> int:
    from crossbow_py.engine.sizing.probes import estimate_learner  # noqa: PLC0415  takes two seconds

    return estimate_learner(template, Sample.of(inputs, targets), job, most=batch_size).activations.at(batch_size)
