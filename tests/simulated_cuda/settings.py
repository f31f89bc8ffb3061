"""The settings of a simulated device, from the environment, which children inherit."""

from __future__ import annotations

import os

from tests.simulated_cuda.scheduler import ORDERS

_MOST_DEVICES = 8  # as in `device.cpp`
_MOST_GIB = 64  # the addresses that a device has


class Settings:
    """The device that is simulated.

    `visible` has the indices of the devices that CUDA_VISIBLE_DEVICES leaves: as CUDA reads it, those before the first
    that is not there.

    Raises:
        ValueError: a setting is none that there is. The message says what it has to be.
    """

    def __init__(self, environment=os.environ):
        def setting(name, default, rule, read):
            given = environment.get(f"SIMULATED_CUDA_{name}") or default
            try:
                return read(given)
            except ValueError:
                message = f"SIMULATED_CUDA_{name} has to be {rule}, got {given!r}: change or unset it (for {default})."
                raise ValueError(message) from None

        self.order = setting("ORDER", "random", f"one of {', '.join(ORDERS)}", lambda given: _among(given, ORDERS))
        self.seed = setting("SEED", "0", "a whole number", int)
        counts = f"a whole number from 1 to {_MOST_DEVICES}"
        devices = setting("DEVICES", "1", counts, lambda given: _among(int(given), range(1, _MOST_DEVICES + 1)))
        self.total_bytes = setting("GIB", "4", f"a number above 0, and at most {_MOST_GIB}", _bytes)
        self.is_strict = setting("STRICT", "0", "0 or 1", lambda given: _among(given, ("0", "1"))) == "1"
        self.capability = setting("CAPABILITY", "9.0", "two whole numbers with a dot between them", _version)
        self.visible = _visible(environment.get("CUDA_VISIBLE_DEVICES"), devices)

    @property
    def num_devices(self):
        return len(self.visible)


def _among(given, allowed):
    if given not in allowed:
        raise ValueError
    return given


def _bytes(given):
    if not 0 < float(given) <= _MOST_GIB:
        raise ValueError
    return int(float(given) * 2**30)


def _version(given):
    major, minor = map(int, given.split("."))
    return major, minor


def _visible(given, num_devices):
    if given is None:
        return list(range(num_devices))
    found = []
    for each in map(str.strip, given.split(",")):
        if not each.isdecimal() or int(each) >= num_devices or int(each) in found:
            break
        found.append(int(each))
    return found
