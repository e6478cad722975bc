"""The operators of onnx/defs/traditionalml, on onnx's own node tests, then against onnxruntime."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from onnx import TensorProto, helper

from lut4tool.runtime.graph import RunError
from lut4tool.runtime.session import Runtime

DOMAIN = "ai.onnx.ml"
RNG = np.random.default_rng(3)
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
against = partial(against_onnxruntime, domain=DOMAIN, rtol=1e-5, atol=1e-6)


def onnxruntime_session(model: onnx.ModelProto) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def listed(*shape: int) -> list[float]:
    return floats(*shape).reshape(-1).tolist()


def strings(*values: str) -> np.ndarray:
    return np.array(values, object)


@pytest.mark.parametrize("case", cases("traditionalml"))
def test_node(case):
    check(case)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_scaler(count, dtype):
    against("Scaler", 1, [(floats(4, 3) * 5).astype(dtype)], offset=listed(count), scale=listed(count))


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
@pytest.mark.parametrize(
    "x", [floats(4, 3), floats(5), np.array([[0, 0], [0, -2], [3, 4]], np.int64)], ids=["2d", "1d", "zero"]
)
def test_normalizer(norm, x):
    against("Normalizer", 1, [x], norm=norm)


def test_one_hot_encoder():
    against("OneHotEncoder", 1, [np.array([[1, 5], [7, 2]], np.int64)], cats_int64s=[1, 2, 5])
    against("OneHotEncoder", 1, [np.array([1.7, 5.0], np.float32)], cats_int64s=[1, 2, 5])
    against("OneHotEncoder", 1, [strings("b", "x", "a")], cats_strings=["a", "b"])


def test_one_hot_encoder_may_refuse_what_it_does_not_know():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["ai.onnx.ml" : 1]> g (int64[N] x) => (float[N, M] y)'
        "{ y = ai.onnx.ml.OneHotEncoder <zeros = 0, cats_int64s = [1, 2]> (x) }"
    )
    with pytest.raises(RunError, match=r"OneHotEncoder.*none of the categories"):
        Runtime(model, device="cpu").run(None, {"x": np.array([1, 3])})


def test_feature_vectorizer():
    against("FeatureVectorizer", 1, [floats(2, 3), floats(2, 2)], inputdimensions=[3, 2])
    against("FeatureVectorizer", 1, [np.arange(6, dtype=np.int64).reshape(2, 3)] * 2, inputdimensions=[2, 4])


def test_imputer():
    x = np.array([[1, np.nan, 3], [np.nan, 5, 1]], np.float32)
    against("Imputer", 1, [x], imputed_value_floats=[9.0], replaced_value_float=float("nan"))
    against("Imputer", 1, [x], imputed_value_floats=[7.0, 8.0, 9.0], replaced_value_float=1.0)
    against("Imputer", 1, [np.array([[1, 2, 1]])], imputed_value_int64s=[7, 8, 9], replaced_value_int64=1)


def test_category_mapper():
    table = {"cats_strings": ["a", "b"], "cats_int64s": [10, 20]}
    against("CategoryMapper", 1, [strings("b", "?", "a").reshape(3, 1)], default_int64=-7, **table)
    against("CategoryMapper", 1, [np.array([20, 5, 10])], default_string="none", **table)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("labels", [{"classlabels_ints": [3, 1, 2]}, {"classlabels_strings": ["a", "b", "c"]}])
def test_linear_classifier(transform, labels):
    against(
        "LinearClassifier", 1, [floats(5, 4)], outputs=2, coefficients=listed(3, 4), intercepts=listed(3),
        post_transform=transform, **labels,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_linear_classifier_of_other_types(dtype):
    x = (floats(5, 4) * 3).astype(dtype)
    attributes = {"coefficients": listed(3, 4), "intercepts": listed(3), "classlabels_ints": [0, 1, 2]}
    against("LinearClassifier", 1, [x], outputs=2, **attributes)


# onnxruntime leaves a single target as it is.
@pytest.mark.parametrize(("transform", "targets"), [("NONE", 1), *((transform, 3) for transform in TRANSFORMS)])
def test_linear_regressor(transform, targets):
    against(
        "LinearRegressor", 1, [floats(5, 4)], coefficients=listed(targets, 4), intercepts=listed(targets),
        targets=targets, post_transform=transform,
    )  # fmt: skip


def test_probit():
    x = np.array([[0.1, 0.9], [0.5, 0.3]], np.float32)
    against(  # onnxruntime's formula for it is good to 1e-3
        "LinearRegressor", 1, [x], coefficients=[1.0, 0.0, 0.0, 1.0], targets=2, post_transform="PROBIT",
        rtol=5e-3, atol=1e-3,
    )  # fmt: skip


KERNELS = [
    ("LINEAR", [0.0, 0.0, 0.0]),
    ("POLY", [0.4, 0.5, 3.0]),
    ("RBF", [0.3, 0.0, 0.0]),
    ("SIGMOID", [0.2, 0.1, 0.0]),
]


@pytest.mark.parametrize(("kernel", "parameters"), KERNELS, ids=[name for name, _ in KERNELS])
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kernel, parameters, one_class):
    against(
        "SVMRegressor", 1, [floats(6, 4)], coefficients=listed(5), support_vectors=listed(5, 4), n_supports=5,
        rho=[0.3], kernel_type=kernel, kernel_params=parameters, one_class=one_class,
    )  # fmt: skip


def test_svm_regressor_without_vectors():
    x, weights = floats(6, 4), listed(4)
    model = single("SVMRegressor", 1, [x], {"coefficients": weights, "rho": [0.3]}, 1, DOMAIN)
    (found,) = Runtime(model, device="cpu").run(None, {"x0": x})
    np.testing.assert_allclose(found, x @ np.array(weights)[:, None] + 0.3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kernel", "parameters"), KERNELS, ids=[name for name, _ in KERNELS])
@pytest.mark.parametrize("vectors", [[2, 3], [2, 3, 2, 1]], ids=["two", "four"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("names", [False, True])
def test_svm_classifier(kernel, parameters, vectors, probabilities, names):
    classes, pairs = len(vectors), len(vectors) * (len(vectors) - 1) // 2
    chance = {"prob_a": [-1.2] * pairs, "prob_b": listed(pairs)} if probabilities else {}
    labels = {"classlabels_strings": list("dcba")[:classes]} if names else {"classlabels_ints": [4, 3, 2, 1][:classes]}
    against(
        "SVMClassifier", 1, [floats(9, 4)], outputs=2, coefficients=listed(classes - 1, sum(vectors)),
        support_vectors=listed(sum(vectors), 4), vectors_per_class=vectors, rho=listed(pairs), kernel_type=kernel,
        kernel_params=parameters, atol=5e-3 if probabilities else 1e-5, **labels, **chance,
    )  # fmt: skip


def trees(targets: int, prefix: str, *, sparse: bool = False, positive: bool = False) -> dict[str, Any]:
    """Two trees: (x0 <= 0.1 ? leaf 1 : (x1 > -0.2 ? leaf 3 : leaf 4)) and (x2 < 0.3 ? leaf 1 : leaf 2).

    sparse: each leaf weighs one target, else all of them.
    """
    leaves = [(0, 1), (0, 3), (0, 4), (1, 1), (1, 2)]
    if sparse:
        rows = [(*leaf, index % targets) for index, leaf in enumerate(leaves)]
    else:
        rows = [(*leaf, target) for leaf in leaves for target in range(targets)]
    weights = listed(len(rows))
    return {
        "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1], "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
        "nodes_featureids": [0, 0, 1, 0, 0, 2, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "BRANCH_GT", "LEAF", "LEAF", "BRANCH_LT", "LEAF", "LEAF"],
        "nodes_values": [0.1, 0.0, -0.2, 0.0, 0.0, 0.3, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 3, 0, 0, 1, 0, 0], "nodes_falsenodeids": [2, 0, 4, 0, 0, 2, 0, 0],
        "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 1, 0, 0],
        f"{prefix}_treeids": [tree for tree, _, _ in rows], f"{prefix}_nodeids": [node for _, node, _ in rows],
        f"{prefix}_ids": [target for _, _, target in rows],
        f"{prefix}_weights": [abs(weight) for weight in weights] if positive else weights,
    }  # fmt: skip


X = np.where(RNG.random((12, 3)) < 0.1, np.nan, floats(12, 3)).astype(np.float32)


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tree_ensemble_regressor(aggregate, targets, base, dtype):
    extra = {"base_values": listed(targets)} if base else {}
    model = trees(targets, "target")
    x = X.astype(dtype)
    against("TreeEnsembleRegressor", 1, [x], n_targets=targets, aggregate_function=aggregate, **model, **extra)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_tree_ensemble_classifier(transform, names, sparse):
    labels = {"classlabels_strings": list("cba")} if names else {"classlabels_int64s": [7, 5, 6]}
    model = trees(3, "class", sparse=sparse)
    against("TreeEnsembleClassifier", 1, [X], outputs=2, post_transform=transform, **model, **labels)


def test_tree_ensemble_classifier_of_two_scores():
    """The scores as in onnxruntime, whose label is 0 or 1 there and looks at one score alone: the higher one it is."""
    attributes = {**trees(2, "class"), "classlabels_int64s": [7, 5]}
    expected = onnxruntime_session(single("TreeEnsembleClassifier", 1, [X], attributes, 2, DOMAIN)).run(None, {"x0": X})
    model = single("TreeEnsembleClassifier", 1, [X], attributes, 2, DOMAIN)
    labels, scores = Runtime(model, device="cpu").run(None, {"x0": X})
    np.testing.assert_allclose(scores, expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(labels, np.array([7, 5])[np.argmax(expected[1], axis=1)])


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("base", [{}, {"base_values": [0.2]}], ids=["", "base"])
def test_tree_ensemble_classifier_of_one_score(transform, positive, base):
    model = trees(1, "class", positive=positive)
    labels = {"classlabels_int64s": [0, 1]}
    against("TreeEnsembleClassifier", 1, [X], outputs=2, post_transform=transform, **labels, **base, **model)


def test_trees_in_float64():
    double = partial(helper.make_tensor, data_type=TensorProto.DOUBLE)
    model = trees(1, "target")
    splits, weights = model.pop("nodes_values"), model.pop("target_weights")
    model["nodes_values_as_tensor"] = double("splits", dims=[len(splits)], vals=splits)
    model["target_weights_as_tensor"] = double("weights", dims=[len(weights)], vals=weights)
    against("TreeEnsembleRegressor", 3, [X.astype(np.float64)], n_targets=1, **model)


def map_model(op_type: str, key: int, value: int, attributes: dict[str, Any]) -> onnx.ModelProto:
    """One operator on a map."""
    given = onnx.ValueInfoProto(name="x")
    given.type.map_type.key_type = key
    given.type.map_type.value_type.CopyFrom(helper.make_tensor_type_proto(value, []))
    node = helper.make_node(op_type, ["x"], ["y"], domain=DOMAIN, **attributes)
    graph = helper.make_graph([node], "maps", [given], [onnx.ValueInfoProto(name="y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=8)


FLOAT, STRING, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.DOUBLE, TensorProto.INT64
SPARSE = {"map_form": "SPARSE", "max_map": 5}


@pytest.mark.parametrize(
    ("op_type", "value", "feed", "attributes", "expected", "dtype"),
    [
        ("CastMap", FLOAT, {3: 1.5, 1: 2.5}, {}, [[2.5, 1.5]], np.float32),
        ("CastMap", FLOAT, {3: 1.5, 1: 2.5}, {"cast_to": "TO_INT64"}, [[2, 1]], np.int64),
        ("CastMap", FLOAT, {3: 1.5, 1: 2.5}, SPARSE, [[0, 2.5, 0, 1.5, 0]], np.float32),
        ("CastMap", STRING, {3: "1.5", 1: "2"}, SPARSE, [[0, 2, 0, 1.5, 0]], np.float32),
        ("CastMap", STRING, {3: "x", 1: "y"}, {"cast_to": "TO_STRING"}, [["y", "x"]], object),
        ("DictVectorizer", FLOAT, {3: 1.5, 1: 2.5}, {"int64_vocabulary": [1, 2, 3]}, [[2.5, 0, 1.5]], np.float32),
        ("DictVectorizer", INT64, {"a": 4, "c": 8}, {"string_vocabulary": list("acbz")}, [[4, 8, 0, 0]], np.int64),
        ("DictVectorizer", DOUBLE, {"a": 4.0}, {"string_vocabulary": ["b", "a"]}, [[0, 4]], np.float64),
        ("DictVectorizer", STRING, {2: "two"}, {"int64_vocabulary": [1, 2]}, [["", "two"]], object),
    ],
)  # fmt: skip
def test_maps(op_type, value, feed, attributes, expected, dtype):
    key = TensorProto.STRING if isinstance(next(iter(feed)), str) else TensorProto.INT64
    model = map_model(op_type, key, value, attributes)
    (found,) = Runtime(model, device="cpu").run(None, {"x": feed})
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)
    if value == TensorProto.FLOAT:  # the only maps that onnxruntime's Python makes of a dict
        (theirs,) = onnxruntime_session(model).run(None, {"x": feed})
        assert found.dtype == theirs.dtype
        np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [5, 6]}, {"classlabels_strings": ["a", "b"]}])
def test_zip_map(labels):
    node = helper.make_node("ZipMap", ["x"], ["y"], domain=DOMAIN, **labels)
    x = floats(3, 2)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])
    result = onnx.ValueInfoProto(name="y")
    key = TensorProto.STRING if "classlabels_strings" in labels else TensorProto.INT64
    result.type.sequence_type.elem_type.map_type.key_type = key
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    result.type.sequence_type.elem_type.map_type.value_type.CopyFrom(kind)
    graph = helper.make_graph([node], "zip", [given], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=8)
    assert Runtime(model, device="cpu").run(None, {"x": x}) == onnxruntime_session(model).run(None, {"x": x})
