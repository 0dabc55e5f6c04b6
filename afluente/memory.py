"""How a long process is to use memory: few heaps for its threads, and no search for cycles that are not there."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1  # malloc.h


def use_few_heaps() -> None:
    """Two heaps for all threads, not one for each: a large backlog takes 100 MB instead of 120, and hardly more time.
    And what was fetched goes back at once: buffers of that size would otherwise leave holes in a heap.

    To be called before the first thread begins: the limit is fixed then.
    """
    with suppress(AttributeError, OSError):  # glibc has it, others need it not
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_ARENA_MAX, 2)
        malloc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
        malloc.mallopt(_M_TRIM_THRESHOLD, 512 * 1024)


def expect_no_cycles(objects: int) -> None:
    """What is in hand is small objects by the ten thousand that form no cycles: looking for some took a tenth to a
    fifth of the time. Beyond `objects`, which are more than are ever in hand at once, it is looked for after all."""
    gc.freeze()
    gc.set_threshold(objects, 10, 10)
