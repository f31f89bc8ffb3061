"""The jobs of `run.py`: one side of one task, in a process of its own. Prints JSON: seconds, and what was learned.

python experiments/many_models/jobs.py TASK SIDE [--quick]
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from crossbow_py import SGD, AdamW, LoRA, Member, folds, frozen, train_many
from crossbow_py.data.datasets import as_pair
from crossbow_py.data.sources import SOURCES
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.models import MODELS
from crossbow_py.packs import padding
from experiments.bench.environments import MissingError, python_of, versions
from experiments.bench.machine import usable_cores
from experiments.many_models.tokens import IN_TURNS

FUNC, JAX, FEW = "torch.func", "JAX", "--few"
_COUNT = "--count="  # of models; 0 for as many as the task has
_SHORTER = 4  # times is their training then
SIDES = ("many", "packs by width", "plain loop", "a process a core", FUNC, JAX)
_FEW = 4
_PATIENCE_S = 60
_ON_DIGITS = ("MLP rates", "CNN rates", "shared", "own")
WIDTHS = {"widths": (64, 56, 48), "far widths": (64, 48, 32)}  # in one pack 0.80 and 0.64 of its values are used
Pair = tuple[Tensor, Tensor]
Figure = tuple[float, float]  # the mean test loss of the models, and images/s of training if the side tells


@dataclass(frozen=True)
class Task:
    """Models to train: each on `subsets[n]` of the data, from seed n, for `epochs` of its own samples.

    Model n is made by `makes[n % len(makes)]`, if there are some.
    """

    make: Callable[[], nn.Module]
    data: Pair
    test: Pair
    subsets: Sequence[np.ndarray]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int
    epochs: int
    rate: float = 0.05
    own_order: bool = False
    most: int = 256
    adamw: bool = False
    makes: Sequence[Callable[[], nn.Module]] = ()
    rates: Sequence[float] = ()
    in_jax: str = ""  # its name in `jax_side.py`

    def make_of(self, number: int) -> Callable[[], nn.Module]:
        return self.makes[number % len(self.makes)] if self.makes else self.make

    def rate_of(self, number: int) -> float:
        return self.rates[number % len(self.rates)] if self.rates else self.rate


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Module:
    sizes = [inputs, *hidden]
    inner = [part for n in range(len(hidden)) for part in (nn.Linear(sizes[n], sizes[n + 1]), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(sizes[-1], outputs))


class SeriesModel(nn.Module):
    """The next value of a series from the 24 before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        out: Tensor = self.head(states[:, -1])
        return out


def cnn() -> nn.Module:
    """Two convolutions on digits."""
    layers = [
        part for inputs, outputs in ((1, 16), (16, 32))
        for part in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]  # fmt: skip
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


class Texts(nn.Module):
    """A BERT of 11 M parameters with adapters in it, from token ids `[B, T]` to scores of two classes."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  seconds

        size = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        with torch.random.fork_rng():
            torch.manual_seed(0)  # stands for weights from a file
            base = BertForSequenceClassification(BertConfig(**size, num_labels=2))
        lora = LoRA(lambda: base, rank=rank, targets=["query", "value"], trained=["classifier"])
        self.bert = lora()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.bert(input_ids=ids).logits
        return found


def probe(inputs: int = 3, outputs: int = 10) -> nn.Module:
    """A linear layer on the features of a ResNet-18 that is frozen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # stands for weights from a file
        *features, _ = MODELS["resnet18"]().build((inputs, 32, 32), outputs).children()
    return nn.Sequential(frozen(nn.Sequential(*features)), nn.Flatten(), nn.Linear(512, outputs))


def on_a_frozen_base(name: str, scale: int, draw: torch.Generator) -> Task:
    """16 models that differ in their seeds, on the same batches; of `adapters BxT` fewer, the larger they are."""
    if name.startswith("adapters"):
        batch, length = map(int, (name.removeprefix("adapters").strip() or "2x32").split("x"))
        count = batch * max(8, min(48, 4096 // (batch * length))) if name != "adapters" else 240
        tokens = torch.randint(5, 30_000, (max(batch, count // scale), length), generator=draw)
        texts = tokens, (tokens[:, 0] > 15_000).long()
        test, whole = (tokens[:64], texts[1][:64]), [np.arange(len(tokens))] * 16
        return Task(Texts, texts, test, whole, nn.CrossEntropyLoss(), batch, 1, 1e-3, adamw=True)
    images = torch.randn(1600 // scale, 3, 32, 32, generator=draw)
    data = images, torch.randint(0, 10, (len(images),), generator=draw)
    few = images[:64], data[1][:64]
    return Task(probe, data, few, [np.arange(len(images))] * 16, nn.CrossEntropyLoss(), 16, 2 if scale == 1 else 1)


def on_digits(name: str, like: Task) -> Task:
    """Models of several rates and seeds, or the same ones on batches that they share, or on their own."""
    everything = np.arange(len(like.data[1]))
    if name == "MLP rates":
        return replace(like, subsets=[everything] * 32, own_order=True, rates=np.geomspace(0.003, 0.3, 8).tolist())
    if name == "CNN rates":
        few, rates = everything[: len(everything) // 8], np.geomspace(0.003, 0.1, 4).tolist()
        test = like.test[0][:1000], like.test[1][:1000]
        few_of = replace(like, make=cnn, test=test, subsets=[few] * 16, epochs=1, in_jax="CNN")
        return replace(few_of, own_order=True, rates=rates)
    return replace(like, subsets=[everything] * 16, own_order=name == "own")


def task_of(name: str, quick: bool) -> Task:
    draw = torch.Generator().manual_seed(0)
    scale = 20 if quick else 1
    if name == "tabular":  # 8 folds of 4 seeds
        x = torch.randn(8000 // scale, 20, generator=draw)
        y = ((x[:, 0] * x[:, 1] + x[:, 2].sin() + 0.3 * torch.randn(len(x), generator=draw)) > 0).long()
        ids = [fold.train for fold in folds(len(x) // 2, 8) for _ in range(4)]
        half = len(x) // 2
        return Task(
            partial(mlp, 20, (64, 64), 2), (x[:half], y[:half]), (x[half:], y[half:]), ids, nn.CrossEntropyLoss(), 32,
            1 if quick else 20, in_jax="MLP 20-64-64-2",
        )  # fmt: skip
    if name == "halves":  # retraining for attribution
        source = SOURCES["mnist"]().load(progress=False)
        train, test = as_pair(source.train), as_pair(source.test)
        assert train is not None, "they are tensors"
        assert test is not None, "likewise"
        images, labels = train
        count = 20_000 // scale
        data = images[:count].float() / 255, labels[:count]
        rng = np.random.default_rng(0)
        ids = [np.sort(rng.permutation(count)[: count // 2]) for _ in range(64)]
        return Task(
            partial(mlp, 784, (64,), 10), data, (test[0].float() / 255, test[1]), ids, nn.CrossEntropyLoss(), 32,
            1 if quick else 2, in_jax="MLP 784-64-10",
        )  # fmt: skip
    if name == "series":  # 16 GRUs, each on windows of a series of its own
        each = 2000 // scale
        steps = torch.arange(16 * (each + 25)).view(16, -1) * torch.linspace(0.05, 0.5, 16)[:, None]
        values = steps.sin() + 0.1 * torch.randn(steps.shape, generator=draw)
        windows = values.unfold(1, 25, 1)[:, :each].reshape(-1, 25)
        data = windows[:, :24, None].contiguous(), windows[:, 24:]
        ids = [np.arange(n * each, (n + 1) * each) for n in range(16)]
        test, epochs = (data[0][::50], data[1][::50]), 1 if quick else 4
        return Task(SeriesModel, data, test, ids, nn.MSELoss(), 16, epochs, in_jax="GRU 32")
    if name in WIDTHS or name.removeprefix("GRU ") in WIDTHS:
        like = task_of("series" if name.startswith("GRU ") else "tabular", quick)
        widths = WIDTHS[name.removeprefix("GRU ")]
        if name.startswith("GRU "):
            return replace(like, makes=[partial(SeriesModel, width // 2) for width in widths])
        return replace(like, makes=[partial(mlp, 20, (width, width), 2) for width in widths])
    if name.startswith("adapters") or name == "probes":
        return on_a_frozen_base(name, scale, draw)
    if name in _ON_DIGITS:
        return on_digits(name, task_of("halves", quick))
    number = int(name)  # of rows: models a minute
    x = torch.randn(1000 // scale, 16, generator=draw)
    data = x, (x[:, :1] * x[:, 1:2]).tanh()
    ids = [np.arange(n % 2, len(x), 2) for n in range(number)]
    make = partial(mlp, 16, (16,), 1)
    return Task(make, data, data, ids, nn.MSELoss(), 16, 1 if quick else 20, most=number)


def many(task: Task) -> Figure:
    whole = [None if len(ids) == len(task.data[1]) else ids for ids in task.subsets]
    members = [
        Member(
            seed=n, subset=ids, order_seed=n if task.own_order else None, model=task.make_of(n),
            optimizer=SGD(learning_rate=task.rate_of(n), momentum=0.9) if task.rates else None,
        )
        for n, ids in enumerate(whole)
    ]  # fmt: skip
    results = train_many(
        task.make, task.data, task.test, members=members, loss=task.loss, batch_size=task.batch_size,
        max_epochs=task.epochs, precision="fp32",
        optimizer=AdamW(learning_rate=task.rate) if task.adamw else SGD(learning_rate=task.rate, momentum=0.9),
        max_pack_size=task.most,
    )  # fmt: skip
    for note in results.notes:
        print(note, file=sys.stderr)
    return results.summary()["test_loss"].mean, results.images_per_s


def one(task: Task, number: int) -> tuple[float, float, int]:
    """One model as a good engineer trains it: data gathered by index, gradients set to None, no `.item()`.

    Returns its test loss, the seconds of training, and the samples that it took.
    """
    torch.manual_seed(number)
    ids = torch.from_numpy(task.subsets[number])
    x, y = task.data[0][ids], task.data[1][ids]
    model = task.make_of(number)()
    trained = [own for own in model.parameters() if own.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, task.rate_of(number), momentum=0.9, foreach=True)
    if task.adamw:
        optimizer = torch.optim.AdamW(trained, task.rate, foreach=True)
    begun, taken = time.perf_counter(), len(y) // task.batch_size * task.batch_size * task.epochs
    for _ in range(task.epochs):
        order = torch.randperm(len(y))
        for batch in torch.split(order, task.batch_size)[: len(y) // task.batch_size]:
            optimizer.zero_grad(set_to_none=True)
            loss: Any = task.loss(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        return float(task.loss(model(task.test[0]), task.test[1])), seconds, taken


def plain_loop(task: Task) -> Figure:
    return _summed([one(task, number) for number in range(len(task.subsets))])


def _summed(found: Sequence[tuple[float, float, int]], side_by_side: int = 1) -> Figure:
    losses, seconds, taken = zip(*found, strict=True)
    return float(np.mean(losses)), side_by_side * sum(taken) / sum(seconds)


def _of_process(name: str, quick: bool, number: int) -> tuple[float, float, int]:
    torch.set_num_threads(1)
    if name not in _TASKS:
        _TASKS[name] = task_of(name, quick)
    return one(_TASKS[name], number)


_TASKS: dict[str, Task] = {}


def a_process_a_core(name: str, quick: bool, count: int) -> Figure:
    """What joblib does: a pool of processes, each with one thread and the data loaded once."""
    with ProcessPoolExecutor(usable_cores()) as pool:
        return _summed(list(pool.map(partial(_of_process, name, quick), range(count))), usable_cores())


def functional(task: Task) -> Figure:
    """All models at once by `torch.func`: `vmap` over `grad`, weights stacked, SGD by torch's foreach operators."""
    models = []
    for number in range(len(task.subsets)):
        torch.manual_seed(number)
        models.append(task.make_of(number)())
    weights, buffers = stack_module_state(models)
    base, names = copy.deepcopy(models[0]).to("meta"), list(weights)
    values = [own.detach() for own in weights.values()]
    momenta = [torch.zeros_like(own) for own in values]
    rates = torch.tensor([task.rate_of(number) for number in range(len(models))])
    by_row = [-rates.view(-1, *[1] * (own.ndim - 1)).expand_as(own) for own in values]

    def loss_of(weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(base, (weights, buffers), (x,)), y)

    gradients_of = vmap(grad(loss_of), randomness="different")
    ids = torch.from_numpy(np.stack(task.subsets))
    first = ids[:, : task.batch_size]
    # Untimed, as it takes a second and more.
    gradients_of(dict(zip(names, values, strict=True)), buffers, task.data[0][first], task.data[1][first])
    steps, begun = ids.shape[1] // task.batch_size, time.perf_counter()
    for _ in range(task.epochs):
        order = torch.stack([own[torch.randperm(len(own))] for own in ids])
        for batch in torch.split(order, task.batch_size, dim=1)[:steps]:
            now = dict(zip(names, values, strict=True))
            found = gradients_of(now, buffers, task.data[0][batch], task.data[1][batch])
            torch._foreach_mul_(momenta, 0.9)
            torch._foreach_add_(momenta, [found[name] for name in names])
            torch._foreach_addcmul_(values, by_row, momenta)
    seconds = time.perf_counter() - begun
    losses = vmap(loss_of, in_dims=(0, 0, None, None))(dict(zip(names, values, strict=True)), buffers, *task.test)
    return float(losses.mean()), len(ids) * steps * task.batch_size * task.epochs / seconds


def by_jax(task: Task) -> dict[str, Any]:
    """All models at once by JAX, in an environment of its own, which tells its own seconds and those of compiling."""
    (x, y), (test_x, test_y) = task.data, task.test
    if task.in_jax == "CNN":  # whose images have channels last
        x, test_x = x.permute(0, 2, 3, 1), test_x.permute(0, 2, 3, 1)
    rates = [task.rate_of(number) for number in range(len(task.subsets))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.npz"
        np.savez(
            path, x=x.numpy(), y=y.numpy(), test_x=test_x.numpy(), test_y=test_y.numpy(), ids=np.stack(task.subsets),
            rates=np.array(rates, np.float32), batch=task.batch_size, epochs=task.epochs,
        )  # fmt: skip
        words = [str(python_of("jax")), str(Path(__file__).with_name("jax_side.py")), str(path), task.in_jax]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise MissingError(f"not done after {_PATIENCE_S} s") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise MissingError(reason[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"models": len(task.subsets), "versions": versions("jax")}


def in_turns(name: str, quick: bool, turns: int) -> dict[str, list[float]]:
    """Samples a second of training, turn by turn: all models side by side, and by the loop on one thread and on all.

    The first call, which measures packs, is left out. Of the loop a few models tell as much as all.
    """
    task = task_of(name, quick)
    few = replace(task, subsets=task.subsets[:_FEW])
    rates: dict[str, list[float]] = {"many": [], "1": [], str(usable_cores()): []}
    many(task)
    for _ in range(turns):
        torch.set_num_threads(usable_cores())
        rates["many"].append(many(task)[1])
        for threads in {1, usable_cores()}:
            torch.set_num_threads(threads)
            rates[str(threads)].append(plain_loop(few)[1])
    return rates


def main(name: str, side: str, *rest: str) -> None:
    quick, threads = "--quick" in rest, next((int(own) for own in rest if own.isdigit()), usable_cores())
    torch.set_num_threads(threads)
    keep_freed_memory()
    if side == IN_TURNS:
        print(json.dumps(in_turns(name, quick, threads)))
        return
    task = task_of(name, quick)
    samples = len(task.subsets[0]) // task.batch_size * task.batch_size * task.epochs
    for models in (int(own.removeprefix(_COUNT)) for own in rest if own.startswith(_COUNT)):
        subsets = [task.subsets[n % len(task.subsets)] for n in range(models or len(task.subsets))]
        task = replace(task, subsets=subsets, epochs=-(-task.epochs // _SHORTER))
    if side == JAX:
        print(json.dumps(by_jax(task) | {"samples": samples}))
        return
    if FEW in rest:
        few = replace(task, subsets=task.subsets[: 4 * (usable_cores() if side == SIDES[3] else 1)])
        loss, rate = a_process_a_core(name, quick, len(few.subsets)) if side == SIDES[3] else plain_loop(few)
        taken = sum(len(ids) // task.batch_size * task.batch_size * task.epochs for ids in task.subsets)
        told = {"seconds": taken / rate, "models": len(task.subsets), "test_loss": loss, "images_per_s": rate}
        print(json.dumps(told | {"samples": samples}))
        return
    begun = time.perf_counter()
    if side in ("many", "packs by width"):
        padding.SHARE = padding.SHARE if side == "many" else 2.0  # more than there is: nothing is padded
        loss, rate = many(task)
    elif side == "plain loop":
        loss, rate = plain_loop(task)
    elif side == FUNC:
        loss, rate = functional(task)
    else:
        loss, rate = a_process_a_core(name, quick, len(task.subsets))
    seconds = time.perf_counter() - begun
    told = {"seconds": seconds, "models": len(task.subsets), "test_loss": loss, "images_per_s": rate}
    print(json.dumps(told | {"samples": samples}))


if __name__ == "__main__":
    main(*sys.argv[1:])
