"""The most rows of x that each kernel is picked for, the last kernel of a line for all the rest.

cpu: by layout and instruction set, for 14336 x 4096; `python benchmarks/kernels_cpu.py --thresholds` measures and
writes it. metal: by class of type; no Mac was at hand, so it is reasoned, not measured: a GEMV reads each weight once
for up to 8 rows, and in float32 a dense product of MLX is not within the bound. cuda's is kernels/cuda/thresholds.py,
which benchmarks/kernels_cuda.py writes.
"""

from __future__ import annotations

MOST_ROWS: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {
        "W [N, K], amx": {"gemv": 3, "tile": 12, "digits": 1 << 62},
        "W [N, K], bfloat16, amx": {"gemv": 1, "bf16": 1 << 62},
        "W [N, K], avx512": {"gemv": 4, "tile": 1 << 62},
        "W [N, K], avx2": {"gemv": 2, "tile": 1 << 62},
        "W [K, N], amx": {"gemv": 5, "tile": 24, "digits": 1 << 62},
        "W [K, N], bfloat16, amx": {"gemv": 1, "bf16": 1 << 62},
        "W [K, N], avx512": {"gemv": 4, "tile": 1 << 62},
        "W [K, N], avx2": {"gemv": 3, "tile": 1 << 62},
    },
    "metal": {"half": {"gemv": 8, "tile": 256}, "float32": {"gemv": 8, "tile": 1 << 62}},
}


def pick(backend: str, group: str, rows: int) -> str:
    """Name the kernel for a number of rows of x; "decode" where none of the table's is picked for so many."""
    return next((name for name, most in MOST_ROWS[backend][group].items() if rows <= most), "decode")
