"""Compiles the kernels that fused rounds launch, for GPUs that are not there, and prints what each is, a line of JSON.

    python tests/integration/compile_kernels.py --capabilities 80 90 --models resnet32 --learners 2 5

Whole rounds run on the CPU with kernels that do nothing. Each launch goes through Triton's own specialisation, so what
is compiled is what a run compiles: types, constants, and which integers are 1 or multiples of 16. Beside rounds, the
launches are made that rounds of these models leave out. Prints the key of each variant and the number of learners it
was seen with; with capabilities also its registers, bytes of spilled ones and of shared memory, whether a product and
a sum round once, and how many instructions compute with two 16-bit integers at once. Exits with 1 if one does not
compile.

Runs outside of the tests' process, as Triton's interpreter and compiler do not live in one; with any Triton from 3.6.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from crossbow_py.averaging import SMA
from crossbow_py.data.resident import image_kernels
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.fusion.units import convolution as units
from crossbow_py.engine.fusion.units import unit_step
from crossbow_py.engine.kernels import batch_norm, checks, convolution, cross_entropy, update
from crossbow_py.engine.kernels.geometry import Geometry
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.trust.remember import assumed
from crossbow_py.engine.update import kernel_update
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.models import MODELS
from tests.recording_streams import RecordingStreams
from tests.support import make_tasks, plan

MODULES = (batch_norm, convolution, cross_entropy, image_kernels, update)
PRECISIONS = {"fp32": FP32, "bf16": BF16}
SHAPES = {"lenet": (1, 28, 28)}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PACKED = re.compile(r"\b(add|sub|min|max)\.[su]16x2")
CPU = torch.device("cpu")


class Variants:
    """In place of launches: keeps a source for each specialisation of a kernel.

    Attributes:
        found: by key, the kernel, its source but for the target, and the options.
        seen: by key, the numbers of learners that it was launched with.
        num_learners: that of the launches to come.
    """

    def __init__(self) -> None:
        self.found, self.seen, self.num_learners = {}, {}, 0
        self._backend, self._binders = make_backend(GPUTarget("cuda", 90, 32)), {}

    def launch(self, kernel, grid, *arguments, **constants):
        """Triton's own steps up to compiling, see `JITFunction.run`."""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        named = {"enable_fp_fusion": True, **constants}
        bound, specialised, options = self._binders[kernel](*arguments, **named)
        text = f"{kernel.__name__} {specialised} {sorted(options.items())}"
        key = f"{kernel.__name__} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.seen.setdefault(key, set()).add(self.num_learners)
        if key not in self.found:
            _, *source = kernel._pack_args(self._backend, named, bound, specialised, options)
            self.found[key] = kernel, source, options


class EveryWay:
    """Tries the kernel as a measurement on a GPU does, and takes it."""

    notes = ()

    def choose(self, key, candidates, default):
        candidates[units.IMPLICIT]()
        return units.IMPLICIT

    def is_right(self, name, run, expected):
        run()
        return True


@contextlib.contextmanager
def launches_go_to(variants):
    """Everything believes in a GPU on which each kernel was compared already."""
    places = [
        *((module, "launch", variants.launch) for module in MODULES), (checks, "unavailable", lambda _: None),
        (kernel_update, "unavailable", lambda _: None), (units, "unavailable", lambda _: None),
    ]  # fmt: skip
    with assumed("kernels", None), assumed("fused graph", None), contextlib.ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(patch.object(module, name, value))
        yield


def run_round(model, num_learners, precision, optimizer):
    """One round of a model, and what comes before it."""
    shape = SHAPES.get(model, (3, 32, 32))
    images = torch.randint(0, 256, (64, *shape), dtype=torch.uint8), torch.arange(64) % 10
    tasks = make_tasks(
        lambda: MODELS[model]().build(shape, 10), num_learners=num_learners, data=images, order="blocks",
        batch_size=16, precision=precision, kernels=True, optimizer=optimizer, rule=SMA(),
    )  # fmt: skip
    with patch.object(unit_step, "choices_on", lambda device: EveryWay()):
        runner = FusedExecutor(tasks, RecordingStreams(), kernels=True)
        runner.submit(plan(tasks, 0))
        runner.drain()
    assert runner.notes == [], runner.notes


def launch_what_rounds_leave_out(num_learners, precision):
    """Several groups and ranks, erasing, batches that lie side by side, and a norm without ReLU or residual."""
    k, dtype = num_learners, precision.compute
    update_rows(k, precision)
    table = image_kernels.PixelTable(
        torch.zeros(4 * 40 * 40, 3, dtype=torch.uint8), 40, torch.zeros(256, 3, dtype=dtype)
    )
    targets, classes = torch.zeros(4, dtype=torch.int64), torch.zeros(k, 16, dtype=torch.int64)
    for order in ((0, 1, 4, 2, 3), (3, 0, 4, 1, 2)):
        shape = (k, 16, 32, 32, 3) if order[0] == 0 else (16, 32, 32, k, 3)
        for picks in (3, 7):
            batch = torch.zeros(shape, dtype=dtype).permute(order)
            image_kernels.gather_images(table, torch.zeros(picks, k * 16, dtype=torch.int64), batch, targets, classes)
    rows, vectors = torch.zeros(4096, 32 * k, dtype=dtype), [torch.zeros(32 * k) for _ in range(4)]
    space = batch_norm.workspace_for(4096, 32 * k, dtype, CPU)
    for relu in (True, False):
        for gradients in ([rows], [rows, rows]):
            batch_norm.backward_sums(gradients, rows, rows, *vectors, relu, space)
            for residual in (True, False):
                batch_norm.normalise(rows, *vectors, rows if residual else None, relu)
                batch_norm.backward_inputs(gradients, rows, rows, *vectors[:3], *vectors[:2], relu, residual)
    for running in ((None, None), vectors[:2]):
        batch_norm.statistics(rows, *running, 0.1, 1e-5, space)
    g = Geometry(16, k, 16, 32, 32, 32, (3, 3), padding=(1, 1))
    x, w = (torch.zeros(s, dtype=dtype).to(memory_format=torch.channels_last) for s in
            ((16, 16 * k, 32, 32), (32 * k, 16, 3, 3)))  # fmt: skip
    convolution.forward(x, w, torch.zeros(32 * k, dtype=dtype), g)


def launch_backward(geometry, precision):
    """Both gradients of a convolution, in one launch."""
    g, dtype = geometry, precision.compute
    x, y, w = (torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last) for shape in (
        (g.batch, g.groups * g.in_channels, g.height, g.width), (g.batch, g.groups * g.out_channels, *g.out_size),
        (g.groups * g.out_channels, g.in_channels, *g.kernel),
    ))  # fmt: skip
    convolution.backward(
        y, x, w, g, input_gradient=True, filter_gradient=torch.zeros_like(w, dtype=torch.float32),
        workspace=convolution.backward_workspace(g, CPU),
    )  # fmt: skip


def update_rows(k, precision):
    """z that moves later, rounds that do not average, one to four totals."""
    tiles = update.make_tiles([(0, 0, 4096, True), (32768, 4096, 10, False)], CPU)
    w, z, double = torch.zeros(33000), torch.zeros(5000), torch.zeros(8, 8, dtype=torch.float64)
    for optimizer, states in ((update.SGD, 0), (update.SGD, 1), (update.ADAMW, 2)):
        for correction, momentum, total in ((0.1, 0.9, None), (0.1, None, z), (None, None, None), (None, None, z)):
            follows = correction is not None and states == 1
            shadow = w.bfloat16() if precision is BF16 else None
            rows = update.RowsToUpdate(w, w, (w,) * states, shadow, z, z, total)
            update.update(
                rows, tiles, w, k, optimizer, correction=correction, momentum=momentum, share=0.5, follows=follows,
                total_squares=double[0],
            )  # fmt: skip
    update.move(z, z, z, 0.9)


def resources(cubin):
    """A thread's registers, and bytes of spilled ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{word}:(\d+)", said)[1])
            for name, word in (("registers", "REG"), ("spilled", "STACK"))}  # fmt: skip


def compile_for(capability, kernel, source, options):
    """Compile, and say what came out."""
    signature, constants, attributes = source
    made = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    ptx = made.asm["ptx"]
    return {"shared": made.metadata.shared, "fuses": "fma.rn" in ptx, "packed": len(PACKED.findall(ptx)),
            "warps": made.metadata.num_warps, **resources(made.asm["cubin"])}  # fmt: skip


def arguments_of_the_command():
    parser = argparse.ArgumentParser()
    parser.add_argument("--capabilities", type=int, nargs="*", default=[])
    parser.add_argument("--models", nargs="+", default=["resnet32"], choices=list(MODELS))
    parser.add_argument("--learners", type=int, nargs="+", default=[2])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument(
        "--backward", type=int, nargs=6, metavar=tuple("BGCOHW"), help="only the gradients of this 3x3 convolution"
    )
    parser.add_argument("--each", type=int, help="compile at most so many variants of each kernel, spread over all")
    return parser.parse_args()


def spread(keys, most):
    """At most so many keys of each kernel, from the first to the last."""
    by_kernel = {}
    for key in keys:
        by_kernel.setdefault(key.split()[0], []).append(key)
    for own in by_kernel.values():
        steps = len(own) if most is None else min(most, len(own))
        yield from (own[round(n * (len(own) - 1) / max(steps - 1, 1))] for n in range(steps))


def main() -> int:
    """Find the variants, compile each, and print them."""
    given, failed = arguments_of_the_command(), False
    for precision in given.precisions:
        variants = Variants()
        with launches_go_to(variants):
            if given.backward:
                launch_backward(Geometry(*given.backward, (3, 3), padding=(1, 1)), PRECISIONS[precision])
            for variants.num_learners in [] if given.backward else given.learners:
                for model in given.models:
                    for optimizer in (SGD(), AdamW()) if model == given.models[0] else (SGD(),):
                        run_round(model, variants.num_learners, PRECISIONS[precision], optimizer)
                launch_what_rounds_leave_out(variants.num_learners, PRECISIONS[precision])
        for key in spread(variants.found, given.each):
            kernel, source, options = variants.found[key]
            learners = sorted(variants.seen[key])
            said = {"kernel": kernel.__name__, "key": key, "precision": precision, "learners": learners}
            for capability in given.capabilities or [None]:
                try:
                    made = {} if capability is None else compile_for(capability, kernel, source, options)
                except Exception as error:  # compilers raise anything
                    made, failed = {"error": " ".join(str(error).split())[:300]}, True
                print(json.dumps({**said, "capability": capability, **made}), flush=True)
    return int(failed)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert isinstance(update._move, triton.runtime.JITFunction), "the interpreter is on"
    sys.exit(main())
