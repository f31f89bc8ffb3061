"""One side of `run.py`, in a process and an environment of its own.

    python side.py MODULE DATA.npz OUT.npz OPTIONS

MODULE is a file beside this one, whose `fit(data, options)` returns predictions of the test part, probabilities
[N, classes] or values [N], or a dict: what it tells itself. OUT gets predictions. Prints JSON: the seconds of fitting,
without imports, the peak memory, and what the side tells.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np


def main(module: str, data: str, out: str, options: str) -> None:
    fit = importlib.import_module(module).fit
    arrays = dict(np.load(data))
    begun = time.perf_counter()
    found = fit(arrays, json.loads(options))
    seconds = time.perf_counter() - begun
    told = found if isinstance(found, dict) else {}
    if not told:
        np.savez(out, predictions=found)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024, **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
