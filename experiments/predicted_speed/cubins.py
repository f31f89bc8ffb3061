"""Compiles kernels for a GPU that is not here, and reads from the result what decides how many run at once.

    TRITON_INTERPRET=0 python -m experiments.predicted_speed.cubins CAPABILITY < forms.json

A process of its own, as Triton's interpreter and its compiler do not live in one. `forms.json` has what
`launches.compiled_form` gives, by key; the output has by key registers, spills, shared memory, warps and instructions.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_TYPES = {"fp32": tl.float32, "fp64": tl.float64}
_PRODUCTS = re.compile(r"\b(HGMMA|HMMA|FFMA2?)\b")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_TARGET = re.compile(r"\bBRA\b.*?(?:0x)?([0-9a-f]+)\s*$")
_FEWEST_OF_A_PRODUCT = 256  # multiplications of float32; norms have fewer


def compiled(form: Mapping[str, Any], capability: int) -> dict[str, Any]:
    """Compile a kernel and return its resources as plain values."""
    kernel = getattr(importlib.import_module(form["module"]), form["kernel"])
    constants = {name: _constant(value) for name, value in form["constants"].items()}
    options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
    signature, fixed, attributes = {}, dict(constants), {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = form["arguments"][name]
        if not isinstance(kind, str):  # absent, or 1, for which Triton compiles by itself
            signature[name], fixed[name] = "constexpr", kind
            continue
        signature[name] = kind.partition(",")[0]
        if kind.startswith("*") or kind.endswith(", 16"):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        used, listing = _cuobjdump("--dump-resource-usage", file.name), _cuobjdump("-sass", file.name)
    return {
        "registers": _number(r"REG:(\d+)", used),
        "spilled_bytes": _number(r"STACK:(\d+)", used) + _number(r"LOCAL:(\d+)", used),
        "shared_bytes": int(binary.metadata.shared),
        "warps": int(binary.metadata.num_warps),
        **instructions(listing, 1 + bool(constants.get("DATA") and constants.get("FILTERS"))),
    }


def instructions(listing: str, paths: int = 1) -> dict[str, Any]:
    """Return how many instructions a program of a kernel has, and how it multiplies.

    Args:
        listing: the machine code as `cuobjdump -sass` lists it.
        paths: of how many alike paths a program takes one.

    Returns:
        `loop`: those of a turn of a main loop, which has the products (0 if it is unrolled or there is none), the mean
        over main loops; `outside`: all others of a path, most of which a program runs once; `product`: the instruction
        that multiplies; `asynchronous`: whether values come to shared memory without being waited for.
    """
    code = [(int(at, 16), text) for at, text in _INSTRUCTION.findall(listing) if not text.startswith("NOP")]
    kinds = [found[1] for _, text in code if (found := _PRODUCTS.search(text))]
    product = next((kind for kind in ("HGMMA", "HMMA") if kind in kinds), None)
    if product is None and kinds.count("FFMA") + kinds.count("FFMA2") >= _FEWEST_OF_A_PRODUCT:
        product = "FFMA"
    loops = []
    for at, text in code:
        target = _TARGET.search(text)
        if target and (begin := int(target[1], 16)) < at:
            loops.append((begin, at, [line for place, line in code if begin <= place <= at]))
    inner = [loop for loop in loops if not any(o is not loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    bodies = [body for _, _, body in inner if product and any(re.search(rf"\b{product}", line) for line in body)]
    within = sum(map(len, bodies))
    return {
        "loop": within // max(1, len(bodies)),
        "outside": (len(code) - within) // paths,
        "product": product,
        "asynchronous": any(text.startswith("LDGSTS") or " LDGSTS" in text for _, text in code),
    }


def _constant(value: Any) -> Any:
    return _TYPES[value["dtype"]] if isinstance(value, dict) else value


def _number(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)


def _cuobjdump(*arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def answer(forms: Mapping[str, Mapping[str, Any]], capability: int) -> dict[str, Any]:
    kernels = {}
    for number, (key, form) in enumerate(forms.items(), 1):
        print(f"\rcompiled {number} of {len(forms)}", end="", file=sys.stderr, flush=True)
        kernels[key] = compiled(form, capability)
    print(file=sys.stderr)
    return {"triton": triton.__version__, "kernels": kernels}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin), int(sys.argv[1]))))
