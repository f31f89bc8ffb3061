"""Compiles the kernels that runs and the ladder launch, for a GPU that is not there, into $TRITON_CACHE_DIR.

    PYTHONPATH=. TRITON_CACHE_DIR=FOLDER python tests/integration/compile_ahead.py --capability 90

A Triton of the same version finds them there. Launches of rounds are those of `compile_kernels.py`; the checks of the
ladder's variants run as they are, with launches that are kept instead of run, and what they compare is of no interest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossbow_py.core.switches import KERNELS
from crossbow_py.core.triton_launch import recorded
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.train.ladder import variants as ladder
from tests.integration.compile_kernels import Variants, launches_go_to, run_round

FOUND = {}  # by key; forked processes compile a share each


def find(models, learners):
    for precision in (BF16, FP32):
        variants = Variants()
        with launches_go_to(variants), recorded(runs=False):
            for variants.num_learners in learners:
                for model in models:
                    run_round(model, variants.num_learners, precision, SGD())
            for family in KERNELS:
                for variant in ladder.variants(family, torch.device("cpu"), precision):
                    ladder.failure_of(variant)
        FOUND.update(variants.found)


def compiles(job):
    key, capability = job
    kernel, (signature, constants, attributes), options = FOUND[key]
    source = ASTSource(kernel, signature, constants, attributes)
    try:
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # compilers raise anything
        print(f"{key} does not compile: {' '.join(str(error).split())[:300]}", flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--models", nargs="+", default=["resnet32", "lenet"])
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 3, 4, 8, 16])
    given = parser.parse_args()
    find(given.models, given.learners)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        done = pool.map(compiles, [(key, given.capability) for key in FOUND], chunksize=4)
    print(f"kernels: {sum(done)} of {len(done)} compiled by Triton {triton.__version__}")
    return int(not all(done))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
