"""The place of a process on its host: its share of the cores, and a GPU of its own."""

from __future__ import annotations

import os

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import prepare_environment, read_host


def take_place(index: int, number: int, *, on_gpu: bool) -> None:
    """Give this process its share of the host's cores as threads and, with `on_gpu`, a GPU as its current device.

    Args:
        index: the GPU, of those that the process sees.
        number: the processes that share the host.
        on_gpu: whether there are GPUs, and they are wanted.

    Raises UserError if the process sees fewer GPUs.
    """
    # torchrun sets one thread, unless the user set another number.
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, read_host().cores // number))
    if not on_gpu:
        return
    prepare_environment()
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"there are {number} ranks on this host and {count} GPUs, and each rank needs its own; set "
            f"--nproc-per-node={count}, as learners and packs share a GPU, or device=cpu."
        )
    torch.cuda.set_device(index)
