"""Time the CUDA kernels on the GPU of this machine: microseconds of device time a product, by Nsight Compute.

    python benchmarks/kernels_cuda.py [--only TEXT] [--bars] [--kernels gemv,tile,decode] [--peers] [--json FILE]
    python benchmarks/kernels_cuda.py --once lookup4:bfloat16:14336x4096:1     one product of 4 weights, for a profiler

A case multiplies by 20 weights in turn, far more than the L2 cache holds. Caches are not flushed besides, clocks are
left alone, and the kernels of a product are added (a decode and its product; whatever a peer launches). MLX needs about
as long on the host for a product as the smallest of these takes on the GPU, so that wall-clock times would measure the
host. cuda_graphs.py times one kernel from graphs. Peers: torch's dense product, bitsandbytes' matmul_4bit (NF4).
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

SETS, WARM = 20, 6
BF16_BARS = {1: 16, 4: 17, 8: 0, 16: 22, 32: 0, 64: 0, 128: 45, 256: 0, 512: 0, 2048: 420}
FLOAT_BARS = {1: 15, 2: 0, 4: 22, 16: 60, 64: 0, 128: 0, 512: 0, 2048: 0}
#: kind, type, N, K, block, M, bar in microseconds (0: none)
CASES = [
    *(("lookup4", "bfloat16", 14336, 4096, 64, m, bar) for m, bar in BF16_BARS.items()),
    *(("lookup4", "float32", 14336, 4096, 64, m, bar) for m, bar in FLOAT_BARS.items()),
    ("lookup4", "bfloat16", 28672, 8192, 64, 1, 50),
    ("lookup4", "float32", 28672, 8192, 64, 1, 50),
    *(("lookup4", "bfloat16", 4096, 4096, 64, m, 0) for m in (1, 16, 128)),
    ("lookup4", "float32", 4096, 4096, 64, 1, 0),
    *(("qmm", "bfloat16", 14336, 4096, 32, m, bar) for m, bar in ((1, 20), (16, 0), (128, 60), (2048, 450))),
]  # fmt: skip


def ours(kind: str, dtype: str, n: int, k: int, block: int, sets: int) -> Iterator[Any]:
    """Random weights in the kernels' own order."""
    import mlx.core as mx
    import numpy as np

    from lut4tool.formats import NF4
    from lut4tool.kernels.cuda.weights import CHUNK, DeviceWeight

    chunks, groups, half = k // CHUNK, CHUNK // block, dtype != "float32"
    book = mx.array(NF4 if kind == "lookup4" else np.arange(16, dtype=np.float32))
    for _ in range(sets):
        shape = (n // 16, chunks, 16, CHUNK // 2) if half else (n, chunks, CHUNK // 2)
        codes = mx.random.randint(0, 256, shape).astype(mx.uint8)
        scales = mx.random.uniform(0.01, 0.1, (n, chunks * groups))
        if kind == "qmm" and half:
            low = scales.astype(mx.bfloat16).view(mx.uint16).astype(mx.uint32)
            high = mx.array(-136.0, mx.bfloat16).view(mx.uint16).astype(mx.uint32)
            scales = low | (high << 16)
        depth = mx.zeros((k,), mx.uint8)
        mx.eval(codes, scales, book, depth)
        yield DeviceWeight(n, half, codes, book, scales, scales, groups, 0, kind == "qmm", False, True, depth)


def product(kind: str, dtype: str, kernel: str) -> Callable[[Any, Any], Any]:
    """The product of x and a weight by one kernel."""
    import mlx.core as mx

    from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, tile_float, tile_half

    if kernel == "decode":
        return lambda x, w: mx.matmul(x, decode.dense(w, dtype).T)
    half, float32 = {"gemv": gemv_half, "tile": tile_half}, {"gemv": gemv_float, "tile": tile_float}
    module: Any = (float32 if dtype == "float32" else half)[kernel]
    return lambda x, w: module.product(x, w, dtype)


def peers(dtype: str, n: int, k: int, m: int) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Names and products, by the number of the weight, of torch and bitsandbytes."""
    import bitsandbytes
    import torch

    kind = getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.randn(m, k, device="cuda", dtype=kind)
    dense = [torch.randn(n, k, device="cuda", dtype=kind) for _ in range(4)]  # each more than the L2 cache
    yield "torch", lambda i: torch.matmul(x, dense[i % 4].t())
    packed, state = bitsandbytes.functional.quantize_4bit(dense[0], blocksize=64, quant_type="nf4")
    copies = [packed.clone() for _ in range(SETS)]
    with torch.no_grad():
        yield "bitsandbytes", lambda i: bitsandbytes.matmul_4bit(x, copies[i].t(), state)


def synchronized(call: Callable[[int], Any]) -> Callable[[int], None]:
    """The call, and the wait for torch's stream."""
    import torch

    def run(i: int) -> None:
        call(i)
        torch.cuda.synchronize()

    return run


def marker() -> Callable[[], None]:
    """A kernel that marks where a case begins and ends."""
    import mlx.core as mx

    from lut4tool.kernels.cuda.program import Program

    program = Program("marker", (("x", "float32"),), (("y", "float32"),), "y[0] = x[0];", 32)
    x = mx.zeros((1,))

    def mark() -> None:
        mx.eval(program.launch([x], [(1,)], (1,)))
        mx.synchronize()

    return mark


def run_cases(args: argparse.Namespace) -> None:
    """Run every case between two markers; what a profiler needs to know of them goes to `args.marked`."""
    from lut4tool.runtime.backend import mx  # isort: skip

    mark, names = marker(), []
    weights: list[Any] = []
    made: tuple[Any, ...] = ()

    def timed(case: str, kernel: str, bar: float, call: Callable[[int], None]) -> None:
        for i in range(WARM):
            call(i)
        mark()
        for i in range(SETS):
            call(i)
        mark()
        names.append((case, kernel, bar))

    for kind, dtype, n, k, block, m, bar in CASES:
        case = f"{kind}:{dtype}:{n}x{k}:{m}"
        if args.only not in case or (args.bars and not bar):
            continue
        if made != (kind, dtype == "float32", n, k, block):
            weights.clear()
            gc.collect()
            mx.clear_cache()
            weights, made = list(ours(kind, dtype, n, k, block, SETS)), (kind, dtype == "float32", n, k, block)
        x = mx.random.normal((m, k)).astype(getattr(mx, dtype))
        mx.eval(x)
        most = {"gemv": 4 if dtype == "float32" else 16, "tile": 2048, "decode": 1 << 62}
        for kernel in args.kernels.split(","):
            if m <= most[kernel] and not (kernel == "decode" and (m < 128 or dtype == "float32")):
                multiply = product(kind, dtype, kernel)
                timed(case, kernel, bar, lambda i: mx.eval(multiply(x, weights[i])))  # noqa: B023
        if args.peers and kind == "lookup4":
            import torch

            for name, call in peers(dtype, n, k, m):
                timed(case, name, bar, synchronized(call))
            torch.cuda.empty_cache()
    args.marked.write_text(json.dumps(names))


def times_of(report: str) -> Iterator[list[float]]:
    """Microseconds of the kernels between each pair of markers, from ncu's CSV."""
    rows = csv.DictReader(io.StringIO(report[report.index('"ID"') :]))
    inside: list[float] | None = None
    for row in rows:
        if "lut4tool_marker" in row["Kernel Name"]:
            if inside is None:
                inside = []
            else:
                yield inside
                inside = None
        elif inside is not None:
            scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}[
                row["Metric Unit"]
            ]
            inside.append(float(row["Metric Value"].replace(",", "")) * scale)


def profile(args: argparse.Namespace, argv: list[str]) -> None:
    """Run this file again under ncu and print a line a case and kernel."""
    names = Path("/tmp/kernels_cuda_cases.json")
    ncu = ["ncu", "--csv", "--clock-control", "none", "--cache-control", "none", "--metrics", "gpu__time_duration.sum"]
    command = [*ncu, "--graph-profiling", "node", sys.executable, __file__, *argv, "--marked", str(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    rows = []
    for (case, kernel, bar), times in zip(json.loads(names.read_text()), times_of(done.stdout), strict=True):
        each = len(times) // SETS
        products = [sum(times[i : i + each]) for i in range(0, len(times), each)] if each else [sum(times) / SETS]
        rows.append({"case": case, "kernel": kernel, "bar": bar, "us": round(statistics.median(products), 2)})
        print(
            f"{case:34} {kernel:13} {rows[-1]['us']:9.2f} us  {f'bar {bar}' if bar else '':9} {each} kernels",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def main() -> None:
    """Print a table, a row a case and kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once")
    parser.add_argument("--kernels", default="gemv,tile,decode")
    parser.add_argument("--only", default="")
    parser.add_argument("--bars", action="store_true", help="only the cases that have a bar")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--marked", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        once(args.once)
    elif args.marked:
        run_cases(args)
    else:
        profile(args, sys.argv[1:])


def once(case: str) -> None:
    """One product of each of 4 weights."""
    from lut4tool.runtime.backend import mx  # isort: skip
    from lut4tool.kernels import cuda

    kind, dtype, shape, rows, *kernel = case.split(":")
    n, k = map(int, shape.split("x"))
    m, block = int(rows), 32 if kind == "qmm" else 64
    multiply = product(kind, dtype, kernel[0] if kernel else cuda.pick(dtype, m))
    x = mx.random.normal((m, k)).astype(getattr(mx, dtype))
    mx.eval(x)
    for w in ours(kind, dtype, n, k, block, 4):
        mx.eval(multiply(x, w))


if __name__ == "__main__":
    main()
