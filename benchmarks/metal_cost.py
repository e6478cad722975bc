"""What the Metal kernels ask of a GPU, counted by the simulator of tests/metal_sim, beside one tile that serves all M.

    python benchmarks/metal_cost.py [--shape N,K] [--m 1,4,16,64] [--json]

Counts are loads and stores of single threads (a load of 16 bytes is one) and bytes, for each weight element. They are
no times: only a Mac shows those. The baseline restates a kernel with one 16 x 16 tile for every M, which fetches a
byte, a codebook entry and a scale for each element; its half-precision products decode the whole weight first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import lut4tool.runtime.backend  # noqa: F401  before mlx.core

import mlx.core as mx  # isort: skip

from lut4tool.formats import NF4, Lookup4Weight
from lut4tool.kernels import MLX_FLOAT, metal
from lut4tool.kernels.metal.source import HEADER, built
from tests.metal_sim import Call, How, Simulator

BLOCK = 64

# x [M, K], W [N, K] in blocks: a thread makes one output, and decodes one weight a tile.
TILE = """
constexpr uint SIDE = 16;
threadgroup float xs[SIDE * SIDE];
threadgroup float ws[SIDE * SIDE];
uint M = x_shape[0], K = x_shape[1], N = dims[0];
uint column = thread_position_in_threadgroup.x, row = thread_position_in_threadgroup.y;
uint n0 = threadgroup_position_in_grid.x * SIDE, m = threadgroup_position_in_grid.y * SIDE + row;
float sum = 0.0f;
for (uint k0 = 0; k0 < K; k0 += SIDE) {
  uint k = k0 + column;
  xs[row * SIDE + column] = m < M && k < K ? float(x[m * K + k]) : 0.0f;
  uint n = n0 + row;
  float weight = 0.0f;
  if (n < N && k < K) {
    uint element = n * K + k;
    uint byte = packed[element / 2];
    uint code = element % 2 == 0 ? byte >> 4 : byte & 15;
    weight = levels[code] * scales[element / BLOCK];
  }
  ws[row * SIDE + column] = weight;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < SIDE; ++i) sum += xs[row * SIDE + i] * ws[column * SIDE + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (m < M && n0 + column < N) y[m * N + n0 + column] = T(sum);
"""

DECODE = """
uint element = thread_position_in_grid.x;
uint byte = packed[element / 2];
uint code = element % 2 == 0 ? byte >> 4 : byte & 15;
w[element] = W(levels[code] * scales[element / BLOCK]);
"""

DENSE_TILE = (
    TILE.replace("uint byte = packed[element / 2];", "")
    .replace("uint code = element % 2 == 0 ? byte >> 4 : byte & 15;", "")
    .replace("levels[code] * scales[element / BLOCK]", "float(w[element])")
)


@dataclass(frozen=True)
class Row:
    """The cost of one product; all but the totals are for each weight element (m: in thousandths)."""

    kernel: str
    dtype: str
    m: int
    device_requests: float
    device_bytes: float
    threadgroup_requests: float
    threadgroup_bytes: float
    matrix_products_m: float
    simdgroup_operations_m: float
    barriers: int
    written_bytes: int


def row(name: str, dtype: str, m: int, elements: int, calls: Sequence[Call]) -> Row:
    """Add up the launches of a product."""
    costs = [call.cost for call in calls]
    device = [traffic for cost in costs for traffic in (cost.device_reads, cost.device_writes)]
    shared = [traffic for cost in costs for traffic in (cost.threadgroup_reads, cost.threadgroup_writes)]
    products = sum(cost.matrix_products for cost in costs)
    return Row(
        kernel=f"{name}: {' + '.join(call.name.removeprefix('lut4tool_') for call in calls)}",
        dtype=dtype,
        m=m,
        device_requests=sum(traffic.requests for traffic in device) / elements,
        device_bytes=sum(traffic.bytes for traffic in device) / elements,
        threadgroup_requests=sum(traffic.requests for traffic in shared) / elements,
        threadgroup_bytes=sum(traffic.bytes for traffic in shared) / elements,
        matrix_products_m=1000 * products / elements,
        simdgroup_operations_m=1000 * (sum(cost.meetings for cost in costs) - products) / elements,
        barriers=sum(cost.barriers for cost in costs),
        written_bytes=sum(cost.device_writes.bytes for cost in costs),
    )


def weight_of(n: int, k: int, dtype: str, along_k: bool = False) -> Lookup4Weight:
    """A weight of N x K codes, lines along K unless along_k."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, n * k // 2, dtype=np.uint8)
    scales = (rng.random(n * k // BLOCK) + 0.5).astype(np.float32)
    rows, cols, perm = (k, n, (0, 1)) if along_k else (n, k, (1, 0))
    return Lookup4Weight(packed, scales, NF4, rows, cols, BLOCK, perm, True, dtype)


def counted(product: Callable[[Simulator], Any]) -> list[Call]:
    """Run a product with the simulator in MLX's place."""
    simulator = Simulator(How("check", "forward"))
    real, there = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel, mx.metal.is_available = simulator.metal_kernel, lambda: True
    built.cache_clear()
    try:
        product(simulator)
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = real, there
        built.cache_clear()
    return simulator.calls


def ours(n: int, k: int, dtype: str, m: int, along_k: bool = False) -> Row:
    """The cost of lut4tool's product of x [m, k] with a weight of n columns."""
    x = mx.ones((m, k), MLX_FLOAT[dtype])
    weight = weight_of(n, k, dtype, along_k)
    calls = counted(lambda _: metal.lookup4_matmul(x, weight))
    return row("lut4tool, lines along N" if along_k else "lut4tool", dtype, m, n * k, calls)


def baseline(n: int, k: int, dtype: str, m: int) -> Row:
    """The cost of the one tile for every M."""
    weight, kind = weight_of(n, k, dtype), MLX_FLOAT[dtype]
    arrays = [mx.array(weight.packed), mx.array(weight.scales), mx.array(weight.codebook)]
    dims, x = mx.array([n, k], mx.uint32), mx.ones((m, k), kind)
    tile = {"grid": (-(-n // 16) * 16, -(-m // 16) * 16, 1), "threadgroup": (16, 16, 1)}
    product = {"output_shapes": [(m, n)], "output_dtypes": [kind], "template": [("T", kind), ("BLOCK", BLOCK)], **tile}

    def launch(simulator: Simulator) -> None:
        names = ["packed", "scales", "levels"]
        if dtype == "float32":
            kernel = simulator.metal_kernel("tile_16x16", ["x", *names, "dims"], ["y"], TILE, HEADER)
            kernel(inputs=[x, *arrays, dims], **product)
            return
        decode = simulator.metal_kernel("decode_by_element", names, ["w"], DECODE, HEADER)
        facts = [("W", kind), ("BLOCK", BLOCK)]
        shape: dict[str, Any] = {"output_shapes": [(n, k)], "output_dtypes": [kind]}
        (w,) = decode(inputs=arrays, grid=(n * k, 1, 1), threadgroup=(256, 1, 1), template=facts, **shape)
        simulator.metal_kernel("tile_16x16", ["x", "w", "dims"], ["y"], DENSE_TILE, HEADER)(
            inputs=[x, w, dims], **product
        )

    return row("one tile", dtype, m, n * k, counted(launch))


def table(n: int, k: int, rows_of_x: Sequence[int]) -> list[Row]:
    """All rows for a shape."""
    rows = []
    for dtype in ("float32", "float16"):
        for m in rows_of_x:
            rows += [baseline(n, k, dtype, m), ours(n, k, dtype, m), ours(n, k, dtype, m, along_k=True)]
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="256,1024")
    parser.add_argument("--m", default="1,4,16,64")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    n, k = map(int, given.shape.split(","))
    rows = table(n, k, [int(m) for m in given.m.split(",")])
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"N {n}, K {k}, block {BLOCK}; requests and bytes for each weight element")
    heads = ("M", "type", "dev req", "dev bytes", "tg req", "tg bytes", "mma/1000", "simd/1000", "barriers", "written")
    print(("{:>4} {:9}" + " {:>9}" * 8 + "  kernel").format(*heads))
    for r in rows:
        numbers = (r.device_requests, r.device_bytes, r.threadgroup_requests, r.threadgroup_bytes)
        numbers += (r.matrix_products_m, r.simdgroup_operations_m)
        columns = " ".join(f"{number:9.3f}" for number in numbers)
        print(f"{r.m:4} {r.dtype:9} {columns} {r.barriers:9} {r.written_bytes:9}  {r.kernel}")


if __name__ == "__main__":
    main()
