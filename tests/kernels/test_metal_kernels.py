"""Every Metal kernel with its launcher, run whole by the simulator, against float64: all types, layouts and tails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import metal_cost
from lut4tool import formats, kernels
from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import MLX_FLOAT, metal, selftest, thresholds
from lut4tool.kernels.metal import source as metal_source
from lut4tool.kernels.metal import trial
from lut4tool.kernels.metal import weights as metal_weights
from lut4tool.kernels.metal.gemv_rows import SOURCE as GEMV_ROWS
from lut4tool.kernels.metal.tile import SOURCE as TILE
from tests.metal_sim import How, Simulator, run, to_mlx, to_numpy
from tests.metal_sim.compiler import UNSUPPORTED, CompileError
from tests.metal_sim.signature import signature
from tests.products import (
    BOUND,
    DTYPES,
    SPECIALS,
    check,
    check_special,
    dense,
    dense_qmm,
    lookup4,
    qmm,
    values,
    with_special,
)

pytestmark = pytest.mark.skipif(bool(UNSUPPORTED), reason=UNSUPPORTED)

ROWS = (1, 2, 4, 7, 16, 17, 32, 64, 65, 100, 130)
#: rows, cols, block: whole loads; blocks that cross rows; a side of 32 under one block; blocks of 48 and 12; ragged.
SHAPES = [(64, 128, 32), (96, 160, 64), (70, 32, 64), (37, 96, 48), (44, 72, 12), (33, 50, 16)]
#: The types of x and of the weight.
TYPES = [
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
]
#: n, k, block: whole loads; a block of 64 over K = 96; K that ends inside a block; ragged.
QMM_SHAPES = [(40, 128, 32), (33, 96, 64), (24, 100, 32), (33, 50, 16)]


@pytest.fixture
def simulator(monkeypatch: Any) -> Iterator[Simulator]:
    simulator = Simulator()
    simulator.install(monkeypatch)
    metal_source.built.cache_clear()
    trial.forget()
    yield simulator
    metal_source.built.cache_clear()
    trial.forget()


def sampled(cases: list[tuple[Any, ...]], every: int) -> list[Any]:
    """All the cases, of which CI takes each `every`-th: a step that meets every value of every part."""
    return [
        pytest.param(*case, marks=[] if index % every == 0 else pytest.mark.slow, id="-".join(map(str, case)))
        for index, case in enumerate(cases)
    ]


def product(x: np.ndarray, weight: Lookup4Weight | QmmWeight, kernel: str | None = None) -> np.ndarray:
    multiply = metal.lookup4_matmul if isinstance(weight, Lookup4Weight) else metal.qmm
    return to_numpy(multiply(to_mlx(x), weight, kernel))


def names(simulator: Simulator) -> list[str]:
    return [call.name.removeprefix("lut4tool_") for call in simulator.calls]


LOOKUP4_CASES = list(itertools.product(SHAPES, TYPES, [(0, 1), (1, 0)], ["gemv", "tile"], ROWS))
QMM_CASES = list(itertools.product(QMM_SHAPES, DTYPES, ["codes", "one", "float"], ["gemv", "tile"], ROWS))


@pytest.mark.parametrize(("shape", "types", "perm", "kernel", "m"), sampled(LOOKUP4_CASES, 13))
def test_lookup4(
    shape: tuple[int, int, int],
    types: tuple[str, str],
    perm: tuple[int, int],
    kernel: str,
    m: int,
    simulator: Simulator,
) -> None:
    dtype, weight_dtype = types
    weight = lookup4(*shape, perm=perm, weight_dtype=weight_dtype, high_nibble_first=shape[2] != 48)
    x = values(dtype, m, weight.shape[0])
    check(product(x, weight, kernel), x, dense(weight), dtype)
    assert (
        names(simulator)
        == {
            "tile": ["tile"],
            "gemv": ["gemv_rows"] if perm == (1, 0) else ["gemv_columns", "gemv_join"],
        }[kernel]
    )


@pytest.mark.parametrize(("shape", "dtype", "points", "kernel", "m"), sampled(QMM_CASES, 13))
def test_qmm(shape: tuple[int, int, int], dtype: str, points: str, kernel: str, m: int, simulator: Simulator) -> None:
    weight = qmm(*shape, DTYPES[dtype], points)
    x = values(dtype, m, weight.K)
    check(product(x, weight, kernel), x, dense_qmm(weight), dtype)
    assert names(simulator) == ["tile" if kernel == "tile" else "gemv_rows"]


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 9, 2), (130, 131, 6)], ids=str)
def test_decode_is_exact(
    shape: tuple[int, int, int], weight_dtype: str, perm: tuple[int, int], simulator: Simulator
) -> None:
    weight = lookup4(*shape, perm=perm, weight_dtype=weight_dtype, high_nibble_first=perm == (0, 1))
    decoded = to_numpy(metal.lookup4_decode(weight))
    assert decoded.tobytes() == formats.decode(weight).tobytes()
    assert names(simulator) == ["decode"]


@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("facts", [{"scales_dtype": "float16"}, {"scales_dtype": "bfloat16"}, {"codebook": "fp4"}])
def test_scales_and_codebooks_of_every_type(facts: dict[str, str], kernel: str, simulator: Simulator) -> None:
    given: dict[str, Any] = {}
    if "scales_dtype" in facts:
        given["scales_dtype"] = DTYPES[facts["scales_dtype"]]
    else:
        given["codebook"] = formats.FP4.astype(np.float16)
    weight = lookup4(48, 64, 32, perm=(1, 0), **given)
    x = values("float32", 3, 64)
    check(product(x, weight, kernel), x, dense(weight))


@pytest.mark.parametrize(
    "how", [How("fast", "forward"), How("fast", "reverse", contract=True), How("fast", seed=7)], ids=str
)
@pytest.mark.parametrize("matrix_order", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_orders_and_fused_products_stay_within_the_bound(
    perm: tuple[int, int], kernel: str, matrix_order: int, how: How, simulator: Simulator
) -> None:
    """Sums that cancel, in every order: many equal terms and then their opposite (K = 2048)."""
    simulator.how = How(how.mode, how.order, how.seed, matrix_order, how.contract)
    k, n = 2048, 32
    rows, cols = (k, n) if perm == (0, 1) else (n, k)
    scales = np.full(rows * cols // 64, 0.7, np.float32)
    weight = Lookup4Weight(np.full(rows * cols // 2, 255, np.uint8), scales, formats.NF4, rows, cols, 64, perm)
    x = np.full((2, k), 0.1, np.float32)
    x[0, 3 * k // 4 :] = -0.3
    x[1] *= np.random.default_rng(0).choice([1e-7, 1, 1e3], k).astype(np.float32)
    check(product(x, weight, kernel), x, dense(weight))


@pytest.mark.parametrize("matrix_order", [0, 1, 2])
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("group", [4, 8, 32, 1024])
def test_adversaries_of_the_bound(
    group: int, perm: tuple[int, int], kernel: str, matrix_order: int, simulator: Simulator
) -> None:
    """In each group a 1 among terms that are each under half its last place: a plain sum would lose them all."""
    simulator.how = How("fast", matrix_order=matrix_order)
    k, n = 2048, 32
    rows, cols = (k, n) if perm == (0, 1) else (n, k)
    packed, scales = np.full(rows * cols // 2, 255, np.uint8), np.ones(rows * cols // 64, np.float32)
    weight = Lookup4Weight(packed, scales, formats.NF4, rows, cols, 64, perm)
    rng = np.random.default_rng(group)
    x = np.full((3, k), 0.99 * 2.0**-24, np.float32)
    x[0, ::group] = 1
    x[1, rng.integers(0, group, k // group) + np.arange(0, k, group)] = 1
    x[2] = x[1] * rng.choice([-1, 1], k)
    check(product(x, weight, kernel), x, dense(weight))


@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("where", "special"), SPECIALS)
def test_nan_and_inf_go_through_as_ieee_says(
    special: float, where: str, perm: tuple[int, int], kernel: str, simulator: Simulator
) -> None:
    x, weight = with_special(lookup4(24, 16, 8, perm=perm), 3, where, special)
    check_special(product(x, weight, kernel), x, weight)


# -- what MLX adds to a kernel


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_rows(dtype: str, perm: tuple[int, int], simulator: Simulator) -> None:
    y = product(values(dtype, 0, 64), lookup4(64, 64, perm=perm, weight_dtype=dtype))
    assert (y.shape, y.dtype) == ((0, 64), DTYPES[dtype])
    assert simulator.calls == []


def test_the_kernel_is_chosen_by_m(simulator: Simulator, monkeypatch: Any) -> None:
    monkeypatch.setitem(thresholds.MOST_ROWS["metal"], "half", {"gemv": 8, "tile": 20})
    wanted = {
        ("float32", 8): "gemv_rows",
        ("float32", 9): "tile",
        ("float32", 40): "tile",
        ("float16", 8): "gemv_rows",
        ("float16", 20): "tile",
        ("float16", 21): "decode",
    }
    for (dtype, m), name in wanted.items():
        weight, x = lookup4(32, 64, perm=(1, 0), weight_dtype=dtype), values(dtype, m, 64)
        check(product(x, weight), x, dense(weight), dtype)
        assert names(simulator)[-1] == name


@pytest.mark.parametrize("name", ["rows", "columns", "affine"])
def test_decode_then_a_dense_product(name: str, simulator: Simulator) -> None:
    weight: Any = (
        qmm(40, 50, 16) if name == "affine" else lookup4(50, 40, 16, perm=(int(name == "rows"), int(name != "rows")))
    )
    K = weight.K if name == "affine" else weight.shape[0]
    x = values("float32", 5, K)
    check(product(x, weight, "decode"), x, dense_qmm(weight) if name == "affine" else dense(weight))


def test_a_tile_writes_nothing_but_the_product(simulator: Simulator) -> None:
    weight, x = lookup4(64, 128, perm=(1, 0), weight_dtype="float16"), values("float16", 16, 128)
    product(x, weight)
    (call,) = simulator.calls
    assert (call.name, [output.shape for output in call.outputs]) == ("lut4tool_tile", [(16, 64)])
    assert call.cost.device_writes.bytes == 16 * 64 * 2


@pytest.mark.parametrize("along_k", [False, True])
@pytest.mark.parametrize(
    ("dtype", "m", "less"), [("float32", 1, 6), ("float16", 1, 6), ("float32", 4, 4), ("float16", 16, 6)]
)
def test_memory_is_asked_for_less_often_than_by_one_tile_for_all(
    dtype: str, m: int, less: float, along_k: bool
) -> None:
    """Loads and stores for each weight element, as benchmarks/metal_cost.py prints them."""
    theirs, ours = metal_cost.baseline(128, 512, dtype, m), metal_cost.ours(128, 512, dtype, m, along_k)
    assert theirs.device_requests > less * ours.device_requests
    if m > 1:
        assert ours.threadgroup_requests < theirs.threadgroup_requests / 5
    assert (ours.barriers == 0) == (m <= 8)


def test_m_is_no_part_of_the_text(simulator: Simulator) -> None:
    weight = lookup4(32, 64, perm=(1, 0))
    for m in (9, 16, 17, 33, 50, 70):
        product(values("float32", m, 64), weight)
    assert len({call.signature.text for call in simulator.calls}) == 2  # tiles of 16 and of 32 rows


def test_kernels_are_built_once_and_weights_copied_once(simulator: Simulator) -> None:
    weight = lookup4(32, 64, perm=(1, 0))
    for m in (1, 1, 16, 16):
        product(values("float32", m, 64), weight)
    assert metal_source.built.cache_info().misses == 2
    assert metal_weights.on_device(weight) is metal_weights.on_device(weight)


def test_weights_over_the_same_bytes_share_them_on_the_device(simulator: Simulator) -> None:
    primal = lookup4(64, 64)
    facts = (primal.codebook, 64, 64, 64, (1, 0), True, "float16")
    adjoint = Lookup4Weight(primal.packed, primal.scales, *facts)
    other = Lookup4Weight(primal.packed.copy(), primal.scales, *facts)
    x = values("float32", 2, 64)
    for weight in (primal, adjoint, other):
        check(product(x, weight), x, dense(weight))
    on_device = [metal_weights.on_device(weight).arrays for weight in (primal, adjoint, other)]
    assert on_device[0] is on_device[1]
    assert on_device[0] is not on_device[2]


def test_available_where_mlx_computes_with_metal(simulator: Simulator, monkeypatch: Any) -> None:
    gpu = mx.default_device().type == mx.DeviceType.gpu
    assert metal.available() == gpu
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert metal.available()
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not metal.available()


PROBED: list[tuple[str, Any]] = [
    ("float32", lambda: lookup4(64, 64, perm=(1, 0), weight_dtype="float16")),
    ("bfloat16", lambda: lookup4(40, 50, 12, weight_dtype="bfloat16", high_nibble_first=False)),
    ("float16", lambda: qmm(24, 96, 24, np.float16, "one")),
    ("float32", lambda: qmm(24, 33, 16, np.float32, "float")),
    ("float32", lambda: qmm(24, 32, 24, np.float32)),
    ("float32", lambda: lookup4(43, 64, perm=(0, 1))),
]


@pytest.mark.parametrize(("dtype", "weight"), PROBED)
def test_each_kernel_is_tried_once_before_it_is_trusted(dtype: str, weight: Any, simulator: Simulator) -> None:
    made = weight()
    for _ in range(2):
        metal.probe(made, dtype)
    tried = [call.signature.call for call in simulator.calls]
    assert len(tried) in (2, 3)
    simulator.calls.clear()
    for kernel in ("gemv", "tile"):
        product(values(dtype, 1, depth(made)), made, kernel)
    used = [call.signature.call for call in simulator.calls]
    of_tiny, of_weight = ([call.split("<")[1] for call in calls if "join" not in call] for calls in (tried, used))
    assert of_tiny == of_weight  # the very text that the weight gets


def depth(weight: Lookup4Weight | QmmWeight) -> int:
    return weight.shape[0] if isinstance(weight, Lookup4Weight) else weight.K


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda text: text.replace("fma(", "wrong("), "its gemv kernel does not run here: .*'wrong'"),
        (lambda text: text.replace("left + right)", "left)"), r"its gemv kernel gives 16.0 here where 32.0 is right"),
        (lambda text: text.replace("simdgroup_load(a", "wrong(a"), "its tile kernel does not run here"),
        (lambda text: text.replace("k < depth", "k < 16"), r"its tile kernel gives 16.0 here where 32.0 is right"),
    ],
)
def test_a_kernel_that_fails_is_not_used(wrong: Any, sentence: str, simulator: Simulator, monkeypatch: Any) -> None:
    simulator.edit = lambda name, source, header: (wrong(source), header)
    simulated = simulator.metal_kernel

    def as_mlx(**facts: Any) -> Any:
        kernel = simulated(**facts)

        def call(**given: Any) -> Any:
            try:
                return kernel(**given)
            except CompileError as error:
                raise RuntimeError(f"[metal::Device] Unable to build metal library from source: {error}") from error

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", as_mlx)
    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(kernels, "_WARNED", set())
    weights = [lookup4(64, 64, perm=(1, 0), seed=seed) for seed in (1, 2)]  # the second is not tried again
    with pytest.warns(UserWarning, match=sentence) as warned:
        choices = [kernels.choose(weight, "float32", "metal") for weight in weights]
    assert len(warned) == 1
    for choice in choices:
        assert choice.backend == "reference"
        assert re.search(sentence, choice.refusals["metal"])


def huge(rows: int, cols: int) -> Lookup4Weight:
    """A weight that takes no memory: one byte and one scale, seen again and again."""
    packed, scales = np.broadcast_to(np.uint8(0), rows * cols // 2), np.broadcast_to(np.float32(1), rows * cols // 4096)
    return Lookup4Weight(packed, scales, formats.NF4, rows, cols, 4096)


@pytest.mark.parametrize(
    ("x_dtype", "weight", "sentence"),
    [
        ("float16", lambda: lookup4(16, 16), "x is .*float16 and the weight float32"),
        ("bfloat16", lambda: lookup4(16, 16, weight_dtype="float16"), "halves take a weight of their own type"),
        ("float32", lambda: lookup4(4, 64, perm=(0, 1)), "K is 4; 8 and more are served"),
        ("int32", lambda: lookup4(16, 16), "float32, float16 and bfloat16 are served"),
        ("float32", lambda: huge(8, 2**31), "a weight of 8 x 2147483648 is out of reach"),
        ("float32", lambda: huge(2**20, 2**16), "a weight of 1048576 x 65536 is out of reach"),
    ],
)
def test_refusals(x_dtype: str, weight: Any, sentence: str) -> None:
    made = weight()
    x = mx.zeros((1, made.shape[0]), getattr(mx, x_dtype))
    assert re.search(sentence, str(metal.refuses(x, made)))


def test_the_backend_is_chosen_forced_and_turned_off(simulator: Simulator, monkeypatch: Any) -> None:
    monkeypatch.setattr(metal, "available", lambda: True)
    weight, x = lookup4(32, 64, perm=(1, 0)), values("float32", 2, 64)

    def served() -> str:
        simulator.calls.clear()
        choice = kernels.choose(weight, "float32", "metal")
        if choice.backend == "metal":
            check(to_numpy(choice.matmul(mx.array(x), weight)), x, dense(weight))
        return f"{choice}: {names(simulator)[-1:]}"

    assert served() == "metal: ['gemv_rows']"
    monkeypatch.setenv("LUT4TOOL_KERNEL", "tile")
    assert served() == "metal/tile: ['tile']"
    monkeypatch.delenv("LUT4TOOL_KERNEL")
    monkeypatch.setenv("LUT4TOOL_DISABLE", "metal")
    assert served() == "reference; not metal: turned off by LUT4TOOL_DISABLE: []"


@pytest.mark.slow
def test_the_selftest_covers_every_kernel(simulator: Simulator, monkeypatch: Any) -> None:
    simulator.how = How("fast")
    monkeypatch.setattr(metal, "available", lambda: True)
    result = selftest.selftest(mx.Device(mx.cpu), "metal")
    assert [case for case in result.cases if not case.ok or "refused" in case.case] == []
    assert set(names(simulator)) == {"gemv_rows", "gemv_columns", "gemv_join", "tile", "decode"}


# -- the opt-in half product


@pytest.mark.parametrize("m", [2, 16, 33, 64, 65, 130])
@pytest.mark.parametrize("points", ["codes", "one"])
def test_qmm_in_halves(points: str, m: int, simulator: Simulator, monkeypatch: Any) -> None:
    """bfloat16 is exact in float16 here (x near 1, normal scales): the sum and the last rounding are the same."""
    monkeypatch.setenv("LUT4TOOL_QMM_HALF", "1")
    weight, x = qmm(64, 96, 32, DTYPES["bfloat16"], points), values("bfloat16", m, 96)
    x = np.where(np.abs(x.astype(np.float32)) < 2.0**-7, np.zeros_like(x), x)
    check(product(x, weight), x, dense_qmm(weight), "bfloat16")
    (call,) = simulator.calls
    assert "<bfloat16_t, float16_t, bfloat16_t, " in call.signature.call  # x's type, the tiles', the weight's
    assert (call.grid[0], call.cost.threadgroup_bytes <= 16384) == (64 // 32 * 128, True)


def test_qmm_in_halves_says_what_it_loses(simulator: Simulator, monkeypatch: Any) -> None:
    monkeypatch.setenv("LUT4TOOL_QMM_HALF", "1")
    weight = qmm(32, 32, 32, DTYPES["bfloat16"], "one")
    x = np.ones((2, 32), DTYPES["bfloat16"])
    x[0, 0] = 1e5
    assert np.isinf(product(x, weight)[0].astype(np.float32)).any()
    assert np.isfinite(product(x, weight)[1].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"m": 1}, "x has one row"),
        ({"dtype": "float16"}, "not both bfloat16"),
        ({"block": 64}, "block 64, K 64, N 32"),
        ({"k": 48}, "K 48"),
        ({"n": 33}, "N 33"),
        ({"points": "float"}, "not a whole number"),
        ({"scale": 2.0**-15}, "not normal in float16"),
        ({"scale": 20000.0}, "over its range"),
        ({}, None),
    ],
    ids=str,
)
def test_what_the_half_product_takes(facts: dict[str, Any], sentence: str | None) -> None:
    dtype = facts.get("dtype", "bfloat16")
    weight = qmm(
        facts.get("n", 32), facts.get("k", 64), facts.get("block", 32), DTYPES[dtype], facts.get("points", "codes")
    )
    if "scale" in facts:
        scales = weight.scales.copy()
        scales[3, 1] = facts["scale"]
        weight = QmmWeight(weight.packed, scales, weight.zero_points, weight.K, weight.N, weight.block_size)
    why = metal.refuses_half(mx.zeros((facts.get("m", 2), weight.K), MLX_FLOAT[dtype]), weight)
    assert why is None if sentence is None else sentence in str(why)


# -- large weights


@pytest.mark.parametrize("kernel", ["gemv_rows", "tile"])
def test_positions_over_32_bits(kernel: str) -> None:
    """The last columns of a weight of 2^32 + 2^22 elements: 2 GB of zeros that nobody touches, then data."""
    K, N, block, last = 2**16, 2**16 + 64, 64, 8
    packed, scales = np.zeros(N * K // 8, np.uint32), np.zeros(N * K // block, np.float32)
    rng = np.random.default_rng(0)
    packed[-last * K // 8 :] = rng.integers(0, 2**32, last * K // 8, dtype=np.uint32)
    scales[-last * K // block :] = rng.random(last * K // block) + 0.5
    x = values("float32", 1, K)
    arrays = {"x": x, "packed": packed, "scales": scales, "levels": formats.NF4, "dims": np.array([N, K], np.uint32)}
    text = {"gemv_rows": GEMV_ROWS, "tile": TILE}[kernel]
    facts: list[tuple[str, Any]] = [("T", np.float32)]
    facts += [("C", np.float32)] if kernel == "tile" else []
    facts += [
        ("W", np.float32),
        ("AFFINE", False),
        ("HIGH_FIRST", True),
        ("ONE_ZERO", False),
        ("ALIGNED", True),
        ("BLOCK", block),
    ]
    facts += (
        [("ROWS", 1), ("OUTS", 4)]
        if kernel == "gemv_rows"
        else [("ALONG_K", False), ("FOURS", True), ("BM", 16), ("BN", 64), ("BK", 64), ("THREADS", 128)]
    )
    made = signature(kernel, arrays, {"y": np.dtype(np.float32)}, text, metal_source.HEADER, [*facts, ("EXACT", True)])
    grid, group = ((32, N // 4, 1), (32, 2, 1)) if kernel == "gemv_rows" else ((N // 64 * 128, 1, 1), (128, 1, 1))
    groups = N // 8 if kernel == "gemv_rows" else N // 64
    y = np.zeros((1, N), np.float32)
    run(
        made,
        {**arrays, "x_shape": np.array(x.shape, np.int32)},
        {"y": y},
        grid,
        group,
        How("fast", skip_groups=groups - 1),
    )
    tail = Lookup4Weight(
        packed[-last * K // 8 :].view(np.uint8), scales[-last * K // block :], formats.NF4, last, K, block, (1, 0)
    )
    check(y[:, -last:], x, dense(tail))


def test_the_bound_is_the_one_that_is_promised() -> None:
    assert BOUND == 2.0**-21
