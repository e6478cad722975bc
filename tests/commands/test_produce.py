"""Quantizing: codes against exact fractions, chains against NumPy and onnx.reference, and what is left as it was."""

from __future__ import annotations

import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from lut4tool.encode import ProduceError, encode, load_codebook
from lut4tool.errors import Lut4Error
from lut4tool.formats import CODEBOOKS, FP4, NF4, ONNX_DTYPE, Lookup4Weight, decode
from lut4tool.produce import quantize, quantize_file
from lut4tool.recognize import recognize
from lut4tool.storage import Tensors

FLOATS = st.floats(-4, 4, width=32)


def model_of(
    nodes, initializers, outputs=("y",), x=("rows", 64), opset=17, ir_version=8, kind=np.float32, extra=(), rank=2
):
    """A model x -> outputs whose initializers are given by name."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    tensors = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    inputs = [helper.make_tensor_value_info("x", elem, x), *extra]
    values = [helper.make_tensor_value_info(name, elem, [None] * rank) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, values, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def quantized(model, **options):
    """A copy of a model, quantized, and the report; the copy must pass the checker."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    report = quantize(copy, Tensors(None), **options)
    onnx.checker.check_model(copy, full_check=True)
    return copy, report


def reference(model, **feeds):
    return ReferenceEvaluator(model).run(None, feeds)


def nearest(value, scale, codebook):
    """Brute force: the lowest code among the entries nearest to float64(value / scale), in exact fractions."""
    quotient = Fraction(float(np.float64(value) / np.float64(scale))) if scale else Fraction(0)
    return min(range(16), key=lambda code: (abs(Fraction(float(codebook[code])) - quotient), code))


def codes_of(weight):
    return np.stack((weight.packed >> 4, weight.packed & 15), axis=1).reshape(-1)


def dequantized(weight, block_size, codebook=NF4):
    """NumPy float64 on its own: quantize and decode a matrix, to the float32 values that the chain must give."""
    flat = np.zeros(-(-weight.size // block_size) * block_size, np.float64)
    flat[: weight.size] = weight.reshape(-1).astype(np.float64)
    blocks = flat.reshape(-1, block_size)
    scales = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float32)
    quotients = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0, dtype=np.float64)
    codes = np.abs(quotients[..., None] - codebook.astype(np.float64)).argmin(axis=-1)
    return (codebook[codes] * scales).reshape(-1)[: weight.size].reshape(weight.shape)


# ---- codes


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FLOATS), st.sampled_from([2, 4, 16])
)
def test_codes_are_the_nearest_entries(weight, block_size):
    for codebook in (NF4, FP4):
        result, _, _ = encode(weight, codebook, block_size)
        padded = np.zeros(result.blocks * block_size, np.float32)
        padded[: weight.size] = weight.reshape(-1)
        scales = np.abs(padded.reshape(-1, block_size)).max(axis=1)
        assert result.scales.tobytes() == scales.tobytes()
        expected = [nearest(value, scales[i // block_size], codebook) for i, value in enumerate(padded)]
        assert codes_of(result).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, 16, elements=st.floats(-1, 1, width=32)), arrays(np.float32, (3, 8), elements=FLOATS))
def test_any_codebook_with_ties_and_equal_entries(codebook, weight):
    if not codebook.any():
        codebook[3] = 1
    codebook[5] = codebook[9]
    peak = np.abs(codebook.astype(np.float64)).max()
    middle = (codebook[0].astype(np.float64) + codebook[1]) / 2
    weight[0, 0], weight[0, 1] = middle, peak  # a tie wherever float32 holds the middle
    with np.errstate(over="ignore"):
        scales = (np.abs(weight.astype(np.float64)).max(axis=1) / peak).astype(np.float32)
    if not np.isfinite(scales).all():
        with pytest.raises(ProduceError, match="too large"):
            encode(weight, codebook, 8)
        return
    result, _, _ = encode(weight, codebook, 8)
    assert result.scales.tobytes() == scales.tobytes()
    expected = [nearest(value, scales[i // 8], codebook) for i, value in enumerate(weight.reshape(-1))]
    assert codes_of(result).tolist() == expected


def test_a_tie_takes_the_lower_code():
    codebook = np.array([1, -1, 0, 0.5, -0.5, 0.25, -0.25, 0.75, *[-0.75] * 8], np.float32)
    weight = np.array([[1, 0.875, -0.875, 0.125, -0.125, 0.625, -0.75, 0]], np.float32)
    result, _, _ = encode(weight, codebook, 8)
    assert codes_of(result).tolist() == [0, 0, 1, 2, 2, 3, 8, 2]


def test_fp4_never_uses_its_negative_zero():
    result, _, _ = encode(np.array([[1, 0, -0.0, 1e-9]], np.float32), FP4, 4)
    assert codes_of(result).tolist() == [3, 0, 0, 0]


def test_zero_blocks_padding_and_chunks(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((7, 37)).astype(np.float32)
    weight.reshape(-1)[64:128] = 0
    whole, largest, rms = encode(weight, NF4, 64)
    monkeypatch.setattr("lut4tool.encode._CHUNK_ELEMENTS", 64)
    pieces, *errors = encode(weight, NF4, 64)
    assert pieces.packed.tobytes() == whole.packed.tobytes()
    assert pieces.scales.tobytes() == whole.scales.tobytes()
    assert errors == pytest.approx([largest, rms], rel=1e-12)
    assert whole.scales[1] == 0
    assert not decode(whole).reshape(-1)[64:128].any()
    assert set(codes_of(whole)[weight.size :]) == {7}  # the code of zero
    absmax = np.repeat(np.abs(np.pad(weight.reshape(-1), (0, 61)).reshape(-1, 64)).max(axis=1), 64)[: weight.size]
    error = np.abs(decode(whole).reshape(-1) - weight.reshape(-1)).astype(np.float64)[absmax > 0] / absmax[absmax > 0]
    assert largest == pytest.approx(error.max(), rel=1e-5)
    assert rms == pytest.approx(np.sqrt(np.square(error).sum() / weight.size), rel=1e-5)


@pytest.mark.parametrize("suffix", ["npy", "json", "txt"])
def test_codebook_files(tmp_path, suffix):
    path, table = tmp_path / f"table.{suffix}", np.linspace(-1, 1, 16, dtype=np.float32)
    if suffix == "npy":
        np.save(path, table)
    else:
        path.write_text(json.dumps(table.tolist()) if suffix == "json" else "\n".join(map(repr, table.tolist())))
    assert load_codebook(path).tobytes() == table.tobytes()
    assert load_codebook(str(path)).tobytes() == table.tobytes()


@pytest.mark.parametrize(
    ("codebook", "words"),
    [
        ("nf5", "neither nf4, fp4 nor a .npy"),
        ("missing.npy", "cannot read codebook file missing.npy: no such file"),
        (np.zeros(16), "not all zero"),
        (np.full(16, np.nan), "finite"),
        (np.full(16, 1e39), "finite"),
        (np.ones(15), r"shape \[15\]; a codebook is 16 numbers"),
        (np.array(["a"] * 16), "not a list of numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_bad_codebooks(codebook, words):
    with pytest.raises(ProduceError, match=words):
        load_codebook(codebook)


@pytest.mark.parametrize("text", ["[1, 2", '{"a": 1}', "[[1, 2], [3]]"])
def test_bad_codebook_file(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ProduceError, match=r"bad\.json.* (numbers|shape)"):
        load_codebook(tmp_path / "bad.json")


# ---- graphs


def weight_of(rows, cols, kind=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(kind)


def x_of(rows=3, cols=64, kind=np.float32):
    return np.random.default_rng(9).standard_normal((rows, cols)).astype(kind)


def test_matmul_equals_numpy_and_is_the_canonical_chain():
    weight = weight_of(64, 37)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    model, report = quantized(model_of([node], {"w": weight}))
    operators = [node.op_type for node in model.graph.node]
    spelled = "Cast Div Unsqueeze Mod Unsqueeze Concat Reshape Gather Unsqueeze Mul Reshape Slice Reshape MatMul"
    assert " ".join(operators) == spelled
    (row,) = report.quantized
    assert (row.weight, row.nodes, row.rows, row.cols) == ("w", ("product",), 64, 37)
    assert row.float_bytes == 64 * 37 * 4
    assert row.packed_bytes == 37 * 36
    x, exact = x_of(), dequantized(weight, 64)
    y = reference(model, x=x)[0]
    assert np.abs(y - x.astype(np.float64) @ exact).max() <= 2**-20 * (np.abs(x) @ np.abs(exact)).max()
    assert not any(tensor.name == "w" for tensor in model.graph.initializer)


def test_the_bytes_are_deterministic():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Gemm", ["t", "v", "b"], ["y"], transB=1)]
    model = model_of(nodes, {"w": weight_of(64, 48), "v": weight_of(8, 48), "b": weight_of(1, 8)[0]})
    first, second = (quantized(model)[0].SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_weights_are_rounded_to_their_own_type(kind):
    half = np.dtype(getattr(ml_dtypes, kind, kind))
    weight = weight_of(64, 20, half)
    model, report = quantized(model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, kind=half))
    assert report.quantized[0].weight_dtype == kind
    assert [node.op_type for node in model.graph.node][-2:] == ["Cast", "MatMul"]
    eye = np.eye(64, dtype=half)
    assert reference(model, x=eye)[0].tobytes() == dequantized(weight, 64).astype(half).tobytes()
    other = "bfloat16" if kind == "float16" else "float16"
    model, report = quantized(
        model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, kind=half), rounding=other
    )
    assert not report.quantized
    assert report.left[0].reason == f"it is {kind}, which cannot be rounded to {other}"


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_rounding_of_a_float32_weight_is_the_adjoint_spelling(rounding):
    weight = weight_of(64, 20)
    model, _ = quantized(
        model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}), rounding=rounding, codebook="fp4"
    )
    assert [node.op_type for node in model.graph.node][-3:] == ["Cast", "Cast", "MatMul"]
    half = np.dtype(getattr(ml_dtypes, rounding, rounding))
    expected = dequantized(weight, 64, FP4).astype(half).astype(np.float32)
    assert reference(model, x=np.eye(64, dtype=np.float32))[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (), (20,), (1, 20), (3, 20), (3, 1)])
def test_gemm_becomes_matmul_and_add(trans_b, bias):
    weight = weight_of(20, 64) if trans_b else weight_of(64, 20)
    constants, inputs = {"w": weight}, ["x", "w"]
    if bias is not None:
        constants["b"] = np.random.default_rng(3).standard_normal(bias).astype(np.float32)
        inputs.append("b")
    node = helper.make_node("Gemm", inputs, ["y"], "gemm", transB=trans_b)
    model, report = quantized(model_of([node], constants, x=(3, 64)), block_size=32)
    assert report.quantized[0].nodes == ("gemm",)
    decoded = dequantized(weight, 32)
    expected = x_of().astype(np.float64) @ (decoded.T if trans_b else decoded) + constants.get("b", 0)
    np.testing.assert_allclose(reference(model, x=x_of())[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"alpha": 0.5}, "Gemm 'gemm' has alpha 0.5"),
        ({"beta": 2.0}, "beta 2.0"),
        ({"transA": 1}, "transA 1"),
        ({"alpha": 2.0, "transA": 1}, "alpha 2.0, transA 1"),
    ],
)
def test_a_gemm_that_is_no_matmul_is_left(attributes, words):
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "gemm", **attributes)
    model = model_of([node], {"w": weight_of(64, 64)}, x=(64, 64))
    after, report = quantized(model)
    assert not report.quantized
    assert words in report.left[0].reason
    assert after.SerializeToString() == model.SerializeToString()


def test_a_shared_weight_is_quantized_once_also_behind_identity_and_transpose():
    weight = weight_of(64, 64)
    nodes = [
        helper.make_node("Identity", ["w"], ["w_same"]),
        helper.make_node("Transpose", ["w_same"], ["w_t"], perm=[1, 0]),
        helper.make_node("Transpose", ["w_t"], ["w_back"]),
        helper.make_node("MatMul", ["x", "w"], ["a"], "forward"),
        helper.make_node("MatMul", ["a", "w_t"], ["b"], "adjoint"),
        helper.make_node("Gemm", ["b", "w_t"], ["c"], "double", transB=1),
        helper.make_node("MatMul", ["c", "w_back"], ["y"], "back"),
    ]
    model, report = quantized(model_of(nodes, {"w": weight}))
    assert [row.nodes for row in report.quantized] == [("forward", "adjoint", "double", "back")]
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Gather") == 1
    assert operators.count("Transpose") == 1
    assert "Identity" not in operators
    decoded = dequantized(weight, 64).astype(np.float64)
    expected = x_of() @ decoded @ decoded.T @ decoded @ decoded
    np.testing.assert_allclose(reference(model, x=x_of())[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (helper.make_node("Gather", ["w", "i"], ["z"], "embedding"), "also used by Gather 'embedding'"),
        (helper.make_node("MatMul", ["w", "x_t"], ["z"], "left"), "input 0 of MatMul 'left'"),
        (helper.make_node("Transpose", ["w"], ["z"]), "an output of the graph"),
    ],
)
def test_a_weight_that_something_else_needs_is_left(other, words):
    nodes = [
        helper.make_node("Transpose", ["x"], ["x_t"]),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
        other,
    ]
    model = model_of(nodes, {"w": weight_of(64, 64), "i": np.array([0])}, ("y", "z"))
    after, report = quantized(model)
    assert not report.quantized
    assert words in report.left[0].reason
    assert after.SerializeToString() == model.SerializeToString()


def test_a_product_without_an_output_is_left():
    """onnx's checker refuses such a model; a file may hold one all the same."""
    mute = helper.make_node("Gemm", ["x", "w", "b"], [], "mute")
    model = model_of([mute], {"w": weight_of(64, 64), "b": np.zeros(64, np.float32)}, ("y",))
    before = model.SerializeToString()
    report = quantize(model, Tensors(None))
    assert report.left[0].reason == "Gemm 'mute' has 0 outputs; one is quantized"
    assert model.SerializeToString() == before


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (np.where(weight_of(64, 64) > 2, np.nan, 1).astype(np.float32), "NaN or Inf"),
        (np.where(weight_of(64, 64) > 2, -np.inf, 1).astype(np.float32), "NaN or Inf"),
        (weight_of(64, 1), "64 elements, fewer than 2 blocks of 64"),
        (weight_of(64, 64, np.float64), "its type is double, not float32, float16, bfloat16"),
        (weight_of(64, 64).reshape(1, 64, 64), "3 dimensions"),
    ],
)
def test_weights_that_cannot_be_quantized_are_left(weight, words):
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, kind=weight.dtype, rank=weight.ndim
    )
    after, report = quantized(model)
    assert not report.quantized
    assert words in report.left[0].reason
    assert after.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    ("kind", "dims", "words"), [(99, [64, 64], "its type is 99, not float32"), (7, [64, 64], "its type is int64, not")]
)
def test_a_weight_that_no_runtime_knows_is_left(kind, dims, words):
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight_of(64, 64)})
    tensor = model.graph.initializer[0]
    tensor.data_type, tensor.dims[:] = kind, dims
    report = quantize(model, Tensors(None))
    assert words in report.left[0].reason


def test_dims_past_64_bits_are_refused():
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight_of(64, 64)})
    model.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]
    with pytest.raises(Lut4Error, match="which no array can have"):
        quantize(model, Tensors(None))


def test_an_initializer_that_a_caller_can_replace_is_left_but_not_in_ir_3():
    listed = [helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64])]
    for ir_version in (3, 8):
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        model = model_of([node], {"w": weight_of(64, 64)}, ir_version=ir_version, extra=listed)
        after, report = quantized(model)
        assert bool(report.quantized) == (ir_version == 3)
        if ir_version == 3:
            assert [value.name for value in after.graph.input] == ["x"]
            assert not after.graph.initializer
            y = reference(after, x=np.eye(64, dtype=np.float32))[0]
            assert y.tobytes() == dequantized(weight_of(64, 64), 64).tobytes()
        else:
            assert report.left[0].reason == "it is a graph input too, so a caller can replace it"


def branch(name, nodes, initializers=()):
    tensors = [numpy_helper.from_array(array, key) for key, array in initializers]
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None])], tensors
    )


def test_subgraphs_with_captured_own_and_constant_weights():
    outer, inner, own = weight_of(64, 64), weight_of(64, 64, seed=1), weight_of(64, 64, seed=2)
    then = branch(
        "then",
        [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("MatMul", ["t", "v"], ["z"])],
        [("v", inner)],
    )
    constant = helper.make_node(
        "Constant", [], ["v"], value=numpy_helper.from_array(own)
    )  # the same name, another weight
    other = branch("else", [constant, helper.make_node("MatMul", ["x", "v"], ["z"], "m")])
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    choose = helper.make_node("If", ["flag"], ["z_"], "choose", then_branch=then, else_branch=other)
    last = helper.make_node("MatMul", ["z_", "w"], ["y"], "last")
    model, report = quantized(model_of([choose, last], {"w": outer}, extra=[flag]))
    nodes = [row.nodes for row in report.quantized]
    assert nodes == [
        ("choose/then_branch/MatMul:t", "last"),
        ("choose/else_branch/m",),
        ("choose/then_branch/MatMul:z",),
    ]
    assert [node.op_type for node in model.graph.node].count("Gather") == 1
    decoded = [dequantized(array, 64).astype(np.float64) for array in (outer, inner, own)]
    for chosen, expected in ((True, decoded[0] @ decoded[1] @ decoded[0]), (False, decoded[2] @ decoded[0])):
        y = reference(model, x=np.eye(64, dtype=np.float32), flag=np.array(chosen))[0]
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_function_keeps_its_constants_in_its_body():
    weight = weight_of(64, 64)
    body = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight)),
        helper.make_node("MatMul", ["a", "w"], ["b"], "inside"),
    ]
    imports = [helper.make_opsetid("", 17)]
    layer = helper.make_function("my.domain", "Layer", ["a"], ["b"], body, imports)
    model = model_of([helper.make_node("Layer", ["x"], ["y"], domain="my.domain")], {})
    model.opset_import.append(helper.make_opsetid("my.domain", 1))
    model.functions.append(layer)
    after, report = quantized(model)
    assert report.quantized[0].nodes == ("function my.domain::Layer/inside",)
    y = reference(after, x=np.eye(64, dtype=np.float32))[0]
    assert y.tobytes() == dequantized(weight, 64).tobytes()


def test_match_chooses_by_weight_or_by_node():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"], "first"),
        helper.make_node("MatMul", ["t", "v"], ["y"], "second"),
    ]
    model = model_of(nodes, {"w": weight_of(64, 64), "v": weight_of(64, 64)})
    for match, chosen in (("^v$", ["v"]), ("first", ["w"]), ("w|second", ["w", "v"]), ("nothing", [])):
        assert [row.weight for row in quantized(model, match=match)[1].quantized] == chosen
    with pytest.raises(ProduceError, match="not a regular expression"):
        quantized(model, match="(")


@pytest.mark.parametrize("option", [{"block_size": 3}, {"block_size": 0}, {"rounding": "float64"}])
def test_bad_options(option):
    with pytest.raises(ProduceError, match=next(iter(option))):
        quantize(model_of([], {}), Tensors(None), **option)


def test_new_names_do_not_collide():
    nodes = [
        helper.make_node("Relu", ["x"], ["w/packed"], "w/lut4/high"),
        helper.make_node("MatMul", ["w/packed", "w"], ["y"]),
    ]
    model, _ = quantized(model_of(nodes, {"w": weight_of(64, 64), "lut4/16": weight_of(1, 1)}))
    names = [node.name for node in model.graph.node if node.name]
    values = [output for node in model.graph.node for output in node.output] + [t.name for t in model.graph.initializer]
    assert len(set(names)) == len(names)
    assert len(set(values)) == len(values)


def test_opset_12_is_converted_and_gives_the_same_outputs():
    weight = weight_of(64, 64)
    nodes = [
        helper.make_node("Unsqueeze", ["x"], ["x3"], axes=[0]),
        helper.make_node("Softmax", ["x3"], ["s"], axis=2),
        helper.make_node("Squeeze", ["s"], ["x2"], axes=[0]),
        helper.make_node("MatMul", ["x2", "w"], ["y"]),
    ]
    model = model_of(nodes, {"w": weight}, x=(3, 64), opset=12)
    model.metadata_props.add(key="kept", value="yes")
    after, report = quantized(model)
    assert (report.opset, report.output_opset) == (12, 13)
    assert report.notes == ("the model was raised from opset 12 to 13, which the chain needs",)
    assert after.opset_import[0].version == 13
    assert after.metadata_props[0].key == "kept"
    assert not after.graph.value_info
    # The same converted graph with the decoded float weight, in another runtime, at opset 12.
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(dequantized(weight, 64), "w"))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [onnxruntime.InferenceSession(m.SerializeToString(), options) for m in (model, after)]
    expected, found = (session.run(None, {"x": x_of()})[0] for session in sessions)
    assert found.tobytes() == expected.tobytes()


def test_an_old_model_with_functions_says_why_it_cannot_be_converted():
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight_of(64, 64)}, opset=12)
    model.functions.append(helper.make_function("d", "F", ["a"], ["a_"], [], [helper.make_opsetid("", 12)]))
    with pytest.raises(ProduceError, match="opset 12 and has functions, which cannot be converted to 13"):
        quantize(model, Tensors(None))


def spelled_models():
    """Name, float model, options, and the facts (rows, cols, perm, weight_dtype, dtype) of each site, in order."""
    plain = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    both = [
        helper.make_node("MatMul", ["x", "w"], ["t"], "forward"),
        helper.make_node("Gemm", ["t", "w", "b"], ["y"], "adjoint", transB=1),
    ]
    inside = branch("inside", [helper.make_node("MatMul", ["x", "w"], ["z"], "m")])
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    choose = [helper.make_node("If", ["flag"], ["y"], "if", then_branch=inside, else_branch=inside)]
    listed = [helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 37])]
    w, square = {"w": weight_of(64, 37)}, {"w": weight_of(64, 64), "b": weight_of(1, 64)[0]}
    half = {"w": weight_of(64, 37, np.float16)}
    to = (64, 37, [0, 1])
    yield "float32", model_of(plain, w), {}, [(*to, "float32", "float32")]
    yield "fp4", model_of(plain, w), {"codebook": "fp4", "block_size": 32}, [(*to, "float32", "float32")]
    yield "forward", model_of(plain, half, kind=np.float16), {}, [(*to, "float16", "float16")]
    yield "adjoint", model_of(plain, w), {"rounding": "bfloat16"}, [(*to, "bfloat16", "float32")]
    shared = [(64, 64, perm, "float16", "float32") for perm in ([0, 1], [1, 0])]
    yield "shared", model_of(both, square), {"rounding": "float16"}, shared
    yield "captured", model_of(choose, w, extra=[flag]), {}, 2 * [(*to, "float32", "float32")]
    yield "IR 3", model_of(plain, w, ir_version=3, extra=listed), {}, [(*to, "float32", "float32")]
    yield "opset 12", model_of(plain, w, opset=12), {}, [(*to, "float32", "float32")]


@pytest.mark.parametrize(
    ("model", "options", "facts"), [pytest.param(*case, id=name) for name, *case in spelled_models()]
)
def test_every_chain_is_recognized_and_decodes_to_the_same_numbers(model, options, facts):
    weight = numpy_helper.to_array(model.graph.initializer[0])
    after, _ = quantized(model, **options)
    report = recognize(after)
    assert not report.refusals
    keys = ("perm", "weight_dtype", "dtype")
    found = [(p.rows, p.cols, *(p.attributes[key] for key in keys)) for p in report.proofs]
    assert found == [
        (rows, cols, perm, ONNX_DTYPE[inner], ONNX_DTYPE[outer]) for rows, cols, perm, inner, outer in facts
    ]
    for proof in report.proofs:
        arrays_ = {key: numpy_helper.to_array(proof.tensor(key)) for key in proof.roles}
        size = options.get("block_size", 64)
        decoded = decode(Lookup4Weight(**arrays_, rows=proof.rows, cols=proof.cols, block_size=size))
        assert decoded.tobytes() == dequantized(weight, size, CODEBOOKS[options.get("codebook", "nf4")]).tobytes()


# ---- files


@pytest.fixture
def saved(tmp_path):
    """A model in a file, with its two weights as external data: w can be quantized, v is also an output."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Identity", ["v"], ["z"])]
    model = model_of(nodes, {"w": weight_of(64, 64), "v": weight_of(64, 64, seed=1)}, ("y", "z"))
    (tmp_path / "in").mkdir()
    onnx.save(model, tmp_path / "in" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return tmp_path / "in" / "m.onnx"


@pytest.mark.parametrize("folder", ["in", "out"])
def test_a_file_with_external_data(saved, folder):
    target = saved.parents[1] / folder / "q.onnx"
    target.parent.mkdir(exist_ok=True)
    before = saved.read_bytes(), (saved.parent / "m.data").read_bytes()
    report = quantize_file(saved, target)
    assert (saved.read_bytes(), (saved.parent / "m.data").read_bytes()) == before
    y, z = reference(onnx.load(target), x=np.eye(64, dtype=np.float32))
    assert y.tobytes() == dequantized(weight_of(64, 64), 64).tobytes()
    assert z.tobytes() == weight_of(64, 64, seed=1).tobytes()
    assert report.input_bytes == saved.stat().st_size + 2 * 64 * 64 * 4
    assert report.output_bytes == target.stat().st_size + 64 * 64 * 4
    assert json.loads(json.dumps(report.to_json()))["quantized"][0]["weight"] == "w"


def test_what_is_there_is_not_replaced_unasked(saved):
    other = saved.with_name("there.onnx")
    other.write_text("mine")
    with pytest.raises(Lut4Error, match=r"there\.onnx exists"):
        quantize_file(saved, other)
    with pytest.raises(ProduceError, match="float weights would be lost"):
        quantize_file(saved, saved)
    assert other.read_text() == "mine"
    quantize_file(saved, other, force=True)
    assert b"w/packed" in other.read_bytes()


def test_nothing_is_written_where_nothing_is_quantized(saved):
    report = quantize_file(saved, saved.with_name("q.onnx"), match="nothing")
    assert not report.quantized
    assert not saved.with_name("q.onnx").exists()


def test_bad_options_leave_no_file(saved):
    with pytest.raises(ProduceError):
        quantize_file(saved, saved.with_name("q.onnx"), codebook="nf5")
    assert sorted(path.name for path in saved.parent.iterdir()) == ["m.data", "m.onnx"]
