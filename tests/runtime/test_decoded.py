"""Dense matrices that the users of a weight share in one run: made once, gone after the last user, kept by no run."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lut4tool import formats, kernels
from lut4tool.formats import DOMAIN, Lookup4Weight
from lut4tool.kernels import decoded, reference
from lut4tool.runtime import Runtime
from tests.products import check, dense, lookup4, qmm, values


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


def forward_and_adjoint(weights: list[Lookup4Weight]) -> onnx.ModelProto:
    """x times each weight, then that times it transposed; weights of the same arrays are the same initializers."""
    nodes, leaves, value = [], {}, "x"
    for place, weight in enumerate(weights):
        names = []
        for leaf in ("packed", "scales", "codebook"):
            array = getattr(weight, leaf)
            names.append(leaf + str(id(array)))
            leaves[names[-1]] = array
        for perm in (weight.perm, weight.perm[::-1]):
            facts = dataclasses.replace(weight, perm=perm).attributes("float32")
            result = f"y{place}{perm[0]}"
            nodes.append(helper.make_node("Lookup4MatMul", [value, *names], [result], result, domain=DOMAIN, **facts))
            value = result
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("x", value)]
    arrays = [numpy_helper.from_array(array, name) for name, array in leaves.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], arrays)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)], ir_version=8
    )


@pytest.fixture
def backend(monkeypatch: Any) -> Decoding:
    made = Decoding()
    monkeypatch.setattr(kernels, "backends", lambda: {"cpu": made, "reference": reference})
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
