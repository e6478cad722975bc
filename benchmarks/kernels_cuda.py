"""Time the CUDA kernels of this machine's GPU beside torch and bitsandbytes: microseconds of device time a product.

    python benchmarks/kernels_cuda.py [--only TEXT] [--no-peers] [--json FILE]     the table, in one run
    python benchmarks/kernels_cuda.py --thresholds      time each kernel for each M, write where they cross
    python benchmarks/kernels_cuda.py --once lookup4:bfloat16:14336x4096:1     a product of 4 weights, for a profiler

Every call of a graph takes another weight, 1.3 GB and more in turn, so that nothing is in the L2 cache. Caches are not
flushed besides, clocks are left alone. A decode and MLX's product are timed by the wall clock over many products in one
evaluation; they take longer on the GPU than on the host. The floor is packed bytes and scales over the
bandwidth that a copy of 4 GB reaches here. Peers: torch's dense product, bitsandbytes' matmul_4bit (NF4, block 64).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

BF16_BARS = {1: 16, 2: 0, 4: 17, 8: 0, 16: 22, 32: 0, 64: 0, 128: 45, 256: 0, 512: 0, 1024: 0, 2048: 420}
FLOAT_BARS = {1: 15, 2: 0, 4: 22, 8: 0, 16: 60, 64: 0, 128: 0, 512: 0}
#: kind, type, N, K, block, M, bar in microseconds (0: none)
CASES = [
    *(("lookup4", "bfloat16", 14336, 4096, 64, m, bar) for m, bar in BF16_BARS.items()),
    *(("lookup4", "float32", 14336, 4096, 64, m, bar) for m, bar in FLOAT_BARS.items()),
    ("lookup4", "bfloat16", 28672, 8192, 64, 1, 50),
    ("lookup4", "float32", 28672, 8192, 64, 1, 50),
    *(("lookup4", "bfloat16", 4096, 4096, 64, m, 0) for m in (1, 16, 128, 512)),
    ("lookup4", "float32", 4096, 4096, 64, 1, 0),
    *(("qmm", "bfloat16", 14336, 4096, 32, m, bar) for m, bar in ((1, 20), (16, 0), (128, 60), (512, 0), (2048, 450))),
]  # fmt: skip
THRESHOLDS = Path(__file__).parents[1] / "lut4tool/kernels/cuda/thresholds.py"
CROSSINGS = {"bfloat16": (1, 4, 8, 12, 16, 32, 48, 64, 128, 512, 2048, 8192), "float32": (1, 2, 4, 6, 8, 16)}


def ours(kind: str, dtype: str, n: int, k: int, block: int, sets: int) -> Iterator[Any]:
    """Random weights in the kernels' own order."""
    import mlx.core as mx
    import numpy as np

    from lut4tool.formats import NF4
    from lut4tool.kernels.cuda.weights import CHUNK, TILE, DeviceWeight

    chunks, groups, half = k // CHUNK, CHUNK // block, dtype != "float32"
    tile = TILE[half]
    book = mx.array(NF4 if kind == "lookup4" else np.arange(16, dtype=np.float32))
    for _ in range(sets):
        codes = mx.random.randint(0, 256, (n // tile, chunks, tile, CHUNK // 2)).astype(mx.uint8)
        scales = mx.random.uniform(0.01, 0.1, (n // tile, chunks, tile, groups))
        if kind == "qmm" and half:
            low = scales.astype(mx.bfloat16).view(mx.uint16).astype(mx.uint32)
            high = mx.array(-136.0, mx.bfloat16).view(mx.uint16).astype(mx.uint32)
            scales = low | (high << 16)
        sizes = mx.array([n, k], mx.int32)
        mx.eval(codes, scales, book, sizes)
        affine = kind == "qmm"
        yield DeviceWeight(n, tile, codes, book, scales, scales, groups, 0, affine, False, True, True, k, sizes)


def product(dtype: str, kernel: str) -> Callable[[Any, Any], Any]:
    """The product of x and a weight by one kernel."""
    import mlx.core as mx

    from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, tile_float, tile_half, wide_half

    if kernel == "decode":
        return lambda x, w: mx.matmul(x, decode.dense(w, dtype).T)
    halves: Any = {
        "gemv": gemv_half.product, "tile": tile_half.product, "narrow": tile_half.narrow, "wide": wide_half.product
    }  # fmt: skip
    float32: Any = {"gemv": gemv_float.product, "tile": tile_float.product}
    multiply = (float32 if dtype == "float32" else halves)[kernel]
    return lambda x, w: multiply(x, w, dtype)


def time_ours(cases: list[tuple[Any, ...]]) -> list[float]:
    """Microseconds of cases (kind, type, N, K, block, M, kernel)."""
    from lut4tool.runtime.backend import mx  # isort: skip
    from benchmarks.cuda_graphs import compile_all, launches_of, time_launches

    launches = {}
    for case in cases:
        *facts, m, kernel = case
        if kernel != "decode":
            (weight,) = ours(*facts, 1)
            x = mx.zeros((m, facts[3]), getattr(mx, facts[1]))
            launches[case] = launches_of(product(facts[1], kernel), x, weight)
    compile_all(launch.program for several in launches.values() for launch in several)
    done = []
    for case in cases:
        *facts, m, kernel = case
        sets = 20 if facts[2] * facts[3] > 1 << 27 else 40
        done.append(time_launches(launches[case], sets) if case in launches else time_decode(facts, m))
    return done


def time_decode(facts: list[Any], m: int) -> float:
    """Microseconds of a decode and MLX's product."""
    import mlx.core as mx

    weights, x = list(ours(*facts, 20)), mx.random.normal((m, facts[3])).astype(getattr(mx, facts[1]))
    multiply, times = product(facts[1], "decode"), []
    for _ in range(7):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval([multiply(x, weight) for weight in weights])
        mx.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / len(weights))
    weights.clear()
    gc.collect()
    mx.clear_cache()
    return statistics.median(times[2:])


def time_peers(dtype: str, n: int, k: int, m: int) -> dict[str, float]:
    """Microseconds of torch's dense product and of bitsandbytes."""
    import bitsandbytes
    import torch

    from benchmarks.cuda_graphs import time_torch

    kind, sets = getattr(torch, dtype), 20
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.randn(m, k, device="cuda", dtype=kind)
    dense = [torch.randn(n, k, device="cuda", dtype=kind) for _ in range(6)]  # each more than the L2 cache
    done = {"torch": time_torch(lambda i: torch.matmul(x, dense[i % len(dense)].t()), sets)}
    packed, state = bitsandbytes.functional.quantize_4bit(dense[0], blocksize=64, quant_type="nf4")
    copies = [packed.clone() for _ in range(sets)]
    with torch.no_grad():
        done["bitsandbytes"] = time_torch(lambda i: bitsandbytes.matmul_4bit(x, copies[i].t(), state), sets)
    return done


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GB on the device."""
    import cupy

    source = cupy.ones(1 << 30, cupy.float32)
    target, times = cupy.empty_like(source), []
    for _ in range(7):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        cupy.copyto(target, source)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1000)
    bytes_moved = 2 * source.nbytes
    del source, target
    cupy.get_default_memory_pool().free_all_blocks()
    return bytes_moved / min(times)


def table(args: argparse.Namespace) -> None:
    """Print the table of CASES, a line a case."""
    from lut4tool.kernels import cuda

    cases = [case for case in CASES if args.only in f"{case[0]}:{case[1]}:{case[2]}x{case[3]}:{case[5]}"]
    kernels = [cuda.pick(dtype, m, n) for _, dtype, n, _, _, m, _ in cases]
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    print(f"{'N x K':14} {'M':>4} {'type':14} {'kernel':7} {'us':>8} {'bar':>5} {'floor':>6} {'torch':>8} {'bnb':>8}")
    rows = []
    times = time_ours([(*case[:6], kernel) for case, kernel in zip(cases, kernels, strict=True)])
    for (kind, dtype, n, k, block, m, bar), kernel, us in zip(cases, kernels, times, strict=True):
        floor = (n * k / 2 + n * k / block * 4) / bandwidth * 1e6
        peers = time_peers(dtype, n, k, m) if kind == "lookup4" and not args.no_peers else {}
        gc.collect()
        name = dtype if kind == "lookup4" else f"QMM {dtype}"
        facts = {"n": n, "k": k, "m": m, "type": name, "kernel": kernel, "us": round(us, 2), "bar": bar}
        rows.append({**facts, "floor": round(floor, 1), **{peer: round(value, 1) for peer, value in peers.items()}})
        beside = " ".join(f"{peers.get(peer, 0):8.1f}" for peer in ("torch", "bitsandbytes"))
        print(f"{n} x {k:<6} {m:4} {name:14} {kernel:7} {us:8.2f} {bar or '':5} {floor:6.1f} {beside}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def quickest(kind: str, dtype: str, block: int, kernels: dict[str, range], sizes: tuple[int, ...]) -> dict[int, str]:
    """The quickest kernel by M at 14336 x 4096, of those with the M that each is tried for."""
    tried = [(m, kernel) for m in sizes for kernel, limits in kernels.items() if m in limits]
    times = time_ours([(kind, dtype, 14336, 4096, block, m, kernel) for m, kernel in tried])
    us = dict(zip(tried, times, strict=True))
    best = {m: min((value, kernel) for (rows, kernel), value in us.items() if rows == m)[1] for m in sizes}
    for m in sizes:
        print(
            kind, dtype, m, {kernel: round(us[m, kernel], 1) for rows, kernel in us if rows == m}, best[m], flush=True
        )
    return best


def thresholds() -> None:
    """Time each kernel at 14336 x 4096 and write the most rows for which it is the quickest."""
    from lut4tool.kernels.cuda import gemv_float, gemv_half

    tiles = {"narrow": range(1, 257), "wide": range(17, 1 << 20)}
    halves = {"gemv": range(1, gemv_half.MOST_ROWS + 1), **tiles, "decode": range(128, 1 << 20)}
    half = quickest("lookup4", "bfloat16", 64, halves, CROSSINGS["bfloat16"])
    older = quickest("lookup4", "bfloat16", 64, {"narrow": range(1, 257), "decode": range(128, 257)}, (64, 128, 256))
    qmm = quickest("qmm", "bfloat16", 32, tiles, (16, 32, 64, 128, 256))
    floats = {"gemv": range(1, gemv_float.MOST_ROWS + 1), "tile": range(1, 1 << 20)}
    float32 = quickest("lookup4", "float32", 64, floats, CROSSINGS["float32"])

    def most(best: dict[int, str], *kernels: str) -> int:
        return max((m for m in best if best[m] in kernels), default=0)

    tile = most(half, "gemv", "narrow", "wide")
    found = {
        "half": {
            "gemv": most(half, "gemv"), "narrow": most(half, "narrow"), "narrow_qmm": most(qmm, "narrow"),
            "tile": tile if tile < max(half) else "1 << 62", "older": most(older, "narrow"),
        },
        "float32": {"gemv": most(float32, "gemv"), "tile": "1 << 62"},
    }  # fmt: skip
    text = THRESHOLDS.read_text()
    text = text[: text.index("MOST_ROWS")] + "MOST_ROWS = {\n"
    for name, kernels in found.items():
        facts = ", ".join(f'"{kernel}": {rows}' for kernel, rows in kernels.items())
        text += f'    "{name}": {{{facts}}},\n'
    text += "}\n"
    THRESHOLDS.write_text(text)
    print(text)


def once(case: str) -> None:
    """One product of each of 4 weights."""
    from lut4tool.runtime.backend import mx  # isort: skip
    from lut4tool.kernels import cuda

    kind, dtype, shape, rows, *kernel = case.split(":")
    n, k = map(int, shape.split("x"))
    m, block = int(rows), 32 if kind == "qmm" else 64
    multiply = product(dtype, kernel[0] if kernel else cuda.pick(dtype, m, n))
    x = mx.random.normal((m, k)).astype(getattr(mx, dtype))
    mx.eval(x)
    for w in ours(kind, dtype, n, k, block, 4):
        mx.eval(multiply(x, w))


def main() -> None:
    """Print a table, write thresholds, or run one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once")
    parser.add_argument("--thresholds", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.once:
        once(args.once)
    elif args.thresholds:
        thresholds()
    else:
        table(args)


if __name__ == "__main__":
    main()
