"""What has to be set before torch is imported; imported first, by the package itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, MutableMapping

# Of a thread that waits for the others of its operator, before it sleeps: 2,000 looks instead of GNU OpenMP's 300,000.
# Waiting threads of another process then leave the cores to those that work. Measured on two cores, MLP, K=8, fused,
# beside a second process of torch's: 2 to 5 times the throughput; alone, no difference that the noise would show.
SPIN_COUNT = "2000"


def limit_spinning(variables: MutableMapping[str, str], modules: Container[str]) -> None:
    """Set `GOMP_SPINCOUNT`, unless the user has said how threads wait or torch is there already, when it is too late."""
    if "torch" not in modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & variables.keys():
        variables["GOMP_SPINCOUNT"] = SPIN_COUNT


limit_spinning(os.environ, sys.modules)
