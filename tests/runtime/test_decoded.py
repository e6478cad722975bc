"""Dense matrices that the users of a weight share in one run: made once, gone after the last user, kept by no run."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from places import HAS_GPU, compute_in

from lut4tool import formats, kernels
from lut4tool.formats import Lookup4Weight
from lut4tool.kernels import decoded, reference
from lut4tool.runtime import Runtime, regions
from tests.products import check, dense, forward_and_adjoint, lookup4, qmm, values


class Decoding:
    """A backend that writes every weight out dense, as those of GPUs do for many rows of x; it counts."""

    KERNELS = ("decode",)

    def __init__(self) -> None:
        self.made: list[Any] = []

    def available(self) -> bool:
        return True

    def refuses(self, x: mx.array, weight: Lookup4Weight) -> None:
        return None

    def lookup4_matmul(self, x: Any, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
        def make() -> mx.array:
            self.made.append(weight)
            return reference.lookup4_decode(weight)

        return mx.array(x) @ decoded.dense_of(weight, make).transpose(weight.perm)


@pytest.fixture
def backend(monkeypatch: Any) -> Decoding:
    made = Decoding()
    monkeypatch.setattr(
        kernels, "backends", lambda: dict.fromkeys(kernels.DEVICE_BACKENDS, made) | {"reference": reference}
    )
    return made


def test_a_product_and_its_adjoint_decode_once_a_run(backend: Decoding) -> None:
    weights = [lookup4(24, 16, 8, seed=seed) for seed in (0, 1)]
    runtime, x = Runtime(forward_and_adjoint(weights), device="cpu"), values("float32", 2, 24)
    for run in (1, 2, 3):
        (y,) = runtime.run(None, {"x": x})
        assert len(backend.made) == 2 * run  # four products
    exact = x.astype(np.float64)
    for weight in weights:
        exact = exact @ dense(weight) @ dense(weight).T
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)


def test_a_matrix_goes_with_its_last_user() -> None:
    first, second = lookup4(24, 16, 8), lookup4(24, 16, 8, seed=1)
    adjoint = dataclasses.replace(first, perm=(1, 0))
    for weight in (first, adjoint, second):
        decoded.planned(weight)
    made: list[str] = []

    def make(name: str) -> Any:
        made.append(name)
        return name

    with decoded.one_run():
        assert decoded.dense_of(first, lambda: make("first")) == "first"
        assert decoded.dense_of(second, lambda: make("second")) == "second"  # its one user: not kept
        assert decoded.dense_of(adjoint, lambda: make("never")) == "first"
        assert decoded.dense_of(first, lambda: make("again")) == "again"  # as in a loop
        with decoded.one_run():  # what a region traces stays in it
            assert decoded.dense_of(first, lambda: make("inner")) == "inner"
    assert decoded.dense_of(first, lambda: make("no run")) == "no run"
    assert made == ["first", "second", "again", "inner", "no run"]


def test_a_run_keeps_a_bounded_number_of_bytes(monkeypatch: Any) -> None:
    """What is over the bound is made again for its other users."""
    first, second = lookup4(24, 16, 8), lookup4(24, 16, 8, seed=1)
    users = [dataclasses.replace(weight, perm=perm) for weight in (first, second) for perm in ((0, 1), (1, 0))]
    for weight in users:
        decoded.planned(weight)
    made: list[str] = []
    monkeypatch.setattr(decoded, "MOST_BYTES", 2 * 24 * 16 * 4 - 1)
    with decoded.one_run():
        for name, weight in zip("aabb", users, strict=True):  # a is gone before b comes
            assert decoded.dense_of(weight, lambda name=name: made.append(name) or name) == name
        assert made == ["a", "b"]
        for name, weight in zip("abba", (users[0], *users[2:], users[1]), strict=True):  # a waits while b comes
            assert decoded.dense_of(weight, lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b", "a", "b", "b"]


def test_a_compiled_region_shares_what_it_decodes(backend: Decoding, monkeypatch: Any) -> None:
    """Each step is tried by itself in the first run, all of them are traced in the second, none runs in the third."""
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    monkeypatch.delenv(regions.SWITCH, raising=False)
    compute_in("mlx", monkeypatch)
    mx.enable_compile()
    try:
        weights = [lookup4(24, 16, 8, seed=seed) for seed in (0, 1)]
        runtime, x = Runtime(forward_and_adjoint(weights), device="cpu"), values("float32", 2, 24)
        results, made = [], []
        for _ in range(4):
            results += runtime.run(None, {"x": x})
            made.append(len(backend.made))
    finally:
        if not HAS_GPU:
            mx.disable_compile()
    assert made == [2 + 4, 6 + 2, 8, 8]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_users_are_those_alive() -> None:
    weight = lookup4(24, 16, 8)
    other = dataclasses.replace(weight, perm=(1, 0))
    for user in (weight, other):
        decoded.planned(user)
    del other, user
    gc.collect()
    decoded.planned(weight)
    with decoded.one_run():
        assert [decoded.dense_of(weight, lambda it=it: it) for it in (1, 2)] == [1, 2]


def test_what_makes_a_matrix_another() -> None:
    weight = lookup4(24, 16, 8)
    same = dataclasses.replace(weight, perm=(1, 0))
    assert decoded.key_of(weight) == decoded.key_of(same)
    changes: list[dict[str, Any]] = [
        {"packed": weight.packed.copy()},
        {"scales": weight.scales.copy()},
        {"codebook": formats.FP4},
        {"rows": 16, "cols": 24},
        {"weight_dtype": "float16"},
        {"high_nibble_first": False},
    ]
    keys = {decoded.key_of(dataclasses.replace(weight, **change)) for change in changes}
    assert len(keys) == len(changes)
    assert decoded.key_of(weight) not in keys
    affine = qmm(24, 64, 32)
    assert decoded.key_of(affine) != decoded.key_of(dataclasses.replace(affine, zero_points=affine.zero_points.copy()))


def test_the_matrix_is_the_decode(backend: Decoding) -> None:
    weight, x = lookup4(24, 16, 8), values("float32", 1, 24)
    with decoded.one_run():
        check(np.array(backend.lookup4_matmul(x, weight)), x, dense(weight))
