"""The operators of onnx/defs/nn: onnx's own node tests, then their options against onnxruntime, in NumPy and in MLX."""

from __future__ import annotations

import itertools

import numpy as np
import onnx.reference
import pytest
from backend_cases import against_onnxruntime, cases, check, single
from onnx import numpy_helper
from places import place  # noqa: F401 - a fixture

from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(7)


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("case", cases("nn"))
def test_node(case):
    check(case)


def convolution(rank: int, group: int, out: int, kernel: int = 3) -> list[np.ndarray]:
    """x [2, 4, 7, 8, ...], w [out, 4 / group, kernel, ...] and b [out]."""
    return [floats(2, 4, *range(7, 7 + rank)), floats(out, 4 // group, *[kernel] * rank), floats(out)]


PADDING = [
    {},
    {"auto_pad": "SAME_UPPER"},
    {"auto_pad": "SAME_LOWER"},
    {"auto_pad": "VALID"},
    {"pads": [2, 1, 0, 3, 1, 2]},
]


def padding(options: dict, rank: int) -> dict:
    """The same options for `rank` axes."""
    return {k: v[:rank] + v[3 : 3 + rank] if k == "pads" else v for k, v in options.items()}


GEOMETRY = [
    (options, stride, dilation)
    for options in PADDING
    for stride, dilation in ((1, 1), (2, 1), (1, 2), (3, 2))
    if dilation == 1 or not options.get("auto_pad", "").startswith("SAME")  # onnxruntime has no such combination
]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("group", "out"), [(1, 6), (2, 6), (4, 4), (4, 8)], ids=["dense", "grouped", "depthwise", "multiplied"]
)
@pytest.mark.parametrize(("options", "stride", "dilation"), GEOMETRY, ids=str)
def test_conv(rank, group, out, options, stride, dilation):
    against_onnxruntime(
        "Conv", 11, convolution(rank, group, out), rtol=1e-4, atol=1e-5, group=group, strides=[stride] * rank,
        dilations=[dilation] * rank, **padding(options, rank),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("auto_pad", "stride", "pads"), [("SAME_UPPER", 1, [2, 2]), ("SAME_UPPER", 2, [1, 2]), ("SAME_LOWER", 2, [2, 1])]
)
def test_same_padding_of_a_dilated_kernel(auto_pad, stride, pads):
    """Of 8 elements, a kernel of 3 with dilation 2 spans 5."""
    x, w = floats(1, 2, 8), floats(3, 2, 3)
    found, expected = (
        Runtime(single("Conv", 11, [x, w], {"strides": [stride], "dilations": [2], **options}, 1)).run(
            None, {"x0": x, "x1": w}
        )
        for options in ({"auto_pad": auto_pad}, {"pads": pads})
    )
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_with_a_kernel_of_one_is_a_product(rank, group, stride):
    against_onnxruntime(
        "Conv",
        11,
        convolution(rank, group, 6, kernel=1)[:2],
        rtol=1e-5,
        atol=1e-5,
        group=group,
        strides=[stride] * rank,
    )


def test_a_large_convolution_is_computed_in_panels():
    """The unrolled input has 16 times the elements of a panel."""
    against_onnxruntime("Conv", 11, [floats(1, 24, 400, 400), floats(2, 24, 3, 3)], rtol=1e-4, atol=1e-4, pads=[1] * 4)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_conv_of_other_types_against_float64(dtype):
    x, w = floats(1, 8, 9, dtype=dtype), floats(4, 8, 3, dtype=dtype)
    (y,) = Runtime(single("Conv", 11, [x, w], {}, 1), device="cpu").run(None, {"x0": x, "x1": w})
    exact = np.stack(
        [np.tensordot(w.astype(np.float64), x[0, :, t : t + 3].astype(np.float64), 2) for t in range(7)], 1
    )
    assert y.dtype == dtype
    np.testing.assert_allclose(
        y[0], exact, rtol=1e-3 if dtype == np.float16 else 1e-13, atol=1e-3 if dtype == np.float16 else 1e-13
    )


TRANSPOSED = [
    {},
    {"pads": [1, 0, 1, 0, 1, 1]},
    {"output_padding": [1, 1, 1]},
    {"pads": [1, 1, 0, 0, 1, 1], "output_padding": [0, 1, 0]},
    {"auto_pad": "SAME_UPPER"},
    {"auto_pad": "SAME_LOWER"},
    {"output_shape": [13, 15, 17]},
    {"output_shape": [12, 14, 16], "auto_pad": "SAME_LOWER"},
    {"output_shape": [12, 14, 16], "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (2, 2), (3, 1)])
def test_conv_transpose(rank, group, options, stride, dilation):
    chosen = {k: v[:rank] if k.startswith("output") else v for k, v in padding(options, rank).items()}
    x, w = floats(2, 4, *range(5, 5 + rank)), floats(4, 3, *[3] * rank)
    if "output_shape" in chosen:
        chosen["output_shape"] = [stride * (n - 1) + 2 * dilation for n in x.shape[2:]]
    against_onnxruntime(
        "ConvTranspose", 11, [x, w, floats(3 * group)], rtol=1e-4, atol=1e-5, group=group, strides=[stride] * rank,
        dilations=[dilation] * rank, **chosen,
    )  # fmt: skip


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_of_no_batch(rank, group, kernel):
    x, w = np.zeros((0, 4, *[5] * rank), np.float32), floats(4, 4 // group, *[kernel] * rank)
    against_onnxruntime("Conv", 11, [x, w], group=group)
    against_onnxruntime("ConvTranspose", 11, [x, w], group=group, strides=[2] * rank)


def test_an_infinite_weight_reaches_only_its_taps():
    x, w = floats(1, 2, 4, 4), floats(2, 3, 2, 2)
    w[1, 1, 0, 1] = np.inf
    node = single("ConvTranspose", 11, [x, w], {"strides": [2, 2]}, 1)
    del node.graph.input[1]
    node.graph.initializer.append(numpy_helper.from_array(w, "x1"))
    (found,) = Runtime(node, device="cpu").run(None, {"x0": x})
    wanted = np.ones((1, 3, 8, 8), bool)
    wanted[:, 1, ::2, 1::2] = False
    assert (np.isfinite(found) == wanted).all()
    assert not np.isnan(found).any()


POOLS = [
    {},
    {"ceil_mode": 1},
    {"pads": [1, 1, 1, 0, 1, 1]},
    {"pads": [0, 1, 1, 1, 1, 0], "ceil_mode": 1},
    {"auto_pad": "SAME_UPPER"},
    {"auto_pad": "SAME_LOWER"},
    {"auto_pad": "VALID"},
]


POOLED = [
    (options, kernel, stride, dilation)
    for options in POOLS
    for kernel, stride, dilation in ((3, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2))
    if dilation == 1
    or not options.get("auto_pad", "").startswith("SAME")  # onnxruntime pads as if there were no dilation
]


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("options", "kernel", "stride", "dilation"), POOLED, ids=str)
def test_pools(rank, options, kernel, stride, dilation):
    x = floats(2, 3, *range(7, 7 + rank))
    chosen = padding(options, rank) | {"kernel_shape": [kernel] * rank, "strides": [stride] * rank}
    spread = {"dilations": [dilation] * rank}
    against_onnxruntime("MaxPool", 12, [x], **chosen, **spread)
    for order in (0, 1):
        against_onnxruntime("MaxPool", 12, [x], outputs=2, storage_order=order, **chosen, **spread)
    for include in (0, 1):
        against_onnxruntime("AveragePool", 19, [x], rtol=1e-5, atol=1e-6, count_include_pad=include, **chosen, **spread)
    if "ceil_mode" not in chosen:
        against_onnxruntime("AveragePool", 7, [x], rtol=1e-5, atol=1e-6, **chosen)
        against_onnxruntime("LpPool", 18, [x], rtol=1e-4, atol=1e-6, p=3, **chosen, **spread)
        against_onnxruntime("LpPool", 11, [x], rtol=1e-5, atol=1e-6, **chosen)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64])
def test_max_pool_of_other_types(dtype):
    x = (floats(1, 2, 6, 7) * 50).astype(dtype)
    against_onnxruntime("MaxPool", 12, [x], kernel_shape=[3, 2], pads=[1, 1, 1, 1])


@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_global_pools(op_type, rank):
    against_onnxruntime(op_type, 9, [floats(2, 3, *range(4, 4 + rank))], rtol=1e-5)


@pytest.mark.parametrize("version", [9, 11])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [0, 1, 0, 1]])
def test_max_unpool_of_a_max_pool(version, pads):
    x = floats(1, 2, 6, 8)
    options = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": pads}
    pooled, where = Runtime(single("MaxPool", version, [x], options, 2), device="cpu").run(None, {"x0": x})
    against_onnxruntime("MaxUnpool", version, [pooled, where], **options)


@pytest.mark.parametrize("version", [7, 9, 14, 15])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 3, 3)], ids=str)
def test_batch_normalization(version, shape):
    if version == 7 and len(shape) == 2:
        shape = (*shape, 1)  # onnxruntime wants a spatial axis there
    inputs = [floats(*shape), floats(4), floats(4), floats(4), np.abs(floats(4)) + np.float32(0.1)]
    against_onnxruntime("BatchNormalization", version, inputs, rtol=1e-4, atol=1e-5, epsilon=1e-3)


def test_batch_normalization_in_training_before_14():
    """The running values and the batch's own, against NumPy: no other runtime trains."""
    x, scale, b, mean, var = floats(2, 4, 5), floats(4), floats(4), floats(4), np.abs(floats(4))
    model = single("BatchNormalization", 9, [x, scale, b, mean, var], {"momentum": 0.8}, 5)
    found = Runtime(model, device="cpu").run(
        None, dict(zip(("x0", "x1", "x2", "x3", "x4"), (x, scale, b, mean, var), strict=True))
    )
    wide = x.astype(np.float64)
    now_mean, now_var = wide.mean((0, 2)), wide.var((0, 2))
    y = (wide - now_mean[:, None]) / np.sqrt(now_var[:, None] + 1e-5) * scale[:, None] + b[:, None]
    expected = [y, 0.8 * mean + 0.2 * now_mean, 0.8 * var + 0.2 * now_var, now_mean, now_var]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_batch_normalization_of_each_element():
    """Version 7 with spatial 0, against NumPy: onnxruntime refuses it."""
    x, (scale, b, mean), var = floats(2, 3, 4), floats(3, 3, 4), np.abs(floats(3, 4))
    inputs = [x, scale, b, mean, var]
    model = single("BatchNormalization", 7, inputs, {"spatial": 0}, 1)
    (y,) = Runtime(model, device="cpu").run(None, {f"x{i}": data for i, data in enumerate(inputs)})
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5) * scale + b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_normalization(axis, bias):
    x = floats(2, 3, 4)
    shape = x.shape[axis:] if axis else x.shape
    inputs = [x, floats(*shape), floats(*shape)][: 3 if bias else 2]
    against_onnxruntime("LayerNormalization", 17, inputs, outputs=3, rtol=1e-4, atol=1e-5, axis=axis)


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 4, 3, 3)], ids=str)
def test_instance_normalization(shape):
    against_onnxruntime("InstanceNormalization", 6, [floats(*shape), floats(4), floats(4)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("version", "scales"), [(18, 2), (21, 6)])
def test_group_normalization_has_a_scale_a_group_then_a_channel(version, scales):
    against_onnxruntime(
        "GroupNormalization",
        version,
        [floats(2, 6, 4, 3), floats(scales), floats(scales)],
        rtol=1e-4,
        atol=1e-5,
        num_groups=2,
    )


def test_group_normalization_with_as_many_groups_as_channels():
    against_onnxruntime(
        "GroupNormalization", 18, [floats(2, 4, 5), floats(4), floats(4)], rtol=1e-4, atol=1e-5, num_groups=4
    )


@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn(size):
    against_onnxruntime("LRN", 13, [floats(2, 7, 3, 3)], rtol=1e-5, size=size, alpha=0.3, beta=0.6, bias=1.5)


@pytest.mark.parametrize(("axis", "p"), [*itertools.product([-1, 0, 1], [1, 2])])
def test_lp_normalization(axis, p):
    x = floats(3, 4)
    x[1] = 0
    against_onnxruntime("LpNormalization", 7, [x], rtol=1e-5, axis=axis, p=p)


@pytest.mark.parametrize(("version", "outputs"), [(7, 1), (10, 1), (12, 2), (13, 2)])
def test_dropout_is_the_identity(version, outputs):
    against_onnxruntime("Dropout", version, [floats(3, 4)], outputs=outputs)


def test_dropout_in_training_keeps_a_share_and_scales_it():
    x, rate, training = np.ones((100, 100), np.float32), np.array(0.25, np.float32), np.array(True)
    model = single("Dropout", 13, [x, rate, training], {"seed": 3}, 2)
    feeds = {"x0": x, "x1": rate, "x2": training}
    y, mask = Runtime(model, device="cpu").run(None, feeds)
    np.testing.assert_array_equal(y, np.where(mask, np.float32(4 / 3), 0))
    assert abs(mask.mean() - 0.75) < 0.02
    np.testing.assert_array_equal(mask, Runtime(model, device="cpu").run(None, feeds)[1])


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_flatten(axis):
    against_onnxruntime("Flatten", 13, [floats(2, 3, 4)], axis=axis)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_shrink(dtype):
    against_onnxruntime("Shrink", 9, [(floats(4, 5) * 3).astype(dtype)], lambd=1.5, bias=1.0)


def test_mean_variance_normalization():
    against_onnxruntime("MeanVarianceNormalization", 13, [floats(2, 3, 4, 5)], rtol=1e-4, atol=1e-5)


def test_max_roi_pool():
    rois = np.array([[0, 0, 0, 5, 5], [1, 2, 1, 7, 4], [1, 3, 3, 3, 3]], np.float32)
    against_onnxruntime("MaxRoiPool", 7, [floats(2, 3, 8, 9), rois], pooled_shape=[2, 3], spatial_scale=0.8)


@pytest.mark.parametrize(("group", "offsets", "masked"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_deform_conv(group, offsets, masked):
    inputs = [
        floats(2, 4, 6, 7),
        floats(6, 4 // group, 3, 2),
        floats(2, offsets * 12, 4, 6),
        floats(6),
        floats(2, offsets * 6, 4, 6),
    ]
    against_onnxruntime(
        "DeformConv", 19, inputs[: 5 if masked else 4], rtol=1e-4, atol=1e-4, group=group, offset_group=offsets,
        kernel_shape=[3, 2],
    )  # fmt: skip


ATTENTION = [
    {"is_causal": 1},
    {"qk_matmul_output_mode": 2, "scale": 0.3, "softcap": 2.0},
    {"qk_matmul_output_mode": 1, "softcap": 1.5},
    {"qk_matmul_output_mode": 3},
]


@pytest.mark.parametrize("options", ATTENTION, ids=str)
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention(options, past, mask):
    q, k, v = floats(2, 4, 5, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 6)
    masks = {"none": None, "bool": RNG.random((5, 5 + past)) < 0.7, "float": floats(2, 1, 5, 5 + past)}
    if mask == "bool":
        masks["bool"][:, 0] = True
    cache = [floats(2, 2, past, 8), floats(2, 2, past, 6)] if past else [None, None]
    model = single("Attention", 23, [q, k, v, masks[mask], *cache], options, 4)
    feeds = {f"x{i}": data for i, data in enumerate([q, k, v, masks[mask], *cache]) if data is not None}
    expected = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    found = Runtime(model, device="cpu").run(None, feeds)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("kind", ["integers", "strings"])
@pytest.mark.parametrize(("shortest", "skips"), [(1, 0), (1, 2), (2, 1)])
def test_tf_idf_vectorizer(mode, kind, shortest, skips):
    pool, x = [2, 3, 5, 4, 5, 6, 7, 8, 6, 7], RNG.integers(2, 9, (3, 12))
    options = {"pool_int64s": pool} if kind == "integers" else {"pool_strings": [str(item) for item in pool]}
    against_onnxruntime(
        "TfIdfVectorizer", 9, [x if kind == "integers" else x.astype(str).astype(object)], **options, mode=mode,
        min_gram_length=shortest, max_gram_length=2, max_skip_count=skips, ngram_counts=[0, 4],
        ngram_indexes=[0, 1, 2, 3, 4, 5, 6], weights=[0.5, 1.0, 2.0, 0.1, 3.0, 0.7, 1.5],
    )  # fmt: skip
