"""Compiles every kernel for a compute capability, with sizes of ResNet-32, and prints what each is; no GPU needed.

    python tests/integration/compile_kernels.py 90

Outside the tests' process, as Triton's interpreter and compiler do not live in one.
"""

from __future__ import annotations

import sys
import warnings
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossbow_py.data.resident import image_kernels
from crossbow_py.engine.kernels import batch_norm, convolution, cross_entropy, statistics, update
from crossbow_py.engine.kernels.geometry import Geometry

_TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
MODULES = (batch_norm, convolution, cross_entropy, image_kernels, update)


def compiled(kernel, grid, *arguments, **constants):
    """In place of a launch: compile for the capability asked for."""
    names = kernel.arg_names
    values = {**dict(zip(names, arguments, strict=False)), **{n: v for n, v in constants.items() if n in names}}
    options = {"enable_fp_fusion": True, **{name: value for name, value in constants.items() if name not in names}}
    signature, fixed, attributes = {}, {}, {}
    for place, name in enumerate(names):
        value = values[name]
        if value is None or name in constants:
            signature[name], fixed[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    print(kernel.__name__, len(binary.asm["cubin"]) > 0, binary.metadata.shared, "fma.rn" in binary.asm["ptx"])


def call_all():
    """Every public function once, for bfloat16, as a fused round of ResNet-32 with 8 learners does."""
    g = Geometry(16, 8, 16, 32, 32, 32, (3, 3), stride=(2, 2), padding=(1, 1))
    x = torch.zeros(g.batch, 128, 32, 32, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    w = torch.zeros(256, 16, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    cpu = torch.device("cpu")
    running = statistics.Statistics(torch.zeros(256), torch.zeros(256), 0.1, 1e-5)
    y, _ = convolution.forward(x, w, None, g, running, convolution.statistics_workspace(g, cpu))
    space = convolution.backward_workspace(g, cpu)
    convolution.backward(
        y, x, w, g, input_gradient=True, filter_gradient=torch.zeros(w.shape), workspace=space
    )
    rows = torch.zeros(4096, 128, dtype=torch.bfloat16)
    vectors = [torch.zeros(128) for _ in range(4)]
    space = batch_norm.workspace_for(4096, 128, torch.bfloat16, cpu)
    batch_norm.statistics(rows, vectors[0], vectors[1], 0.1, 1e-5, space)
    batch_norm.normalise(rows, *vectors, rows)
    batch_norm.backward_sums([rows, rows], rows, rows, *vectors, True, space)
    batch_norm.backward_inputs([rows, rows], rows, rows, *vectors[:3], *vectors[:2], True, True)
    classes = torch.zeros(8, 16, dtype=torch.int64)
    cross_entropy.cross_entropy_of_learners(torch.zeros(8, 16, 10, dtype=torch.bfloat16), classes)
    pixels, values = torch.zeros(4 * 40 * 40, 3, dtype=torch.uint8), torch.zeros(256, 3, dtype=torch.bfloat16)
    table = image_kernels.PixelTable(pixels, 40, values)
    batch = torch.zeros(8, 16, 32, 32, 3, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    targets = torch.zeros(4, dtype=torch.int64)
    for num_picks in (3, 7):
        image_kernels.gather_images(table, torch.zeros(num_picks, 128, dtype=torch.int64), batch, targets, classes)
    call_updates(cpu)


def call_updates(cpu):
    """Both optimizers."""
    tiles = update.make_tiles([(0, 0, 4096, True), (32768, 4096, 10, False)], cpu)
    w, z, double = torch.zeros(33000), torch.zeros(5000), torch.zeros(8, 8, dtype=torch.float64)
    for optimizer, states in ((update.SGD, 1), (update.ADAMW, 2)):
        rows = update.RowsToUpdate(w, w, (w,) * states, w.bfloat16(), z, z, None)
        update.squares(w, tiles, 8, double)
        update.prepare(double, double, double, double[0], double[0], w, 8, optimizer, loss_column=0, finite_column=1)
        update.update(rows, tiles, w, 8, optimizer, correction=0.1, momentum=0.9, total_squares=double[0])
    for rows in (z, z.double()):
        update.move(rows, rows, rows, 0.9)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert isinstance(statistics.merge, triton.runtime.JITFunction), "the interpreter is on"
    for module in MODULES:
        patch.object(module, "launch", compiled).start()
    call_all()
