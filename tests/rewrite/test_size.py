"""Weights and models of sizes that other tests do not reach; files have holes where nothing is looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from build import CODEBOOKS, Chain, spell
from lut4tool.rewrite import rewrite
from lut4tool.runtime.session import Runtime
from lut4tool.storage import read_model

NF4 = CODEBOOKS["nf4"]


def point(tensor: TensorProto, place: str, size: int, dims: int) -> None:
    tensor.ClearField("raw_data")
    tensor.dims[:] = [dims]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", place), ("length", size)):
        tensor.external_data.add(key=key, value=str(value))


@pytest.mark.slow
def test_a_weight_of_more_than_2_to_the_31_elements(tmp_path: Path) -> None:
    """Rows on both sides of each power of two are right after a rewrite and a run; all others are zero."""
    rows, cols, block = 65_600, 32_768, 64
    blocks = rows * cols // block
    assert rows * cols > 1 << 31
    empty = {"packed": np.empty(0, np.uint8), "scales": np.empty(0, np.float32)}
    parts = spell(Chain(rows, cols, block, perm="written", **empty))
    tensors = {tensor.name.removeprefix("dec/"): tensor for tensor in parts.tensors}
    point(tensors["packed"], "packed.bin", rows * cols // 2, rows * cols // 2)
    point(tensors["scales"], "scales.bin", 4 * blocks, blocks)
    nodes = [*parts.nodes, helper.make_node("MatMul", ["x", parts.weight], ["y"], "MatMul")]
    values = [helper.make_tensor_value_info(name, 1, ["m", size]) for name, size in (("x", cols), ("y", rows))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], parts.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "in.onnx")

    random, written = np.random.default_rng(0), {}
    with (tmp_path / "packed.bin").open("wb") as packed, (tmp_path / "scales.bin").open("wb") as scales:
        packed.truncate(rows * cols // 2)
        scales.truncate(4 * blocks)
        for row in (0, 16_384, 32_767, 32_768, 65_535, 65_536, rows - 1):
            codes = random.integers(0, 256, cols // 2, dtype=np.uint8)
            factors = random.uniform(0.5, 2, cols // block).astype(np.float32)
            packed.seek(row * cols // 2)
            packed.write(codes.tobytes())
            scales.seek(4 * row * cols // block)
            scales.write(factors.tobytes())
            written[row] = NF4[np.stack([codes >> 4, codes & 15], 1).reshape(-1)].astype(np.float64) * np.repeat(
                factors, block
            )

    (witness,) = (witness for _, witness in rewrite(tmp_path / "in.onnx", tmp_path / "out.onnx").rewritten)
    assert witness is not None
    assert witness.elements == rows * cols
    assert {node.op_type for node in read_model(tmp_path / "out.onnx").graph.node} == {"Lookup4MatMul"}
    x = random.standard_normal((2, cols)).astype(np.float32)
    runtime = Runtime(tmp_path / "out.onnx", "cpu")
    for rows_of_x in (1, 2):
        (y,) = runtime.run(None, {"x": x[:rows_of_x]})
        for row, weights in written.items():
            bound = 2.0**-21 * (np.abs(x[:rows_of_x]).astype(np.float64) @ np.abs(weights))
            assert (np.abs(y[:, row] - x[:rows_of_x].astype(np.float64) @ weights) <= bound).all(), row
        others = np.delete(y, list(written), axis=1)
        assert not others.any()
