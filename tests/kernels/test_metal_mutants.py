"""Planted bugs in the Metal kernels' texts: the simulator and float64 together must see them.

`python -m tests.kernels.test_metal_mutants` plants every one and prints the survivors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lut4tool import formats
from lut4tool.formats import Lookup4Weight
from lut4tool.kernels import metal
from lut4tool.kernels.metal.decode import SOURCE as DECODE
from lut4tool.kernels.metal.gemv_columns import JOIN
from lut4tool.kernels.metal.gemv_columns import SOURCE as GEMV_COLUMNS
from lut4tool.kernels.metal.gemv_rows import SOURCE as GEMV_ROWS
from lut4tool.kernels.metal.source import HEADER, built
from lut4tool.kernels.metal.tile import SOURCE as TILE
from tests.metal_sim import KernelError, Simulator, to_mlx, to_numpy
from tests.metal_sim.compiler import UNSUPPORTED, CompileError
from tests.metal_sim.mutate import Mutant, mutants
from tests.products import DTYPES, check, dense, dense_qmm, lookup4, qmm, values

pytestmark = pytest.mark.skipif(bool(UNSUPPORTED), reason=UNSUPPORTED)

Case = Callable[[], None]

#: The module, whose name the package gives to its function.
COLUMNS_MODULE = sys.modules["lut4tool.kernels.metal.gemv_columns"]


def lookup(shape: tuple[int, int, int], along_k: bool, dtype: str, m: int, kernel: str, **facts: Any) -> Case:
    facts = {"perm": (0, 1) if along_k else (1, 0), "weight_dtype": dtype} | facts

    def case() -> None:
        weight = lookup4(*shape, **facts)
        x = values(dtype, m, weight.shape[0])
        check(to_numpy(metal.lookup4_matmul(to_mlx(x), weight, kernel)), x, dense(weight), dtype)

    return case


def affine(shape: tuple[int, int, int], points: str, dtype: str, m: int, kernel: str) -> Case:
    def case() -> None:
        weight, x = qmm(*shape, DTYPES[dtype], points), values(dtype, m, shape[1])
        check(to_numpy(metal.qmm(to_mlx(x), weight, kernel)), x, dense_qmm(weight), dtype)

    return case


def absorbing(along_k: bool, kernel: str, first: int, terms: int, splits: bool = True) -> Case:
    """Sums of 1 whose later terms, each under half of its last place, a sum without corrections would lose.

    first: the columns of x that make the 1; terms: the products that are summed before a correction is made.
    """

    def case() -> None:
        k, n = first * (40 if first > 1000 else 96), 32 if along_k else 4
        rows, cols = (k, n) if along_k else (n, k)
        packed, scales = np.full(rows * cols // 2, 255, np.uint8), np.ones(rows * cols // 32, np.float32)
        weight = Lookup4Weight(packed, scales, formats.NF4, rows, cols, 32, (0, 1) if along_k else (1, 0))
        x = np.full((1, k), 0.9 * 2.0**-24 / terms, np.float32)
        x[0, :first] = 1 / terms
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not splits:
                monkeypatch.setattr(COLUMNS_MODULE, "ENOUGH_SIMDGROUPS", 1)
            check(to_numpy(metal.lookup4_matmul(mx.array(x), weight, kernel)), x, dense(weight))

    return case


def half_tile(n: int, k: int, m: int) -> Case:
    def case() -> None:
        weight, x = qmm(n, k, 32, DTYPES["bfloat16"]), values("bfloat16", m, k)
        x = np.where(np.abs(x.astype(np.float32)) < 2.0**-7, np.zeros_like(x), x)
        y = metal.tile(to_mlx(x), metal.on_device(weight), mx.float16)
        check(to_numpy(y), x, dense_qmm(weight), "bfloat16")

    return case


def overflowing(along_k: bool, kernel: str) -> Case:
    def case() -> None:
        weight = lookup4(64, 64, perm=(0, 1) if along_k else (1, 0))
        x = values("float32", 1, 64)
        x[0, 5] = np.inf
        y = to_numpy(metal.lookup4_matmul(mx.array(x), weight, kernel))
        np.testing.assert_array_equal(np.isinf(y), (dense(weight)[5] != 0)[None])

    return case


def decoding(shape: tuple[int, int, int], weight_dtype: str, high_nibble_first: bool) -> Case:
    def case() -> None:
        weight = lookup4(*shape, weight_dtype=weight_dtype, high_nibble_first=high_nibble_first)
        assert to_numpy(metal.lookup4_decode(weight)).tobytes() == formats.decode(weight).tobytes()

    return case


ROWS_CASES = [
    lookup((9, 1120, 32), False, "float32", 1, "gemv"),
    lookup((33, 50, 16), False, "float16", 3, "gemv"),
    affine((7, 96, 48), "codes", "bfloat16", 9, "gemv"),
    affine((9, 50, 12), "one", "float32", 2, "gemv"),
    lookup((5, 257, 64), False, "float32", 1, "gemv", weight_dtype="float16", high_nibble_first=False),
    absorbing(False, "gemv", 1024, 8),
    overflowing(False, "gemv"),
]
COLUMNS_CASES = [
    lookup((200, 160, 32), True, "float32", 1, "gemv"),
    lookup((50, 33, 16), True, "float16", 3, "gemv"),
    lookup((70, 96, 48), True, "bfloat16", 7, "gemv"),
    lookup((65, 20, 12), True, "float32", 2, "gemv", high_nibble_first=False),
    absorbing(True, "gemv", 32, 4, splits=False),
    absorbing(True, "gemv", 64, 64),
    overflowing(True, "gemv"),
]
TILE_CASES = [
    lookup((70, 160, 32), False, "float32", 33, "tile"),
    lookup((100, 96, 48), True, "float16", 70, "tile", high_nibble_first=False),
    lookup((65, 33, 20), True, "float32", 5, "tile"),
    affine((33, 150, 12), "codes", "bfloat16", 20, "tile"),
    affine((70, 96, 32), "one", "float16", 65, "tile"),
    affine((40, 50, 16), "float", "float32", 17, "tile"),
    half_tile(64, 96, 33),
    absorbing(False, "tile", 8, 8),
    overflowing(False, "tile"),
]
DECODE_CASES = [
    decoding((130, 70, 64), "float32", True),
    decoding((33, 51, 12), "bfloat16", False),
    decoding((7, 9, 24), "float16", True),
    affine((30, 100, 16), "codes", "float16", 3, "decode"),
    affine((30, 50, 12), "one", "float32", 3, "decode"),
]


@dataclass(frozen=True)
class Text:
    """A text, where it goes in a kernel ("" for the header) and the cases that show it whole."""

    kernel: str
    text: str
    cases: list[Case]


TEXTS: Mapping[str, Text] = {
    "gemv_rows": Text("gemv_rows", GEMV_ROWS, ROWS_CASES),
    "gemv_columns": Text("gemv_columns", GEMV_COLUMNS, COLUMNS_CASES),
    "join": Text("gemv_join", JOIN, COLUMNS_CASES),
    "tile": Text("tile", TILE, TILE_CASES),
    "decode": Text("decode", DECODE, DECODE_CASES),
    "header": Text("", HEADER, [*ROWS_CASES, *TILE_CASES[:4]]),
}

#: Mutants that give the same results, with the reason; a part of their names.
EQUIVALENT: Mapping[str, str] = {
    "gemv_rows < is <=, 13:28: for (uint start": "a step more, in which no lane is live",
    "gemv_columns < is <=, 14:39: for (uint start": "a step more, in which no lane is live",
    "tile < is <=, 38:22: for (uint k0": "a step more, over zeros alone",
    "tile choice swapped, 3:24: constexpr uint LINES": "with tiles of 64 x 32, lines more that nobody reads",
    "tile bound one lower, 41:26: for (uint i = 4 * t": "the bound and every i are multiples of 4",
    "header high is low, 29:19: return isfinite(high)": "one is finite where the other is",
}

PLANTED = [(name, mutant) for name, text in TEXTS.items() for mutant in mutants(text.text)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        built.cache_clear()
        Simulator().install(monkeypatch)
        yield
        built.cache_clear()


def verdict(name: str, mutant: Mutant) -> str:
    """What saw a planted bug: "compiler", "simulator" or "float64"; "" for nothing."""
    where = TEXTS[name]

    def edit(kernel: str, source: str, header: str) -> tuple[str, str]:
        if not where.kernel:
            return source, mutant.text
        return (mutant.text if kernel == f"lut4tool_{where.kernel}" else source), header

    with pytest.MonkeyPatch.context() as monkeypatch:
        built.cache_clear()
        Simulator(edit=edit).install(monkeypatch)
        try:
            for case in where.cases:
                case()
        except CompileError:
            return "compiler"
        except KernelError:
            return "simulator"
        except AssertionError:
            return "float64"
        finally:
            built.cache_clear()
    return ""


def test_few_bugs_survive_and_each_is_a_planted_one() -> None:
    """Over 95 % are seen: those in EQUIVALENT are the survivors, a sentence each."""
    planted = [f"{name} {mutant.name}" for name, mutant in PLANTED]
    assert [sum(part in name for name in planted) for part in EQUIVALENT] == [1] * len(EQUIVALENT)
    assert len(EQUIVALENT) < 0.05 * len(planted)


@pytest.mark.parametrize("name", TEXTS)
def test_the_cases_pass_without_a_bug(name: str) -> None:
    for case in TEXTS[name].cases:
        case()


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        pytest.param(name, mutant, id=f"{name} {mutant.name}", marks=[] if i % 12 == 0 else pytest.mark.slow)
        for i, (name, mutant) in enumerate(PLANTED)
    ],
)
def test_a_planted_bug_is_seen(name: str, mutant: Mutant) -> None:
    why = [reason for part, reason in EQUIVALENT.items() if part in f"{name} {mutant.name}"]
    seen = verdict(name, mutant)
    if why:
        assert seen == "", f"it is seen by {seen}, so that it does not belong to EQUIVALENT"
    else:
        assert seen


def main() -> None:
    counts: dict[str, int] = {}
    for name, mutant in PLANTED:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        seen = verdict(name, mutant)
        counts[seen or "survivors"] = counts.get(seen or "survivors", 0) + 1
        if not seen:
            print(name, mutant.name, flush=True)
    print(counts)


if __name__ == "__main__":
    main()
