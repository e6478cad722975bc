"""Results whose size a value decides: refused where they cannot be, for an allocation that fails ends the process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from math import prod

from lut4tool.storage import size_text


@cache
def memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(shape: Sequence[int], itemsize: int) -> None:
    """Raise ValueError for a dimension that is negative or past MLX's 32 bits, or more bytes than the machine has."""
    if any(not 0 <= size < 1 << 31 for size in shape):
        raise ValueError(f"there is no tensor of shape {list(shape)}")
    if prod(shape) * itemsize > memory():
        size = size_text(prod(shape) * itemsize)
        raise ValueError(f"a tensor of shape {list(shape)} takes {size}, more than this machine's memory")
