"""Memory of the host that is freed in every round: kept for the next one."""

from __future__ import annotations

import ctypes
import functools
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_HUGEPAGE = 14
_BLOCK, _HUGE_PAGE = 2**30 - 2**21, 2**21  # the largest glibc takes from its heap; of x86 and most ARM kernels


@functools.cache
def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks instead of returning them to the kernel after every round, and in huge pages.

    Activations are freed and allocated again each round; by default each time costs page faults (measured on two
    cores, ResNet-32 b=16, 45 steps: over 10⁵ faults against 2 to 10 · 10³), and rounds of many learners walk through
    more small pages than a core remembers (MLP, K=8, fused: 7 to 14 % of a round). It holds for the whole process, for
    good. Call it before what is to lie there is allocated. Elsewhere than with glibc nothing is done.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    # Older glibc caps the mmap threshold at 32 MiB. Trimming is touched only when that worked: alone, it would turn
    # off glibc's own growing threshold and make things worse.
    whole = mallopt(_M_MMAP_THRESHOLD, 2**30)
    if not (whole or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    if whole and hasattr(libc, "madvise"):
        _reserve_huge_pages(libc, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def _reserve_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Stretch glibc's heap by `size` bytes, asked for in huge pages. It takes addresses alone, no memory until used."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [libc.malloc(_BLOCK) for _ in range(max(1, size // _BLOCK))]
    for block in blocks:
        if block is not None:  # the kernel may refuse to promise so much
            first, end = -(-block // _HUGE_PAGE) * _HUGE_PAGE, (block + _BLOCK) // _HUGE_PAGE * _HUGE_PAGE
            libc.madvise(first, end - first, _MADV_HUGEPAGE)  # an error means small pages, as before
            libc.free(block)
